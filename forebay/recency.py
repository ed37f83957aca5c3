"""About how many blocks were used since a block was last used: at little cost, and in fixed memory.

Everything that was used, newest last, in batches: at first the blocks of one prompt, later those of several.

    oldest  [ prompts 0 to 8 ][ 9 to 12 ][ 13 ][ 14 ]  newest         what is left of each, in blocks

The older a batch, the larger it may be. Where in it a prompt lies is then taken from the prompt's number, and is
wrong by a small part of what is newer. (`forebay.reuse` does the same exactly, for the planner, for several times
the cost.)

If too many blocks are known, older ones are thinned out to a sample by their hashes, where one block stands for
all of them. (SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import repeat
from operator import le, lt

from forebay.errors import ensure

_MAX_BATCHES = 512
_PRECISION = 64  # two batches become one if they hold at most this part of what is newer
_MOST_THINNED = 48


Seen = tuple[float, int]
"""Of a prompt, blocks that were last used together: how many were used since, and how many these are."""
Sampled = tuple[float, int, int]
"""A block that was used before and stands for all that are not in the sample: how many were used since, for how
many it stands, and how many of the prompt lie before it."""


class Recency:
    def __init__(self, max_known: int, near_blocks: int, depth: float) -> None:
        """What lies `depth` blocks deep is forgotten. The newest `near_blocks` are not thinned out, if
        they are much fewer than `max_known`: the few that every prompt begins with are a good part of all uses,
        and a sample has them or has not."""
        self._max_known = max_known
        self._near_blocks = near_blocks
        self._depth = depth
        self._thinned = 0  # how often half of the older blocks were left out
        self.clear()

    def clear(self) -> None:
        """Forget what was used. What share of the older blocks is known stays as it is."""
        # Block -> the turn in which it was last used. What is used goes to the new ones. When the last of the old
        # ones lies too deep they go all at once: to look for those that do would cost more than all the rest.
        self._new: dict[Hashable, int] = {}
        self._old: dict[Hashable, int] = {}
        self._new_from = 1  # a turn
        self._turn = 1
        self._starts: list[int] = []  # by batch, its first turn
        self._ends: list[int] = []  # its last turn
        self._left: list[int] = []  # blocks used then and not since; of a sample, right on average, or below 0
        self._known: list[int] = []  # how many of them are in the two dicts
        self._total = 0
        self._thin_until = 0  # a turn: of batches before it, a sample is known

    @property
    def rate(self) -> float:
        """The share of the older blocks that is known."""
        return 1 / (1 << self._thinned)

    @property
    def num_known(self) -> int:
        """Blocks in memory; some of them twice, and some will be forgotten."""
        return len(self._new) + len(self._old)

    def use(self, path: Sequence[Hashable], sums: Sequence[int]) -> tuple[list[Seen], list[Sampled]]:
        """A prompt uses these blocks, head first, each named by all of the prompt up to it. `sums`: for how many
        blocks none of them, the first, the first two, … stand. Returns when they were used before: from the head
        on, as far as all are known; and behind that, the sample, whose numbers are right only on average."""
        turn, size, last, starts = self._turn, len(path), self._new, self._starts
        seen: list[Seen] = []
        sampled: list[Sampled] = []
        used = last.get(path[0]) or self._old.get(path[0])
        if used is not None or self._thinned:
            if used is not None and self._whole(used) and used == (last.get(path[-1]) or self._old.get(path[-1])):
                # Mostly all of it was used before and together, or nothing.
                batch, newer = self._place(used)
                seen.append((newer, sums[size]))
                self._take(batch, sums[size], size)
            else:
                self._take_apart(path, sums, seen, sampled)
        last.update(zip(path, repeat(turn)))
        self._turn = turn + 1
        starts.append(turn)
        self._ends.append(turn)
        self._left.append(sums[size])
        self._known.append(size)
        self._total += sums[size]
        while self._total - self._left[0] >= self._depth:
            self._total -= self._left.pop(0)
            del starts[0], self._ends[0], self._known[0]
        if starts[0] >= self._new_from:
            self._start_anew(last)
        if len(starts) > _MAX_BATCHES:
            self._merge()
        if len(self._new) + len(self._old) > self._max_known:
            self._thin()
        return seen, sampled

    def _start_anew(self, known: dict[Hashable, int]) -> None:
        self._old, self._new, self._new_from = known, {}, self._turn

    def _whole(self, turn: int) -> bool:
        """Whether all blocks of that turn are known."""
        return turn >= self._thin_until and turn >= self._starts[0]

    def _take(self, batch: int, blocks: int, known: int) -> None:
        self._left[batch] -= blocks
        self._total -= blocks
        self._known[batch] -= known

    def _take_apart(
        self, path: Sequence[Hashable], sums: Sequence[int], seen: list[Seen], sampled: list[Sampled]
    ) -> None:
        """Take what was used before out of the batches it is in."""
        if not self._starts:
            return
        taken: list[tuple[int, int, int]] = []  # what is to be taken once all of it was seen
        new, old = self._new.get, self._old.get
        found = [new(block) or old(block) for block in path]
        start, end = 0, len(found)
        while start < end:
            turn = found[start]
            if turn is None or not self._whole(turn):
                break
            stop = end if found[-1] == turn else next(i for i in range(start, end) if found[i] != turn)
            blocks = sums[stop] - sums[start]
            batch, newer = self._place(turn)
            seen.append((newer, blocks))
            taken.append((batch, blocks, stop - start))
            start = stop
        if self._thinned:
            mask = (1 << self._thinned) - 1
            for i in range(start, end):
                if hash(path[i]) & mask:
                    continue
                turn = found[i]
                if turn is None or turn < self._starts[0]:
                    break
                blocks = sums[i + 1] - sums[i] << self._thinned
                batch, newer = self._place(turn)
                sampled.append((newer, blocks, sums[i]))
                taken.append((batch, blocks, 1))
        for each in taken:
            self._take(*each)

    def _place(self, turn: int) -> tuple[int, float]:
        """The batch of a turn, and how many blocks are newer."""
        batch = bisect_right(self._starts, turn) - 1
        newer: float = sum(self._left[batch + 1 :])
        start, end = self._starts[batch], self._ends[batch]
        if start < end:
            newer += self._left[batch] * (end - turn) / (end - start + 1)
        return batch, newer

    def _merge(self) -> None:
        """Make fewer batches: neighbours become one where that matters least, and empty ones go."""
        precision = float(_PRECISION)
        while len(self._starts) > _MAX_BATCHES // 2:
            merged: list[tuple[int, int, int, int]] = []
            newer = 0  # than the last one of these
            for batch in reversed(list(zip(self._starts, self._ends, self._left, self._known, strict=True))):
                start, _, left, known = batch
                if not left and not known:
                    continue
                if merged:
                    next_start, next_end, next_left, next_known = merged[-1]
                    alike = not start < self._thin_until <= next_start
                    if alike and (left + next_left) * precision <= max(0, newer):
                        merged[-1] = start, next_end, left + next_left, known + next_known
                        continue
                    newer += next_left
                merged.append(batch)
            rows = zip(*reversed(merged), strict=True)
            self._starts, self._ends, self._left, self._known = map(list, rows)
            precision /= 2

    def _thin(self) -> None:
        """Forget what lies too deep; and if there are still many, some of the older blocks."""
        known = {block: turn for block, turn in self._all_known().items() if turn >= self._starts[0]}
        if len(known) > self._max_known // 2:
            until = self._thin_until = max(self._thin_until, self._first_near())
            while True:
                mask = (1 << self._thinned) - 1
                known = {block: turn for block, turn in known.items() if turn >= until or not hash(block) & mask}
                if len(known) <= self._max_known // 2 or self._thinned == _MOST_THINNED:
                    break
                self._thinned += 1
        self._start_anew(known)
        self._known = self._count_known()

    def _first_near(self) -> int:
        """The first turn of the newest blocks, as far as there is room for them."""
        turn, blocks, room = self._turn, 0, self._max_known // 4
        for start, left, known in zip(*map(reversed, (self._starts, self._left, self._known)), strict=True):
            room -= known
            if blocks >= self._near_blocks or room < 0:
                break
            turn, blocks = start, blocks + left
        return turn

    def _all_known(self) -> dict[Hashable, int]:
        return self._old | self._new

    def _count_known(self) -> list[int]:
        known = [0] * len(self._starts)
        for turn, count in Counter(self._all_known().values()).items():
            batch = bisect_right(self._starts, turn) - 1
            if batch >= 0:  # or it lies too deep
                known[batch] += count
        return known

    def check(self) -> None:
        """Raise InvariantError unless the books agree."""
        turns = [turn for pair in zip(self._starts, self._ends, strict=True) for turn in sorted({*pair})]
        ensure(all(map(lt, turns, turns[1:])), "recency: batches are out of order")
        ensure(all(map(le, self._starts, self._ends)), "recency: a batch ends before it starts")
        ensure(self._known == self._count_known(), "recency: known blocks are miscounted")
        ensure(self._total == sum(self._left), "recency: batches do not add up")
        for start, left, known in zip(self._starts, self._left, self._known, strict=True):
            ensure(start < self._thin_until or left >= known, "recency: a batch has fewer blocks than are known")
        until = self._thin_until
        mixed = [start < until <= end for start, end in zip(self._starts, self._ends, strict=True)]
        ensure(not any(mixed), "recency: a batch is known in part")
        ensure(self.num_known <= self._max_known, "recency: too many blocks are known")
        newest_old, oldest_new = max(self._old.values(), default=0), min(self._new.values(), default=self._turn)
        ensure(newest_old < self._new_from <= oldest_new, "recency: old and new blocks are mixed up")
