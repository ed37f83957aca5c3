"""About how many blocks were used since a block was last used: at little cost, and in fixed memory.

Everything that was used, newest last, in batches: at first the blocks of one prompt, later those of several.

    oldest  [ prompts 0 to 8 ][ 9 to 12 ][ 13 ][ 14 ]  newest         what is left of each, in blocks

The older a batch, the larger it may be. Where in it a prompt lies is then taken from the prompt's number, and is
wrong by a small part of what is newer. (`forebay.reuse` does the same exactly, for the planner, for several times
the cost.)

If there are too many blocks, only a sample of the older ones is kept, chosen by hashes, where one block stands for
all of them. (SHARDS: Waldspurger et al., "Efficient MRC construction with SHARDS", FAST 2015.) The newest are all
known: the few that every prompt begins with are a good part of all uses, and a sample has them or has not.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from operator import le, lt

from forebay.errors import ensure

_MAX_BATCHES = 512
_SPARE_MOVED = 2048  # so that they are not gone through too often
_PRECISION = 64  # two batches become one if they hold at most this part of what is newer
_MOST_THINNED = 48
_PLACE_BITS = 12
_LOW_BITS = 2 * _PLACE_BITS
_PLACES, _LOW = (1 << _PLACE_BITS) - 1, (1 << _LOW_BITS) - 1

Seen = tuple[float, int]
"""Of a prompt, blocks that were last used together: how many were used since, and how many these are."""
Sampled = tuple[float, int, int]
"""A block that was used before and stands for all that are not in the sample: how many were used since, for how
many it stands, and how many of the prompt lie before it."""
_NEVER: tuple[Sequence[Seen], Sequence[Sampled]] = ((), ())


class Recency:
    def __init__(self, sums: Sequence[int], max_known: int, depth: float) -> None:
        """`sums`: for how many blocks none, the first, the first two, … of those that are named of a prompt stand.
        What lies `depth` blocks deep is forgotten."""
        ensure(len(sums) <= _PLACES, "recency: too many blocks are named of a prompt")
        self._sums = sums
        self._max_known = max_known
        self._depth = depth
        self.clear()

    def clear(self) -> None:
        """Forget what was used."""
        # Block -> the turn in which it was last used, and behind it, in a few bits, how long that path was and its
        # place in it. What is used goes to the new ones, and those become the old ones from time to time, all at
        # once: to go through them one by one would cost more than all the rest. Without a sample, that is when the
        # last old one lies too deep; with one, when there are enough new ones, and what the sample has of the old
        # ones is far. A path that is used again as it was, while it is new, stays as it is: only its turn moves.
        self._new: dict[Hashable, int] = {}
        self._old: dict[Hashable, int] = {}
        self._far: dict[Hashable, int] = {}
        self._moved: dict[int, int] = {}  # turn that a new or old block has -> when it really was
        self._new_from = 1  # a turn
        self._turn = 1
        self._starts: list[int] = []  # by batch, its first turn
        self._ends: list[int] = []  # its last turn
        self._left: list[int] = []  # blocks used then and not since
        self._total = 0
        self._thinned = 0  # how often half of the far blocks were left out
        self._far_until = 0  # a turn

    @property
    def rate(self) -> float:
        """The share of the far blocks that is known."""
        return 1 / (1 << self._thinned)

    @property
    def num_known(self) -> int:
        """Blocks in memory; some of them twice, and some will be forgotten."""
        return len(self._new) + len(self._old) + len(self._far)

    def use(self, path: Sequence[Hashable]) -> tuple[Sequence[Seen], Sequence[Sampled]]:
        """A prompt uses these blocks, head first, each named by all of the prompt up to it. Returns when they were
        used before: from the head on, as far as all are known; and behind that, the sample, whose numbers are
        right only on average."""
        turn, size, new, starts, left = self._turn, len(path), self._new, self._starts, self._left
        blocks = self._sums[size]
        used: tuple[Sequence[Seen], Sequence[Sampled]] = _NEVER
        head = new.get(path[0])
        stays = head is not None and head & _LOW == size << _PLACE_BITS
        if head is None:
            head = self._old.get(path[0])
        if head is not None or self._far:
            tail = new.get(path[-1]) or self._old.get(path[-1])
            if head is not None and tail == head + size - 1 and self._whole(self._used_in(head)):
                # Mostly all of it was used before and together, or nothing.
                batch, newer = self._place(self._used_in(head))
                used = [(newer, blocks)], ()
                left[batch] -= blocks
                self._total -= blocks
                if stays:
                    self._moved[head >> _LOW_BITS] = turn
                    if len(self._moved) > self._most_moved:
                        self._forget_moved()
            else:
                used = self._take_apart(path)
                stays = False
        if not stays:
            first = turn << _LOW_BITS | size << _PLACE_BITS
            for value, block in enumerate(path, first):  # faster than update(), which looks at each pair
                new[block] = value
        self._turn = turn + 1
        starts.append(turn)
        self._ends.append(turn)
        left.append(blocks)
        self._total += blocks
        while self._total - left[0] >= self._depth:
            self._total -= left.pop(0)
            del starts[0], self._ends[0]
        if len(starts) > _MAX_BATCHES:
            self._merge()
        if self._thinned:
            if len(new) > self._max_known // 8:
                self._sample_old()
        elif self._starts[0] >= self._new_from:
            self._start_anew(new)
        elif len(new) + len(self._old) > self._max_known:
            self._begin_sample()
        return used

    @property
    def _most_moved(self) -> int:
        return len(self._new) + len(self._old) + _SPARE_MOVED

    def _forget_moved(self) -> None:
        """Turns that no block has any more."""
        there = {value >> _LOW_BITS for blocks in (self._new, self._old) for value in blocks.values()}
        self._moved = {turn: last for turn, last in self._moved.items() if turn in there}

    def _used_in(self, value: int) -> int:
        """The turn in which a new or old block was last used."""
        turn = value >> _LOW_BITS
        return self._moved.get(turn, turn)

    def _settled(self, value: int) -> int:
        """The same place, in that turn."""
        return self._used_in(value) << _LOW_BITS | value & _LOW

    def _start_anew(self, old: dict[Hashable, int]) -> None:
        if self._moved:
            self._moved = {turn: last for turn, last in self._moved.items() if turn >= self._new_from}
        self._old, self._new, self._new_from = old, {}, self._turn

    def _whole(self, turn: int) -> bool:
        """Whether all blocks of that turn are known."""
        return turn >= self._far_until and turn >= self._starts[0]

    def _take_apart(self, path: Sequence[Hashable]) -> tuple[Sequence[Seen], Sequence[Sampled]]:
        """Take what was used before out of the batches it is in."""
        if not self._starts:
            return _NEVER
        seen: list[Seen] = []
        sampled: list[Sampled] = []
        sums = self._sums
        taken: list[tuple[int, int]] = []  # from a batch, so many blocks, once all of it was seen
        new, old, far = self._new.get, self._old.get, self._far.get
        found = [self._used_in(new(block) or old(block) or far(block) or 0) for block in path]
        start, end = 0, len(found)
        while start < end and self._whole(found[start]):
            turn = found[start]
            stop = end if found[-1] == turn else next(i for i in range(start, end) if found[i] != turn)
            blocks = sums[stop] - sums[start]
            batch, newer = self._place(turn)
            seen.append((newer, blocks))
            taken.append((batch, blocks))
            start = stop
        if self._thinned:
            mask = (1 << self._thinned) - 1
            for i in range(start, end):
                if hash(path[i]) & mask:
                    continue
                if found[i] < self._starts[0]:
                    break
                blocks = sums[i + 1] - sums[i] << self._thinned
                batch, newer = self._place(found[i])
                sampled.append((newer, blocks, sums[i]))
                taken.append((batch, blocks))
        for batch, blocks in taken:
            self._left[batch] -= blocks
            self._total -= blocks
        return seen, sampled

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
            merged: list[tuple[int, int, int]] = []
            newer = 0  # than the last one of these
            for batch in reversed(list(zip(self._starts, self._ends, self._left, strict=True))):
                start, _, left = batch
                if not left:
                    continue
                if merged:
                    next_start, next_end, next_left = merged[-1]
                    alike = not (start < self._far_until <= next_start or start < self._new_from <= next_start)
                    if alike and (left + next_left) * precision <= newer:
                        merged[-1] = start, next_end, left + next_left
                        continue
                    newer += next_left
                merged.append(batch)
            self._starts, self._ends, self._left = map(list, zip(*reversed(merged), strict=True))
            precision /= 2

    def _begin_sample(self) -> None:
        """Forget what lies too deep; and if there are still many, all but a sample."""
        oldest, settled = self._starts[0] << _LOW_BITS, self._settled
        known = {
            block: value for block, each in (self._old | self._new).items() if (value := settled(each)) >= oldest
        }
        self._start_anew(known)
        self._moved = {}
        if len(known) > self._max_known // 2:
            self._far, self._old, self._far_until = known, {}, self._turn
            self._thin()

    def _sample_old(self) -> None:
        """There are enough new blocks: they are the old ones now, and what the sample has of those is far."""
        mask, oldest = (1 << self._thinned) - 1, self._starts[0] << _LOW_BITS
        new, far, settled = self._new, self._far, self._settled
        sample = {
            block: value
            for block, each in self._old.items()
            if not hash(block) & mask and (value := settled(each)) >= oldest and block not in new
        }
        before, self._far_until = self._far_until, self._new_from
        far.update(sample)
        self._start_anew(new)
        # What comes into the sample counts as what will leave it: each block for those that it stands for.
        self._recount(sample, before)
        if len(far) > self._max_known // 2:
            self._thin()

    def _thin(self) -> None:
        """Of the far blocks, forget what lies too deep or was used since; and if there are still many, half of the
        others, until there are few."""
        oldest, new, old = self._starts[0] << _LOW_BITS, self._new, self._old
        far = {
            block: value
            for block, value in self._far.items()
            if value >= oldest and block not in new and block not in old
        }
        while len(far) > self._max_known // 4 and self._thinned < _MOST_THINNED:
            self._thinned += 1
            bit = 1 << (self._thinned - 1)
            far = {block: value for block, value in far.items() if not hash(block) & bit}
        self._far = far
        self._recount(far, 0)

    def _recount(self, known: Mapping[Hashable, int], first_turn: int) -> None:
        """What is left of far batches, from that turn on, by the blocks of them that are known."""
        for batch, blocks in enumerate(self._count(known)):
            if first_turn <= self._starts[batch] < self._far_until:
                self._total += blocks - self._left[batch]
                self._left[batch] = blocks

    def _count(self, known: Mapping[Hashable, int]) -> list[int]:
        """What is left of each batch, by the blocks that are known."""
        sums = self._sums
        by_turn: dict[int, int] = {}
        for value in known.values():
            place, turn = value & _PLACES, self._used_in(value)
            by_turn[turn] = by_turn.get(turn, 0) + sums[place + 1] - sums[place]
        left = [0] * len(self._starts)
        for turn, blocks in by_turn.items():
            batch = bisect_right(self._starts, turn) - 1
            if batch >= 0:  # or it lies too deep
                left[batch] += blocks if turn >= self._far_until else blocks << self._thinned
        return left

    def check(self) -> None:
        """Raise InvariantError unless the books agree."""
        turns = [turn for pair in zip(self._starts, self._ends, strict=True) for turn in sorted({*pair})]
        ensure(all(map(lt, turns, turns[1:])), "recency: batches are out of order")
        ensure(all(map(le, self._starts, self._ends)), "recency: a batch ends before it starts")
        known = self._far | self._old | self._new
        ensure(self._left == self._count(known), "recency: what is left of a batch is miscounted")
        ensure(self._total == sum(self._left), "recency: batches do not add up")
        until = self._far_until
        mixed = [start < until <= end for start, end in zip(self._starts, self._ends, strict=True)]
        ensure(not any(mixed), "recency: a batch is known in part")
        ensure(self.num_known <= self._max_known, "recency: too many blocks are known")
        ensure(len(self._moved) <= self._most_moved, "recency: too many turns have moved")
        new_from = self._new_from << _LOW_BITS
        mixed = [value >= new_from for value in self._old.values()] + [
            value < new_from for value in self._new.values()
        ]
        ensure(not any(mixed), "recency: old and new blocks are mixed up")
