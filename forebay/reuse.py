"""How far back the blocks of a prompt were last used: stack distances of prefix-structured blocks.

Everything that was used, newest on top, where the blocks of one prompt are one batch:

    newest  [ prompt 9 ][ prompt 7 ][ prompt 4 ]  oldest        least recently used of C blocks: the top C stay

A prompt is a path from the root of a tree of prefixes. Whoever uses it again uses a part of the path that begins
at its head, so what is left of a batch is the tail of its path, and from head to tail a path was last used ever
longer ago. So a prompt falls into a few runs with one answer each, however many blocks it has.

Memory is bounded: as long as at most `max_blocks` were used, all of them are kept and every number is exact.
Beyond, only the newest `near_blocks` are all kept, and below them a sample: blocks whose hash lies below a
threshold, which sinks as more come. (SHARDS with a fixed size: Waldspurger et al., "Efficient MRC construction
with SHARDS", FAST 2015. There the newest are sampled like the others; but the few blocks that every prompt begins
with are a good part of all uses, and a sample has them or has not.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import compress, groupby, repeat
from typing import NamedTuple

from forebay.errors import ensure

HASH_RANGE = 1 << 64
NEAR_BLOCKS = 4096

_KEEP = 0.75  # of the sample, when it has grown too large
_STALE = 1.25  # times as many blocks as are kept, before those that are not are looked for
_MIN_BATCHES = 1024


class Run(NamedTuple):
    """Blocks of a prompt, one behind the other, that were last used together."""

    turn: int
    """Which use that was. Later ones have higher numbers."""
    newer: float
    """Blocks used since. Whole and exact, like the other two, if `known`."""
    left: float
    """Blocks used then and not since: these, and those behind them."""
    blocks: float
    known: bool
    """Not an estimate from a sample."""


class Counts:
    """Numbers in a row, and sums of them from the front (a Fenwick tree)."""

    def __init__(self, counts: Sequence[int], room: int) -> None:
        self.counts = [*counts, *repeat(0, room - len(counts))]
        self.total = sum(counts)
        sums = self._sums = [0, *self.counts]
        for at in range(1, len(sums)):
            above = at + (at & -at)
            if above < len(sums):
                sums[above] += sums[at]

    def add(self, at: int, count: int) -> None:
        self.counts[at] += count
        self.total += count
        sums, at = self._sums, at + 1
        while at < len(sums):
            sums[at] += count
            at += at & -at

    def after(self, at: int) -> int:
        """The sum of all behind this one."""
        sums, rest, at = self._sums, self.total, at + 1
        while at:
            rest -= sums[at]
            at &= at - 1
        return rest


class ReuseStack:
    def __init__(self, max_blocks: int, rate: float = 1.0, near_blocks: int = NEAR_BLOCKS) -> None:
        """`rate`: below 1, only a sample is kept from the start, of this share of the blocks."""
        self._max_blocks = max_blocks
        self._near_blocks = near_blocks
        self._threshold = round(rate * HASH_RANGE)
        self.clear()

    def clear(self) -> None:
        """Forget what was used. What share of it is kept from now on stays as it is."""
        self._last: dict[int, int] = {}  # block -> turn in which it was last used
        self._turn = 0
        self._turns: list[int] = []  # those that something is left of, at least; by their place, the counts:
        self._near = Counts([], _MIN_BATCHES)  # what is left of them, from the first near one on
        self._far = Counts([], _MIN_BATCHES)  # what is left of them in the sample, before that one
        self._sampled = [0] * _MIN_BATCHES  # what is left of them in the sample, near and far
        self._first_near = 0  # a place

    @property
    def rate(self) -> float:
        """The share of blocks that is kept below the newest."""
        return self._threshold / HASH_RANGE

    @property
    def turns(self) -> Sequence[int]:
        """Of all blocks that are kept, the turns in which they were last used, ascending; and some more."""
        return self._turns

    def use(self, path: Sequence[int]) -> list[Run]:
        """A prompt uses these blocks, head first, each named by a hash of all up to it that is evenly spread below
        HASH_RANGE. Returns when they were used before, from the head on, as far as they were and that is known."""
        last, near = self._last, self._near
        runs: list[Run] = []
        at = 0
        first_near_turn = self._turns[self._first_near] if self._turns else 0
        for turn, group in groupby(map(last.get, path)):
            if turn is None or turn < first_near_turn:
                break
            count = sum(1 for _ in group)
            place = bisect_left(self._turns, turn)
            runs.append(Run(turn, near.after(place), near.counts[place], count, known=True))
            at += count
        if self._threshold < HASH_RANGE:
            self._use_sampled(path, at, runs)
        else:
            for run in runs:
                near.add(bisect_left(self._turns, run.turn), -int(run.blocks))
        if path:
            self._append(path)
        return runs

    def _use_sampled(self, path: Sequence[int], at: int, runs: list[Run]) -> None:
        """The rest of `path` from `at` on is far or new; take all of it out of the counts."""
        threshold, scale = self._threshold, HASH_RANGE / self._threshold
        near, far = self._near, self._far
        begin = 0
        for run in runs:
            place, end = bisect_left(self._turns, run.turn), begin + int(run.blocks)
            near.add(place, begin - end)
            self._sampled[place] -= sum(1 for block in path[begin:end] if block < threshold)
            begin = end
        known = near.total + at  # before they were taken out
        rest = [block for block in path[at:] if block < threshold]
        gone: list[tuple[int, int]] = []
        for turn, group in groupby(map(self._last.get, rest)):
            if turn is None:
                break
            count = sum(1 for _ in group)
            place = bisect_left(self._turns, turn)
            newer, left = known + far.after(place) * scale, far.counts[place] * scale
            runs.append(Run(turn, newer, left, count * scale, known=False))
            gone.append((place, count))
        for place, count in gone:
            far.add(place, -count)
            self._sampled[place] -= count

    def _append(self, path: Sequence[int]) -> None:
        """They are the newest now."""
        if len(self._turns) == len(self._near.counts):
            self._compact()
        place, threshold = len(self._turns), self._threshold
        self._turns.append(self._turn)
        self._last.update(zip(path, repeat(self._turn)))
        self._turn += 1
        self._near.add(place, len(path))
        if threshold < HASH_RANGE:
            self._sampled[place] = sum(1 for block in path if block < threshold)
            self._demote()
            if len(self._last) > _STALE * (self._max_blocks + 2 * self._near_blocks):
                self._forget_unsampled()
            if self._far.total > self._max_blocks:
                self._sample_fewer()
        elif len(self._last) > self._max_blocks:
            self._sample_fewer()

    def _demote(self) -> None:
        """Batches that are below the newest `near_blocks` are far: only their sample counts from now on."""
        near, far = self._near, self._far
        while self._first_near < len(self._turns) - 1:
            place = self._first_near
            if near.total - near.counts[place] < self._near_blocks:
                return
            near.add(place, -near.counts[place])
            far.add(place, self._sampled[place])
            self._first_near += 1

    def _forget_unsampled(self) -> None:
        edge, threshold = self._turns[self._first_near], self._threshold
        self._last = {block: turn for block, turn in self._last.items() if turn >= edge or block < threshold}

    def _sample_fewer(self) -> None:
        """Lower the threshold, and count anew what is left of each batch below it."""
        edge = self._turns[self._first_near]
        if self._threshold == HASH_RANGE:
            edge = self._turn  # so far all were near
        kept = sorted(block for block, turn in self._last.items() if block < self._threshold and turn < edge)
        self._threshold = kept[int(len(kept) * _KEEP)]
        threshold, place_of = self._threshold, {turn: place for place, turn in enumerate(self._turns)}
        self._sampled = [0] * len(self._near.counts)
        for block, turn in self._last.items():
            if block < threshold:
                self._sampled[place_of[turn]] += 1
        self._far = Counts(self._sampled[: self._first_near], len(self._near.counts))
        self._demote()
        self._forget_unsampled()

    def _compact(self) -> None:
        """Turns that nothing is left of lose their place; if there are few of those, there will be more places."""
        size = len(self._turns)
        used = [self._near.counts[i] > 0 or self._sampled[i] > 0 for i in range(size)]
        first_near = sum(used[: self._first_near])
        num_used = sum(used)
        room = max(_MIN_BATCHES, 2 * num_used)
        self._near = Counts(list(compress(self._near.counts, used)), room)
        self._far = Counts(list(compress(self._far.counts, used)), room)
        self._sampled = [*compress(self._sampled, used), *repeat(0, room - num_used)]
        self._turns = list(compress(self._turns, used))
        self._first_near = first_near

    def check(self) -> None:
        """Raise InvariantError unless the counts are those of the blocks kept."""
        edge = self._turns[self._first_near] if self._turns else 0
        near, far = [0] * len(self._near.counts), [0] * len(self._far.counts)
        for block, turn in self._last.items():
            place = bisect_left(self._turns, turn)
            if turn >= edge:
                near[place] += 1
            elif block < self._threshold:
                far[place] += 1
        ensure(near == self._near.counts and sum(near) == self._near.total, "reuse: the newest are miscounted")
        ensure(far == self._far.counts and sum(far) == self._far.total, "reuse: the sample is miscounted")
