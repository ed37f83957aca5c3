"""One request of a trace, as a cache sees it: which prefixes it brings, how long it is, when it came."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class TraceRequest:
    time_s: float
    """Since the first request of the trace; never goes backwards."""
    input_tokens: int
    output_tokens: int
    prefixes: Sequence[int]
    """One id for each `block_tokens` tokens of the input, the last one perhaps for fewer: equal ids are equal
    prefixes. Ids fit 64 bits and are not in any order."""


class Trace(Protocol):
    """Can be read as often as wanted, from its beginning, and is never held in memory as a whole."""

    @property
    def name(self) -> str: ...

    @property
    def block_tokens(self) -> int: ...

    @property
    def num_bytes(self) -> int | None:
        """Of the files, as they lie on the disk, if that is known: for progress."""

    @property
    def bytes_read(self) -> int:
        """Of those, by the iteration that runs now."""

    def __iter__(self) -> Iterator[TraceRequest]: ...
