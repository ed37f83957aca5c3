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
from itertools import compress, repeat
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
        self._last: dict[int, int] = {}  # block -> turn in which it was last used
        self._turn = 0
        self._turns: list[int] = []  # those that something is left of, at least; by their place, the counts:
        self._near = Counts([], _MIN_BATCHES)  # what is left of them, from the first near one on
        self._far = Counts([], _MIN_BATCHES)  # what is left of them in the sample, before that one
        self._sampled = [0] * _MIN_BATCHES  # what is left of them in the sample, near and far
        self._tidy_at = int(_STALE * max_blocks)  # blocks in memory
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
        if not path:
            return []
        runs: list[Run] = []
        if self._turns:
            known = self._near.total
            start = self._use_near(path, runs)
            if self._threshold < HASH_RANGE and start < len(path):
                self._use_far(path[start:], known, runs)
        self._append(path)
        return runs

    def _use_near(self, path: Sequence[int], runs: list[Run]) -> int:
        """Take what is near out of the counts; returns where the rest begins."""
        near, turns, first_turn = self._near, self._turns, self._turns[self._first_near]
        found = list(map(self._last.get, path))
        gone: list[tuple[int, int]] = []
        start, end = 0, len(found)
        while start < end:
            turn = found[start]
            if turn is None or turn < first_turn:
                break
            stop = end if found[-1] == turn else next(i for i in range(start, end) if found[i] != turn)
            place, size = bisect_left(turns, turn), stop - start
            runs.append(Run(turn, near.after(place), near.counts[place], size, True))
            gone.append((place, size))
            if self._threshold < HASH_RANGE:
                self._sampled[place] -= len(self._in_sample(path[start:stop]))
            start = stop
        for place, size in gone:
            near.add(place, -size)
        return start

    def _use_far(self, rest: Sequence[int], known: int, runs: list[Run]) -> None:
        """What is not near is far, or new. Take it out of the counts."""
        far, scale = self._far, HASH_RANGE / self._threshold
        by_turn: dict[int, list[int]] = {}
        for block in self._in_sample(rest):
            turn = self._last.get(block)
            if turn is None:
                break
            by_turn.setdefault(turn, []).append(block)
        gone: list[tuple[int, int]] = []
        for turn, blocks in by_turn.items():
            place, size = bisect_left(self._turns, turn), len(blocks)
            newer, left = known + far.after(place) * scale, far.counts[place] * scale
            runs.append(Run(turn, newer, left, size * scale, False))
            gone.append((place, size))
        for place, size in gone:
            far.add(place, -size)
            self._sampled[place] -= size

    def _in_sample(self, blocks: Sequence[int]) -> list[int]:
        threshold = self._threshold
        return [block for block in blocks if block < threshold]

    def _append(self, path: Sequence[int]) -> None:
        """They are the newest now."""
        if len(self._turns) == len(self._near.counts):
            self._compact()
        place, sampling = len(self._turns), self._threshold < HASH_RANGE
        self._turns.append(self._turn)
        self._last.update(zip(path, repeat(self._turn)))
        self._turn += 1
        self._near.add(place, len(path))
        if sampling:
            self._sampled[place] = len(self._in_sample(path))
            self._demote()
        if len(self._last) > self._tidy_at:
            self._tidy()

    def _tidy(self) -> None:
        """There may be too many blocks in memory, or too many that will not be found again."""
        self._forget_stale()
        keep = self._max_blocks + (2 * self._near_blocks if self._threshold < HASH_RANGE else 0)
        if len(self._last) > keep:
            self._sample_fewer()
        self._tidy_at = int(_STALE * keep)

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

    def _forget_stale(self) -> None:
        """What is not in the sample and no longer near is found no more: nobody needs it."""
        near, threshold = self._turns[self._first_near], self._threshold
        self._last = {block: turn for block, turn in self._last.items() if turn >= near or block < threshold}

    def _sample_fewer(self) -> None:
        """Lower the threshold, and count anew what is left of each batch below it."""
        near = self._turns[self._first_near] if self._threshold < HASH_RANGE else self._turn
        sample = sorted(block for block, turn in self._last.items() if turn < near)
        if not sample:
            return
        self._threshold = threshold = sample[int(len(sample) * _KEEP)]
        self._sampled = [0] * len(self._near.counts)
        place_of = {turn: place for place, turn in enumerate(self._turns)}
        for block, turn in self._last.items():
            if block < threshold:
                self._sampled[place_of[turn]] += 1
        self._far = Counts(self._sampled[: self._first_near], len(self._near.counts))
        self._demote()
        self._forget_stale()

    def _compact(self) -> None:
        """Turns that nothing is left of lose their place; if there are few of those, there will be more places."""
        size = len(self._turns)
        used = [self._near.counts[i] > 0 or self._sampled[i] > 0 for i in range(size)]
        num_used = sum(used)
        room = max(_MIN_BATCHES, 2 * num_used)
        self._first_near = sum(used[: self._first_near])
        self._near = Counts(list(compress(self._near.counts, used)), room)
        self._far = Counts(list(compress(self._far.counts, used)), room)
        self._sampled = [*compress(self._sampled, used), *repeat(0, room - num_used)]
        self._turns = list(compress(self._turns, used))

    def check(self) -> None:
        """Raise InvariantError unless the counts are those of the blocks kept."""
        near, far = [0] * len(self._near.counts), [0] * len(self._far.counts)
        for block, turn in self._last.items():
            place = bisect_left(self._turns, turn)
            if place >= self._first_near and self._turns[place] == turn:
                near[place] += 1
            elif self._turns[place] == turn and block < self._threshold:
                far[place] += 1
        ensure(near == self._near.counts and sum(near) == self._near.total, "reuse: the newest are miscounted")
        ensure(far == self._far.counts and sum(far) == self._far.total, "reuse: the sample is miscounted")
