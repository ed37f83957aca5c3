"""What a copier asks of a device that works on its own: streams, events, kernels and copies.

A stream carries out what it was given in that order; streams know nothing of each other except through events.
`forebay.copier.cuda` has the real one; the tests have one of a few lines that runs its streams in every order that
the events allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

Addresses: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Event(Protocol):
    """A point in a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class Stream(Protocol):
    def record(self) -> Event:
        """The point behind all that the stream was given so far."""

    def wait(self, event: Event) -> None:
        """Carry out nothing that comes later before that point is passed."""

    def synchronize(self) -> None:
        """Wait until everything that the stream was given is done."""


class Part(NamedTuple):
    """A run of bytes of every block, as wide as staging memory can take. Mostly the whole block."""

    first_tile: int
    num_tiles: int
    offset: int
    """Where in a block it begins, in bytes."""
    num_bytes: int


class Table(NamedTuple):
    """The rows of an order, in the device's memory."""

    memory: Any
    rows: int
    verified: bool
    """Whether any of them has a checksum to it."""


class Staging(NamedTuple):
    """Device memory that bytes pass through on their way between blocks and slots."""

    address: int
    num_bytes: int


class Columns(NamedTuple):
    """A table, as it is uploaded. Lists, and sorted as lists, so that Python keeps its turn: see `orders`."""

    blocks: Sequence[int]
    slots: Sequence[int]
    seeds: Sequence[int]
    """What the checksum of a row begins with: it says which key the bytes are for."""
    wanted: Sequence[int]
    """1 where a checksum is wanted, else 0."""

    @classmethod
    def unverified(cls, blocks: Sequence[int], slots: Sequence[int] | None = None) -> Columns:
        nothing = [0] * len(blocks)
        return cls(blocks, nothing if slots is None else slots, nothing, nothing)

    def by_slot(self) -> Columns:
        """The same rows, in the order of slots."""
        rows = sorted(range(len(self.slots)), key=self.slots.__getitem__)
        return Columns(*([column[row] for row in rows] for column in self))


class Gpu(Protocol):
    """Calls come from one thread at a time; `mark`, `told` and `drop` from the engine's at any time."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def bytes_per_block(self) -> int: ...

    def enter(self) -> None:
        """A thread says that it will make calls from now on."""

    def mark(self) -> Event:
        """The point behind all that the engine has given the device so far. Called from the engine's thread."""

    def stream(self, *, urgent: bool) -> Stream:
        """A new one. What it is given goes before the engine's own work if urgent."""

    def staging(self, num_bytes: int) -> Staging:
        """Raises MemoryError if there is none."""

    def parts(self, num_bytes: int) -> list[Part]:
        """All bytes of a block in as few parts as staging memory of this size allows."""

    def upload(self, stream: Stream, columns: Columns) -> Table: ...

    def drop(self, table: Table) -> None:
        """The device has done with it. Called from any thread."""

    def gather(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        """Blocks of rows [first, first + count) → staging, each row's part behind the one before."""

    def scatter(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        """Staging → blocks."""

    def copy(self, stream: Stream, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Runs of bytes between the host and staging memory."""

    def fill(self, stream: Stream, staging: Staging, byte: int) -> None:
        """Every byte of it."""

    def seal(self, stream: Stream, table: Table, ticket: int) -> None:
        """Remember the checksums of what was gathered for each row as those of its slot, and tell the host."""

    def check(self, stream: Stream, table: Table, ticket: int) -> None:
        """Compare the checksums of what was scattered for each row with those of its slot, and tell the host."""

    def expect(self, ticket: int) -> None:
        """From now on nothing was told of the ticket."""

    def release(self) -> None:
        """Let go of all memory. Nothing is on its way, and no other call follows."""

    def told(self, ticket: int) -> int | None:
        """What came of the ticket: how many rows differ, or None if the device has not got there."""
