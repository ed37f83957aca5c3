"""Belady's bound: what the best possible cache of a size would find, with all of the future known.

To find a block again means to have kept it since its last use. So every use of a block but its first is an
interval, a cache of C blocks is C places that hold one interval at a time, and the best cache fits in the most
intervals: those that end first come first, each in the place that became free last before the interval begins.
Intervals come in the order of their ends when a trace is simply read, so the future need not be known after all,
only heard of in time. (The same as evicting what is used again last, and not keeping what is used again later than
all else.)

No cache does better with prefixes either, where a block behind a missing one is no hit: that only takes hits away.
And this one loses none by it: a head is used whenever its tail is, so its intervals end no later, and are fitted
in before those of the tail.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from forebay.reuse import Run

_MIN_STEPS = 1024


class BestCache:
    """One size. Places that became free in the same turn are counted together."""

    def __init__(self, blocks: int) -> None:
        self._free_since = [-1]  # turns, ascending
        self._places: list[float] = [blocks]  # for each of them, how many
        self.known_hits: float = 0
        self.sampled_hits: float = 0

    def use(self, runs: Iterable[Run], now: int) -> None:
        """A prompt came in turn `now`, and its blocks had been used before as these runs say."""
        free_since, places = self._free_since, self._places
        fitted: float = 0
        for run in runs:
            wanted: float = run.blocks
            last = at = bisect_right(free_since, run.turn)
            while wanted and at:
                at -= 1
                taken = min(wanted, places[at])
                wanted -= taken
                places[at] -= taken
            if at < last:
                keep = at + 1 if places[at] else at
                del free_since[keep:last], places[keep:last]
            fitted += run.blocks - wanted
            if run.known:
                self.known_hits += run.blocks - wanted
            else:
                self.sampled_hits += run.blocks - wanted
        if fitted:
            free_since.append(now)
            places.append(fitted)

    def simplify(self, turns: Sequence[int]) -> None:
        """Only these turns, and later ones, can be the beginning of an interval: places that became free between
        two of them are the same to all that may come."""
        if len(self._free_since) < _MIN_STEPS + 2 * len(turns):
            return
        by_turn: dict[int, float] = {}
        begin = 0
        for since, places in zip(self._free_since, self._places, strict=True):
            while begin < len(turns) and turns[begin] < since:
                begin += 1
            turn = turns[begin] if begin < len(turns) else since
            by_turn[turn] = by_turn.get(turn, 0) + places
        self._free_since, self._places = list(by_turn), list(by_turn.values())
