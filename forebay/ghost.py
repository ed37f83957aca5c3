"""What the host pool would have had with more or less memory, from the traffic that is there.

A ghost of the pool: no bytes, only names of blocks in the order of their last use, down to where a pool of eight
times the slots would reach. Of a long prompt it looks at a few blocks, four for every doubling of the depth, each
of which stands for its neighbours; and when these are too many, at a sample of them (see forebay.reuse). So a
prompt of 100,000 tokens costs it about fifty dict lookups, and all of it takes a few megabytes at most.

It is a least recently used order, whatever the policy of the pool, where the tail of a prompt goes before its
head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from forebay.errors import ensure
from forebay.groups import KVLayout
from forebay.ids import Key
from forebay.reuse import HASH_RANGE, WEIGHT_MASK, ReuseStack

MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the memory there is, as Predicted has them."""

_MAX_BLOCKS = 32_768
_NEAR_BLOCKS = 4096
_HORIZON = 64  # times all slots: what was asked for longer ago counts half, and half of that
_MARGIN = 1.1  # times as deep as anybody asks
_MOST_NOTED = 1024
_PER_DOUBLING = 4
_DEEPEST = 1 << 26

# Blocks that are looked at, by their place in a prompt, and the power of two that each stands for:
#   0 1 2 3 | 4 5 6 7 | 8+ 10+ 12+ 14+ | 16++ 20++ …      the one in the middle of 1, 2, 4, … neighbours
_DEPTHS: list[int] = []
_POWERS: list[int] = []
_first, _power = 0, 0
while _first < _DEEPEST:
    _DEPTHS.append(_first + (1 << _power) // 2)
    _POWERS.append(_power)
    _first += 1 << _power
    if _first >= 2 * _PER_DOUBLING << _power:
        _power += 1
_SUMS = [0, *accumulate(1 << power for power in _POWERS)]
_PLACES = list(zip(_DEPTHS, _POWERS, strict=True))
_NAME_MASK = (HASH_RANGE - 1) & ~WEIGHT_MASK


class Predicted(NamedTuple):
    """The share of blocks asked for that would be found, on the device or the host, with so much host memory."""

    half: float
    same: float
    twice: float
    four_times: float
    eight_times: float


class _Asked(NamedTuple):
    chain: Sequence[Key]
    """Grows as the request is answered."""
    blocks: int
    num_tokens: int
    device_tokens: int


class Ghost:
    def __init__(self, layout: KVLayout, slots: int, beside: float) -> None:
        """`beside`: blocks that the device holds and the host does not."""
        groups = layout.groups
        self._group = next((i for i, group in enumerate(groups) if group.needs_whole_prefix), 0)
        span = groups[self._group].span_tokens
        # A block of this group comes with blocks of the others, which take slots as well.
        self._slots_per_block = sum(span / group.span_tokens for group in groups)
        self._span = span
        self._noted: list[_Asked] = []  # what requests have asked for and was not looked at yet
        self._asked = 0.0
        self._hits = [0.0] * len(MULTIPLES)
        self._predicted: Predicted | None = None  # what these come to, once somebody has asked
        self._reaches = [(each * slots + beside) / self._slots_per_block for each in MULTIPLES]
        depth = self._reaches[-1] * _MARGIN
        self._stack = ReuseStack(_MAX_BLOCKS, near_blocks=_NEAR_BLOCKS, depth=depth, weighted=True)
        self._horizon = _HORIZON * max(1.0, slots / self._slots_per_block)

    def asked(self, keys: Sequence[Sequence[Key]], num_tokens: int, device_tokens: int) -> int:
        """A request was admitted: its keys by group, its tokens, and what the device had of them. Returns how many
        blocks that are. It is only noted here: an engine is waiting for its first token."""
        count = len(keys[self._group])
        if count:
            if len(self._noted) == _MOST_NOTED:
                self._catch_up()
            self._noted.append(_Asked(keys[self._group], count, num_tokens, device_tokens))
        return count

    def ended(self, keys: Sequence[Sequence[Key]], num_blocks: int) -> None:
        """A request ended, which had asked for so many blocks; those of the answer come behind them."""
        self._catch_up()
        chain = keys[self._group]
        if len(chain) > num_blocks:
            self._stack.use(_path(chain, len(chain)), _SUMS)

    def _catch_up(self) -> None:
        noted, self._noted = self._noted, []
        for each in noted:
            self._count(each)

    def _count(self, asked: _Asked) -> None:
        chain, count, num_tokens, device_tokens = asked
        most = min(count, (num_tokens - 1) // self._span)  # the last token is always computed
        on_device = min(device_tokens // self._span, most)
        if self._asked > self._horizon:
            self._asked /= 2
            self._hits = [each / 2 for each in self._hits]
        self._asked += count
        self._predicted = None
        path = _path(chain, count)
        runs = self._stack.use(path, _SUMS)
        if not runs and not on_device:
            return
        if sum(run.blocks for run in runs) == _SUMS[len(path)]:
            # All of it was used before, also the few blocks that lie behind those that the last one stands for.
            runs[-1] = runs[-1]._replace(blocks=runs[-1].blocks + count - _SUMS[len(path)])
        for number, reach in enumerate(self._reaches):
            found = 0.0
            for _, newer, _, blocks, _ in runs:
                if newer >= reach:
                    break
                found += min(blocks, reach - newer)
            self._hits[number] += max(on_device, min(found, most))

    def clear(self) -> None:
        """The cache was reset: nothing is there, whatever its size. What was asked for until now still counts."""
        self._catch_up()
        self._stack.clear()

    @property
    def predicted(self) -> Predicted:
        """As far as requests have been looked at: some that run may be missing."""
        if self._predicted is None:
            asked = max(1.0, self._asked)
            self._predicted = Predicted(*(round(each / asked, 4) for each in self._hits))
        return self._predicted

    def check(self) -> None:
        """Raise InvariantError unless the books agree."""
        self._stack.check()
        ensure(self._hits == sorted(self._hits), "ghost: more memory finds less")
        ensure(self._hits[-1] <= self._asked * (1 + 1e-9), "ghost: more was found than asked for")


def _path(chain: Sequence[Key], count: int) -> list[int]:
    """Of the first blocks of a prompt, those that are looked at, by names that the stack takes."""
    mask = _NAME_MASK
    return [hash(chain[depth]) & mask | power for depth, power in _PLACES[: bisect_left(_DEPTHS, count)]]
