"""S3-FIFO: a small queue on probation, a main queue, and a memory of what left the small one.

           insert                    2 hits or more
    key ──────────▶ small (10 %) ─────────────────────▶ main ◀─┐
     │                 │                                  │    │ hit since: once more around
     │ in ghost        │ fewer: evicted, remembered       └────┘
     └──────────────▶  ghost ──▶ (inserted again: straight to main)

After Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023. One-time prompts pass through the
small queue and never push out what is used again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
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

    @property
    def _small_target(self) -> int:
        return max(1, int(self.capacity * _SMALL_SHARE))

    def insert(self, keys: Iterable[Key]) -> None:
        small, main, ghost = self._small, self._main, self._ghost
        for key in keys:
            if key in ghost:
                del ghost[key]
                main[key] = 0
            else:
                small[key] = 0

    def touch(self, keys: Iterable[Key]) -> None:
        small, main = self._small, self._main
        for key in keys:
            queue = small if key in small else main
            hits = queue[key]
            if hits < _MAX_HITS:
                queue[key] = hits + 1

    def candidates(self, count: int) -> list[Key]:
        chosen: list[Key] = []
        self._from_small(count, chosen, keep=self._small_target)
        self._from_main(count, chosen)
        if len(chosen) < count:
            # Main has nothing more to give: the small queue gives what it held back, or keys that earned main.
            chosen = []
            self._from_small(count, chosen, keep=0)
            self._from_main(count, chosen)
        return chosen

    def _from_small(self, count: int, chosen: list[Key], keep: int) -> None:
        """Move on to main what earned it, choose the rest in order, until the queue is down to `keep`."""
        left = len(self._small)
        earned = []
        for key, hits in self._small.items():
            if left <= keep or len(chosen) == count:
                break
            left -= 1
            if hits >= _HITS_TO_STAY:
                earned.append(key)
            else:
                chosen.append(key)
        for key in earned:
            del self._small[key]
            self._main[key] = 0

    def _from_main(self, count: int, chosen: list[Key]) -> None:
        taken = set(chosen)
        for _ in range(_MAX_HITS + 1):
            if len(chosen) == count:
                return
            again = []
            for key, hits in self._main.items():
                if len(chosen) == count:
                    break
                if key in taken:
                    continue
                if hits:
                    again.append(key)
                else:
                    chosen.append(key)
                    taken.add(key)
            for key in again:
                self._main[key] -= 1
                self._main.move_to_end(key)

    def evict(self, keys: Sequence[Key]) -> None:
        small, main, ghost = self._small, self._main, self._ghost
        for key in keys:
            if key in small:
                del small[key]
                ghost[key] = None
            else:
                del main[key]
        for key in list(islice(ghost, max(0, len(ghost) - self.capacity))):
            del ghost[key]

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del (self._small if key in self._small else self._main)[key]

    def postpone(self, keys: Sequence[Key]) -> None:
        for key in keys:
            (self._small if key in self._small else self._main).move_to_end(key)

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._ghost.clear()

    def keys(self) -> Collection[Key]:
        return [*self._small, *self._main]

    def check(self) -> None:
        ensure(self._small.keys().isdisjoint(self._main), "s3fifo: a key is in both queues")
        ensure(self._ghost.keys().isdisjoint(self.keys()), "s3fifo: a cached key is remembered as gone")
        ensure(len(self._ghost) <= self.capacity, "s3fifo: the ghost queue outgrew the capacity")
