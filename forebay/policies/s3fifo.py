"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.

           insert                    2 hits or more
    key ──────────▶ small (10 %) ─────────────────────▶ main ◀─┐
     │                 │                                  │    │ hit since: once more around
     │ in ghost        │ fewer: evicted, remembered       └────┘
     └──────────────▶  ghost ──▶ (inserted again: straight to main)

After Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. One-time prompts pass through the
small queue and never push out what is used again. The ghost remembers as many keys as the main queue may hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from forebay.errors import ensure
from forebay.ids import Key
from forebay.policies.base import Policy

_SMALL_SHARE = 0.1
_MAX_HITS = 3
_HITS_TO_STAY = 2


class S3FIFO(Policy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small: OrderedDict[Key, int] = OrderedDict()  # key -> hits, at most _MAX_HITS
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, None] = OrderedDict()
        self._out: dict[Key, tuple[OrderedDict[Key, int], int]] = {}  # candidates: where from, with how many hits

    @property
    def _small_target(self) -> int:
        return max(1, int(self.capacity * _SMALL_SHARE))

    @property
    def _ghost_target(self) -> int:
        return max(1, self.capacity - self._small_target)

    def insert(self, keys: Sequence[Key]) -> None:
        small, main, ghost = self._small, self._main, self._ghost
        for key in reversed(keys):
            if key in ghost:
                del ghost[key]
                main[key] = 0
            else:
                small[key] = 0

    def touch(self, keys: Sequence[Key]) -> None:
        small, main = self._small, self._main
        for key in reversed(keys):
            queue = small if key in small else main
            hits = queue[key]
            if hits < _MAX_HITS:
                queue[key] = hits + 1

    def candidates(self) -> Iterator[Key]:
        small, main = self._small, self._main
        while small or main:
            if small and (len(small) >= self._small_target or not main):
                key, hits = small.popitem(last=False)
                if hits >= _HITS_TO_STAY:
                    main[key] = 0
                    continue
                self._out[key] = small, hits
            else:
                key, hits = main.popitem(last=False)
                if hits:
                    main[key] = hits - 1
                    continue
                self._out[key] = main, hits
            yield key

    def evict(self, keys: Sequence[Key]) -> None:
        ghost = self._ghost
        for key in keys:
            queue, _ = self._out.pop(key)
            if queue is self._small:
                ghost[key] = None
        for key in list(islice(ghost, max(0, len(ghost) - self._ghost_target))):
            del ghost[key]

    def postpone(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            queue, hits = self._out.pop(key)
            queue[key] = hits

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del (self._small if key in self._small else self._main)[key]

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._ghost.clear()

    def keys(self) -> Collection[Key]:
        return [*self._small, *self._main]

    def check(self) -> None:
        ensure(self._small.keys().isdisjoint(self._main), "s3fifo: a key is in both queues")
        ensure(self._ghost.keys().isdisjoint(self.keys()), "s3fifo: a cached key is remembered as gone")
        ensure(len(self._ghost) <= self._ghost_target, "s3fifo: the ghost queue outgrew the main queue")
        ensure(not self._out, "s3fifo: a candidate was neither evicted nor postponed")
