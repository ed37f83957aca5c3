"""Small builders for tests of the pool and its policies: keys from small numbers, blocks stored at once."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Protocol

from forebay.ids import Key, Slot, make_key
from forebay.policies import Policy, policy_class
from forebay.pool import HostPool


class NewestFirst(Policy):
    """Evicts what came last and ignores hits: the order that spoils chains most, heads before their tails."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()  # the first to go first

    def insert(self, keys: Sequence[Key]) -> None:
        for each in reversed(keys):
            self._order[each] = None
            self._order.move_to_end(each, last=False)

    def touch(self, keys: Sequence[Key]) -> None:
        pass

    def candidates(self) -> Iterator[Key]:
        while self._order:
            yield self._order.popitem(last=False)[0]

    def evict(self, keys: Sequence[Key]) -> None:
        for each in keys:
            self._order.pop(each, None)

    def remove(self, keys: Sequence[Key]) -> None:
        for each in keys:
            del self._order[each]

    def postpone(self, keys: Sequence[Key]) -> None:
        for each in reversed(keys):
            self._order[each] = None

    def clear(self) -> None:
        self._order.clear()

    def keys(self) -> Collection[Key]:
        return list(self._order)


CUSTOM = f"{__name__}:NewestFirst"  # as a user would name it in `eviction_policy`
POLICY_NAMES = ("lru", "s3fifo", "arc", CUSTOM)


# --- keys -------------------------------------------------------------------------------------------------


def key(number: int) -> Key:
    return make_key(number.to_bytes(4, "big"), 0)


def keys(*wanted: int) -> list[Key]:
    return [key(number) for number in wanted]


def leaving(*wanted: int) -> list[Key]:
    """A batch, as policies take it, whose keys are the first to go in the order given."""
    return keys(*reversed(wanted))


def numbers(some_keys: Iterable[Key]) -> list[int]:
    """The numbers that keys were built from, in the order given."""
    return [int.from_bytes(each, "big") for each in some_keys]


# --- policies ---------------------------------------------------------------------------------------------


def make_policy(name: str, capacity: int) -> Policy:
    return policy_class(name)(capacity)


def take(policy: Policy, count: int) -> list[Key]:
    """Candidates, no more of them than wanted. They have to be answered."""
    return list(islice(policy.candidates(), count))


def evict(policy: Policy, count: int) -> list[int]:
    """Let the first candidates go and say which they were."""
    victims = take(policy, count)
    policy.evict(victims)
    policy.check()
    return numbers(victims)


def order(policy: Policy) -> list[int]:
    """Everything in the order in which it would go. Changes nothing."""
    return numbers(deepcopy(policy).candidates())


# --- pools ------------------------------------------------------------------------------------------------


def make_pool(name: str, slots: int, ready: int | None = None) -> HostPool:
    return HostPool(slots, make_policy(name, slots), ready)


def cache(pool: HostPool, wanted: Sequence[Key]) -> list[Slot]:
    """Store keys that do not build on each other. There must be room."""
    return _arrive(pool, wanted, pool.reserve(wanted, chained=False))


def cache_chain(pool: HostPool, chain: Sequence[Key], above: Key | None = None) -> list[Slot]:
    """Store a run of a chain: each key builds on the one before it, the first on `above`. There must be room."""
    return _arrive(pool, chain, pool.reserve(chain, chained=True, above=above))


def _arrive(pool: HostPool, wanted: Sequence[Key], slots: list[Slot]) -> list[Slot]:
    pool.commit(wanted, slots)
    pool.release(slots)
    return slots


def cached_numbers(pool: HostPool) -> list[int]:
    return sorted(numbers(pool.index()))


def evict_one(pool: HostPool) -> int:
    """Make room for exactly one more block and say which key had to go for it."""
    pool.take_removed()
    pool.make_room(pool.free + 1)
    (gone,) = numbers(pool.take_removed())
    return gone


def check_idle(pool: HostPool, *pinned: Slot) -> None:
    """The books are right, nothing is being stored, and nothing is pinned but these slots, each once."""
    pool.check(Counter(pinned), (), {})


# --- caches -----------------------------------------------------------------------------------------------


class Cache(Protocol):
    """A cache of one-block entries, as papers describe one."""

    def access(self, number: int) -> bool:
        """Whether it was a hit. A miss caches the entry."""


class PoolCache:
    """A whole HostPool, used one block at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.pool = make_pool(name, capacity)

    def access(self, number: int) -> bool:
        wanted = keys(number)
        if wanted[0] in self.pool:
            self.pool.touch(wanted)
            return True
        assert self.pool.make_room(1) == 1
        cache(self.pool, wanted)
        return False


class PolicyCache:
    """A policy without a pool around it, asked for one victim at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.policy = make_policy(name, capacity)

    def access(self, number: int) -> bool:
        wanted = keys(number)
        held = self.policy.keys()
        if wanted[0] in held:
            self.policy.touch(wanted)
            return True
        if len(held) == self.policy.capacity:
            evict(self.policy, 1)
        self.policy.insert(wanted)
        return False


def hits(tested: Cache, trace: Iterable[int]) -> int:
    return sum(tested.access(number) for number in trace)


def first_difference(tested: Cache, reference: Cache, trace: Iterable[int]) -> int | None:
    """The first access that only one of them hits."""
    for position, number in enumerate(trace):
        if tested.access(number) != reference.access(number):
            return position
    return None


def random_traces(seeds: int, different: int, accesses: int) -> list[list[int]]:
    """Uniform accesses to so few keys that every queue and every memory of a small cache is used."""
    return [random.Random(seed).choices(range(different), k=accesses) for seed in range(seeds)]


def popular_and_scans(seed: int = 7, accesses: int = 6_000) -> list[int]:
    """Popular keys drawn by rank (Zipf), with a scan of keys that never come back after every fifth part."""
    rng = random.Random(seed)
    popular = range(400)
    weights = [1 / (rank + 1) ** 0.9 for rank in popular]
    trace: list[int] = []
    for part in range(5):
        trace += rng.choices(popular, weights, k=accesses // 5)
        trace += range(1_000 + part * 100, 1_100 + part * 100)
    return trace
