"""Least recently used."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import repeat
from operator import is_

from forebay.errors import ensure
from forebay.ids import Key
from forebay.policies.base import Policy

_MIN_STALE = 1024  # entries that no longer count, before it is worth looking for them


class LRU(Policy):
    """A queue of batches. A key counts where it was put last; older entries of it are stale and skipped.

        oldest [ a b c ] [ d e ] [ a b ] newest        order of eviction: c e d b a

    Inserting or hitting a prompt appends one list and updates one dict, both in C; no linked list is rewired key
    by key. Stale entries are swept when they outnumber the others.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._batches: deque[list[Key]] = deque()  # each head first: its last key goes first
        self._last_put: dict[Key, list[Key]] = {}  # the batch in which a key counts
        self._entries = 0  # over all batches

    def insert(self, keys: Sequence[Key]) -> None:
        batch = list(keys)
        self._batches.append(batch)
        self._last_put.update(zip(batch, repeat(batch)))
        self._entries += len(batch)
        if self._entries > 2 * len(self._last_put) + _MIN_STALE:
            self._sweep()

    def touch(self, keys: Sequence[Key]) -> None:
        self.insert(keys)

    def candidates(self) -> Iterator[Key]:
        batches, last_put = self._batches, self._last_put
        while batches:
            batch = batches[0]
            while batch:
                key = batch.pop()
                self._entries -= 1
                if last_put.get(key) is batch:
                    del last_put[key]
                    yield key
            batches.popleft()

    def oldest(self, count: int) -> Sequence[Key]:
        batches, put_in = self._batches, self._last_put.get
        while batches:
            batch = batches[0]
            while batch and put_in(batch[-1]) is not batch:
                batch.pop()
                self._entries -= 1
            if batch:
                keys = batch[: -count - 1 : -1]
                counts = list(map(is_, map(put_in, keys), repeat(batch)))
                return keys if all(counts) else keys[: counts.index(False)]
            batches.popleft()
        return ()

    def evict(self, keys: Sequence[Key]) -> None:
        deque(map(self._last_put.pop, keys, repeat(None)), maxlen=0)
        if keys and self._batches and self._batches[0][: -len(keys) - 1 : -1] == keys:
            # They are at the end of the oldest batch, where somebody else would have to skip them one by one.
            del self._batches[0][-len(keys) :]
            self._entries -= len(keys)

    def remove(self, keys: Sequence[Key]) -> None:
        deque(map(self._last_put.__delitem__, keys), maxlen=0)

    def postpone(self, keys: Sequence[Key]) -> None:
        self.insert(keys)

    def clear(self) -> None:
        self._batches.clear()
        self._last_put.clear()
        self._entries = 0

    def keys(self) -> Collection[Key]:
        return self._last_put.keys()

    def _sweep(self) -> None:
        last_put = self._last_put
        for batch in self._batches:
            batch[:] = [key for key in batch if last_put.get(key) is batch]
        self._batches = deque(batch for batch in self._batches if batch)
        self._entries = len(last_put)

    def check(self) -> None:
        ensure(self._entries == sum(map(len, self._batches)), "lru: entries are counted wrong")
        counting = [key for batch in self._batches for key in batch if self._last_put.get(key) is batch]
        ensure(len(counting) == len(self._last_put), "lru: a key has no place in the order, or two")
