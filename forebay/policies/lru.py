"""Least recently used: one queue, hits go to its end."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat

from forebay.ids import Key
from forebay.policies.base import Policy


class LRU(Policy):
    # An OrderedDict, not a dict: the front of a dict from which keys were deleted is found only by stepping
    # over every deleted entry, so evicting one block at a time from a large pool would cost its size.
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, keys: Iterable[Key]) -> None:
        deque(map(self._order.__setitem__, keys, repeat(None)), maxlen=0)

    def touch(self, keys: Iterable[Key]) -> None:
        deque(map(self._order.move_to_end, keys), maxlen=0)

    def candidates(self) -> Iterator[Key]:
        order = self._order
        while order:
            yield order.popitem(last=False)[0]

    def evict(self, keys: Sequence[Key]) -> None:
        """Nothing is remembered."""

    def remove(self, keys: Sequence[Key]) -> None:
        deque(map(self._order.__delitem__, keys), maxlen=0)

    def postpone(self, keys: Sequence[Key]) -> None:
        self.insert(keys)

    def clear(self) -> None:
        self._order.clear()

    def keys(self) -> Collection[Key]:
        return self._order.keys()
