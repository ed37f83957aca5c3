"""Traces of hashes: `timestamp, input_length, output_length, hash_ids`, with whatever else beside.

Mooncake's has an id for each 512 tokens and milliseconds, Bailian's one for each 16 tokens, seconds and chat ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from forebay.amounts import counted
from forebay.plan.traces.base import Record, Row, chained, count, number
from forebay.plan.traces.clock import UNITS, unit_of
from forebay.plan.traces.lines import BadLineError, shown

_MAX_BLOCK_TOKENS = 1 << 20
_TAIL = 0x7A11
"""Seed of the ids that stand for tokens without one."""


class Blocks(NamedTuple):
    tokens: int
    with_tail: bool
    """Whether the last tokens of an input have an id too if they are fewer than a block. Both ways exist."""

    def expected(self, input_tokens: int) -> int:
        return -(-input_tokens // self.tokens) if self.with_tail else input_tokens // self.tokens

    def __str__(self) -> str:
        return f"{'' if self.with_tail else 'whole '}blocks of {counted(self.tokens, 'token')}"


class Hashed:
    """Ids are chained before they are used: some traces hash each block alone, and a cache of prefixes cannot hit
    a block whose predecessors differ. Where ids stand for prefixes already, nothing changes."""

    late_lines = 0

    def __init__(self, sample: Sequence[Record], block_tokens: int | None, time_unit: str | None) -> None:
        chats = any("chat_id" in record for record in sample)
        self.name = "hash trace with chat ids" if chats else "hash trace"
        first = next(_numbers(sample, "timestamp"), 0)
        unit, about_time = unit_of(first, "s" if chats else "ms", time_unit)
        self.seconds: float | None = UNITS[unit]
        self.blocks, how = _find_blocks(sample, block_tokens, usual=16 if chats else 512)
        self.notes = [f"hash_ids stand for {self.blocks}, {how}", about_time]

    @property
    def block_tokens(self) -> int:
        return self.blocks.tokens

    def time(self, record: Record) -> float:
        return number(record, "timestamp")

    def row(self, record: Record, place: int) -> Row:
        input_tokens = count(record, "input_length")
        ids = record.get("hash_ids")
        if not isinstance(ids, list):
            raise BadLineError("hash_ids as a list", shown(ids))
        if len(ids) != self.blocks.expected(input_tokens):
            expected = counted(self.blocks.expected(input_tokens), "hash_id")
            wanted = f"{expected} for {counted(input_tokens, 'token')} in {self.blocks}"
            raise BadLineError(wanted, f"{len(ids):,}")
        prefixes = chained(_as_bytes(ids))
        if len(prefixes) * self.blocks.tokens < input_tokens:
            prefixes.append(xxh3_64_intdigest(place.to_bytes(8), _TAIL))
        output_tokens = count(record, "output_length")
        return Row(self.time(record), input_tokens, output_tokens, prefixes)


def _as_bytes(ids: list[Any]) -> list[bytes]:
    kinds = set(map(type, ids))
    try:
        if kinds == {int}:
            return [each.to_bytes(8, "little") for each in ids]
        if kinds == {str}:
            return [each.encode() for each in ids]
        if not kinds:
            return []
    except (OverflowError, UnicodeEncodeError):
        pass
    bad = next(each for each in ids if type(each) is not int or not 0 <= each < 1 << 64)
    raise BadLineError("hash_ids as whole numbers from 0 to 2⁶⁴ - 1, or all as text", shown(bad))


def _find_blocks(sample: Sequence[Record], given: int | None, usual: int) -> tuple[Blocks, str]:
    """The size of a block that most of the first lines agree with. A line that does not is then found out when it
    is read, with its number."""
    lengths = [
        (record["input_length"], len(record["hash_ids"]))
        for record in sample
        if type(record.get("input_length")) is int and isinstance(record.get("hash_ids"), list)
    ]
    if given is not None:
        fits = {tail: sum(Blocks(given, tail).expected(n) == ids for n, ids in lengths) for tail in (True, False)}
        return Blocks(given, fits[False] <= fits[True]), "as given"
    with_tail, whole = (_most_agree(lengths, tail, usual) for tail in (True, False))
    if (whole.lines, whole.tokens == usual) > (with_tail.lines, with_tail.tokens == usual):
        return Blocks(whole.tokens, with_tail=False), "by the lengths"
    return Blocks(with_tail.tokens, with_tail=True), "by the lengths"


class _Agreed(NamedTuple):
    tokens: int
    lines: int


def _most_agree(lengths: Iterable[tuple[int, int]], with_tail: bool, usual: int) -> _Agreed:
    """The size that most lines agree with: the usual one if it is as good as any, else the roundest."""
    changes: Counter[int] = Counter()
    for tokens, ids in lengths:
        # Sizes from `least` up to, but without, `above` give so many ids for so many tokens.
        if not tokens or not ids:  # too short for a block, if it is one of those traces
            least, above = tokens + 1, 0 if with_tail and tokens else _MAX_BLOCK_TOKENS + 1
        elif with_tail:
            least, above = -(-tokens // ids), _above(tokens, ids - 1)
        else:
            least, above = tokens // (ids + 1) + 1, tokens // ids + 1
        if 0 < least < above:
            changes[least] += 1
            changes[above] -= 1
    agree, best, ranges = 0, 0, list[tuple[int, int]]()
    ends = sorted(changes)
    for start, stop in pairwise(ends):
        agree += changes[start]
        if agree > best:
            best, ranges = agree, []
        if agree == best:
            ranges.append((start, stop))
    if not best or any(start <= usual < stop for start, stop in ranges):
        return _Agreed(usual, best)
    return _Agreed(max((_roundest(start, stop) for start, stop in ranges), key=_roundness), best)


def _above(tokens: int, ids: int) -> int:
    """The smallest size with which so many ids are enough."""
    return -(-tokens // ids) if ids else _MAX_BLOCK_TOKENS + 1


def _roundness(size: int) -> int:
    return size & -size


def _roundest(start: int, stop: int) -> int:
    """The number of a range that the highest power of two divides, the smallest of those; where there is no end,
    the first power of two."""
    if stop > _MAX_BLOCK_TOKENS:
        return 1 << (start - 1).bit_length()
    step = 1
    while -(-start // (2 * step)) * 2 * step < stop:
        step *= 2
    return -(-start // step) * step


def _numbers(sample: Sequence[Record], field: str) -> Iterator[float]:
    for record in sample:
        try:
            yield number(record, field)
        except BadLineError:
            continue
