"""What an eviction policy is.

The pool owns the control flow of an eviction; a policy supplies the verbs. It orders keys, and it never sees
slots, pins or requests: a key that must stay for now is handed back with `postpone`, so no policy can evict a
pinned block or a head before its tail, whatever its order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

from forebay.ids import Key


class Policy(ABC):
    """An order over the cached keys. All methods take whole batches and are called from one thread.

    Every cached key is in the policy exactly once, from `insert` until `evict` or `remove`. Chains are handed
    over head first: in a batch the last key is the first that may go.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the number of slots. Policies that keep sizes of their own derive them from it."""
        self.capacity = capacity

    @abstractmethod
    def insert(self, keys: Sequence[Key]) -> None:
        """These keys were just cached. None of them is in the policy."""

    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None:
        """These cached keys were hit; the first of them is the most recent."""

    @abstractmethod
    def candidates(self) -> Iterator[Key]:
        """Keys, the first to go first, until none is left or the pool has enough. A key that was yielded has left
        the order: for each one the pool then says what became of it, with `postpone` or `evict`, before it calls
        anything else."""

    def oldest(self, count: int) -> Sequence[Key]:
        """The first candidates, up to `count` or fewer, which stay in the order. Policies that can tell them
        without a change of that order should: the pool then evicts ends of chains together, not key by key."""
        return ()

    @abstractmethod
    def evict(self, keys: Sequence[Key]) -> None:
        """These keys are gone: candidates, or others that had to go in the place of one. A policy with a memory of
        what it evicted remembers them."""

    @abstractmethod
    def remove(self, keys: Sequence[Key]) -> None:
        """These keys are gone for a reason that says nothing about their worth (a failed load)."""

    @abstractmethod
    def postpone(self, keys: Sequence[Key]) -> None:
        """These candidates must stay. They go back to the end of the queue they came from, the first of them last.
        This is not a hit."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything, also memories of evicted keys."""

    @abstractmethod
    def keys(self) -> Collection[Key]:
        """All keys held, for check()."""

    def resize(self, capacity: int) -> None:
        """The number of slots changed."""
        self.capacity = capacity

    def check(self) -> None:  # noqa: B027  a policy without inner books has nothing to check
        """Raise InvariantError where the policy's own books disagree."""
