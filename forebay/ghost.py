"""What the host pool would have had with more or less memory, from the traffic that is there.

A ghost of the pool: no bytes, only hashes of blocks in the order of their last use, down to where a pool of eight
times the slots would reach. Of a long prompt it looks at a few blocks, fewer the deeper they lie, each of which
stands for its neighbours; and when these are too many, at a sample of them (see forebay.recency). So a prompt of
100,000 tokens costs it thirty entries of a dict, and all of it takes a few megabytes at most.

It is a least recently used order, whatever the policy of the pool, where the tail of a prompt goes before its
head.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from forebay.errors import ensure
from forebay.groups import KVLayout
from forebay.ids import Key
from forebay.recency import Recency, Sampled, Seen

MULTIPLES = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Of the memory there is, as Predicted has them."""

_MAX_KNOWN = 32_768
_HORIZON = 64  # times all slots: what was asked for longer ago counts half, and half of that
_MARGIN = 1.1  # times as deep as anybody asks
_AT_ONCE = 32
_DEEPEST = 1 << 26

# Blocks that are looked at, by their place in a prompt: the first eight, and then the one in the middle of 2, 3, 4
# and more neighbours, for which it stands: a third as many as lie before them.
_DEPTHS: list[int] = []
_WIDTHS: list[int] = []
_first = 0
while _first < _DEEPEST:
    _WIDTHS.append(_first // 3 if _first >= 8 else 1)
    _DEPTHS.append(_first + _WIDTHS[-1] // 2)
    _first += _WIDTHS[-1]
# By how many are looked at, what picks them.
_LOOKS: list[Callable[[Sequence[Key]], Sequence[Key]]] = [
    lambda _: (),
    lambda chain: chain[:1],
    *(itemgetter(*_DEPTHS[:count]) for count in range(2, len(_DEPTHS) + 1)),
]
_SUMS = [0, *accumulate(_WIDTHS)]


class Predicted(NamedTuple):
    """The share of blocks asked for that would be found, on the device or the host, with so much host memory."""

    half: float
    same: float
    twice: float
    four_times: float
    eight_times: float


_Noted = tuple[Sequence[Key], int, int, int]
"""What a request asked for: the keys that are looked at, of so many blocks, its tokens, and those that the device
had of them. Or without tokens: what there is once it was answered."""


class Ghost:
    def __init__(self, layout: KVLayout, slots: int, beside: float) -> None:
        """`beside`: blocks that the device holds and the host does not."""
        groups = layout.groups
        self._group = next((i for i, group in enumerate(groups) if group.needs_whole_prefix), 0)
        span = groups[self._group].span_tokens
        # A block of this group comes with blocks of the others, which take slots as well.
        self._slots_per_block = sum(span / group.span_tokens for group in groups)
        self._span = span
        self._noted: list[_Noted] = []  # what was not looked at yet
        self._asked = 0.0
        self._found = [0.0] * len(MULTIPLES)  # with so much memory, and not with less
        self._predicted: Predicted | None = None  # what these come to, once somebody has asked
        self._reaches = [(each * slots + beside) / self._slots_per_block for each in MULTIPLES]
        depth = self._reaches[-1] * _MARGIN
        self._recency = Recency(_SUMS, _MAX_KNOWN, depth)
        self._horizon = _HORIZON * max(1.0, slots / self._slots_per_block)

    def asked(self, keys: Sequence[Sequence[Key]], num_tokens: int, device_tokens: int) -> int:
        """A request was admitted: its keys by group, its tokens, and what the device had of them. Returns how many
        blocks that are."""
        chain = keys[self._group]
        count = len(chain)
        if count:
            self._note(chain, count, num_tokens, device_tokens)
        return count

    def ended(self, keys: Sequence[Sequence[Key]], num_blocks: int) -> None:
        """A request ended, which had asked for so many blocks; those of the answer come behind them."""
        chain = keys[self._group]
        count = len(chain)
        if count > num_blocks:
            self._note(chain, count, 0, 0)

    def _note(self, chain: Sequence[Key], count: int, num_tokens: int, device_tokens: int) -> None:
        # Each on its own would take twice as long: by then nothing of this is in the processor's caches. But its
        # keys are, and to keep all of them would cost the next request the memory that this one gives back.
        noted = self._noted
        noted.append((_LOOKS[bisect_left(_DEPTHS, count)](chain), count, num_tokens, device_tokens))
        if len(noted) >= _AT_ONCE:
            self.catch_up()

    def catch_up(self) -> None:
        """Look at what was only noted until now: nobody waits, or there is enough of it."""
        noted, self._noted = self._noted, []
        if self._asked > self._horizon:
            self._asked /= 2
            self._found = [each / 2 for each in self._found]
        use, asked = self._recency.use, 0
        for path, count, num_tokens, device_tokens in noted:
            seen, sampled = use(path)
            if num_tokens:
                asked += count
                if seen or sampled or device_tokens:
                    most = min(count, (num_tokens - 1) // self._span)  # the last token is always computed
                    self._count(seen, sampled, len(path), count, most, min(device_tokens // self._span, most))
        self._asked += asked
        self._predicted = None

    def _count(
        self,
        seen: Sequence[Seen],
        sampled: Sequence[Sampled],
        looked_at: int,
        count: int,
        most: int,
        on_device: int,
    ) -> None:
        """What is found of a prompt of so many blocks, of which so many could be found at most and so many were on
        the device."""
        if len(seen) == 1 and not sampled:
            # Mostly all of it was used before and together, and lately.
            [(newer, blocks)] = seen
            blocks = count if blocks == _SUMS[looked_at] else blocks
            if newer + blocks <= self._reaches[0]:
                self._found[0] += max(on_device, min(blocks, most))
                return
        blocks, reach_of_all = 0, 0.0
        if seen:
            blocks = seen[0][1] if len(seen) == 1 else sum([each for _, each in seen])
            newer, last = seen[-1]
            if blocks == _SUMS[looked_at]:
                # All was used before, also the few blocks that lie behind those that the last one stands for.
                last += count - blocks
                blocks = count
                seen = *seen[:-1], (newer, last)
            reach_of_all = newer + last
        found, enough = 0.0, bisect_left(self._reaches, reach_of_all)
        for number, reach in enumerate(self._reaches[:enough]):
            within = sum([min(each, reach - newer) for newer, each in seen if newer < reach])
            within = max(on_device, min(within, most))
            self._found[number] += within - found
            found = within
        if enough < len(self._found):
            self._found[enough] += max(on_device, min(blocks, most)) - found
        if not sampled:
            return
        before_last, all_looked_at = _SUMS[looked_at - 1], _SUMS[looked_at]
        for newer, blocks, before in sampled:
            number = bisect_right(self._reaches, newer)
            if before >= on_device and number < len(self._found):
                # Not cut to what the prompt has: then the average would be wrong. But the last one stands for as
                # many as there are of its neighbours.
                there = max(0, most - before) / (all_looked_at - before_last) if before == before_last else 1
                self._found[number] += blocks * there

    def clear(self) -> None:
        """The cache was reset: nothing is there, whatever its size. What was asked for until now still counts."""
        self.catch_up()
        self._recency.clear()

    @property
    def predicted(self) -> Predicted:
        """As far as requests have been looked at: the newest may be missing."""
        if self._predicted is None:
            asked = max(1.0, self._asked)
            self._predicted = Predicted(*(round(min(1.0, each / asked), 4) for each in accumulate(self._found)))
        return self._predicted

    def check(self) -> None:
        """Raise InvariantError unless the books agree."""
        self._recency.check()
        ensure(min(self._found) >= 0, "ghost: more memory finds less")
        if self._recency.rate == 1:  # of a sample, only the average is right
            ensure(sum(self._found) <= self._asked * (1 + 1e-9), "ghost: more was found than asked for")
