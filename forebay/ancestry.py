"""Which key builds on which."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.ids import Key


class Ancestry:
    """Which key builds on which, for the blocks of requests that have ended, until about `size` others ended after
    them. The device's eviction order has only blocks; the chain they came from is not in it."""

    def __init__(self, size: int) -> None:
        self._size = max(1, size)
        self._recent: dict[Key, Key] = {}
        self._older: dict[Key, Key] = {}

    def remember(self, chain: Sequence[Key]) -> None:
        self._recent.update(zip(chain[1:], chain, strict=False))
        if len(self._recent) > self._size:
            self._older, self._recent = self._recent, {}

    def parent(self, key: Key) -> Key | None:
        return self._recent.get(key) or self._older.get(key)
