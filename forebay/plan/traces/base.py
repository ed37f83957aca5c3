"""What every format of a trace has in common: a line becomes a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from forebay.errors import is_whole
from forebay.plan.traces.lines import BadLineError, shown

Record = Mapping[str, Any]

_MOST = 1 << 40  # tokens; and no time is further away than _LONGEST of its units
_LONGEST = 1e20


class Row(NamedTuple):
    """A request as its line has it: like TraceRequest, but with the time in the file's own unit."""

    time: float
    """0 where the trace has no times."""
    input_tokens: int
    output_tokens: int
    prefixes: Sequence[int]


class Format(Protocol):
    """One for each trace, made from its first lines."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def seconds(self) -> float | None:
        """In one unit of `Row.time`. None: the trace has no times."""

    @property
    def notes(self) -> Sequence[str]:
        """What was assumed, in words."""

    @property
    def late_lines(self) -> int:
        """How many lines a request may come late. Logs are written when requests end, not when they begin."""

    def time(self, record: Record) -> float:
        """As the row has it, for less. Raises BadLineError."""

    def row(self, record: Record, place: int) -> Row:
        """`place` is a number that no other line of the trace has. Raises BadLineError."""


def number(record: Record, field: str) -> float:
    value = _given(record, field)
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LONGEST < value < _LONGEST:
        raise BadLineError(f"{field} as a number", shown(value))
    return value


def count(record: Record, field: str) -> int:
    """A whole number of at least 0. `12.0` is one."""
    value = _given(record, field)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not is_whole(value) or not 0 <= value <= _MOST:
        raise BadLineError(f"{field} as a whole number of at least 0", shown(value))
    return value


def text(record: Record, field: str) -> str:
    value = _given(record, field)
    if not isinstance(value, str):
        raise BadLineError(f"{field} as text", shown(value))
    return value


def _given(record: Record, field: str) -> Any:
    try:
        return record[field]
    except KeyError:
        raise BadLineError(f"the field {field!r}", shown(record)) from None


def chained(blocks: Sequence[bytes]) -> list[int]:
    """An id for each block that stands for it and all before it: two are equal if all that far is."""
    ids, before = [], 0
    for block in blocks:
        before = xxh3_64_intdigest(block, before)
        ids.append(before)
    return ids
