"""How orders become work for streams.

Bytes pass through staging memory on the device, so the host's side of a copy is whole slots, and runs of slots,
whatever the layout of the device: the bus moves few and large pieces at its full speed, and a kernel puts them
where they belong at the speed of the device's own memory.

    store   blocks ──gather──▶ staging ──bus──▶ slots          load   slots ──bus──▶ staging ──scatter──▶ blocks

An order is cut into chunks that fit into staging memory. Chunks take turns between two lanes, so one is on the bus
while the other is gathered or scattered. A lane is a stream with staging memory of its own: what it is given is
carried out one after the other, and nothing else protects its memory, nor has to. On the bus, chunks wait for each
other: two at a time would end at the same time, and leave it idle while both are scattered.

    lane 0    [bus chunk 0][scatter 0]         [bus chunk 2][scatter 2]
    lane 1                 [bus chunk 1][scatter 1]         ···
    tables    [upload]
    control                                                               [check]  ← done

Gather and scatter wait for the table of the order, and for the mark that came with it, a point of the engine's own
stream. The bus does not. Tables have a stream of their own: behind the check of the order before, a table would
come only when all of that order is done, and the bus stand still while the first chunk of this one is gathered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from forebay.copier.faults import GARBAGE
from forebay.copier.streams import Addresses, Columns, Event, Gpu, Numbers, Part, Staging, Stream, Table
from forebay.errors import ForebayError
from forebay.transfers import Direction

LANES = 2
_FIRST: Numbers = np.zeros(1, dtype=np.int64)

MAX_ROWS_AT_ONCE = 32_768
"""Rows of a chunk, however small they are: a kernel's grid has an end."""


class Slots(Protocol):
    """The host's side: `forebay.copier.pages.HostPages`."""

    @property
    def bytes_per_slot(self) -> int: ...

    def addresses(self, slots: Numbers) -> Addresses: ...

    def pieces(self, slots: Numbers) -> Numbers:
        """In which piece of memory each slot is: no copy may reach over the end of one."""


class Work(NamedTuple):
    """What is given to the device as one flight: an order, or several."""

    columns: Columns
    mark: Event | None
    """What the device must have passed before blocks are touched."""
    move_from: Sequence[int] = ()
    move_to: Sequence[int] = ()
    garbage: bool = False
    """Whether blocks are filled with garbage instead of what is in the slots: an injected failure."""


class Way(NamedTuple):
    """Where the slots of a chunk are, and which of them are neighbours."""

    addresses: Addresses
    starts: Numbers
    """Rows whose slot does not follow that of the row before."""
    bytes_per_slot: int

    @classmethod
    def of(cls, memory: Slots, slots: Numbers) -> Way:
        apart = (np.diff(slots) != 1) | (np.diff(memory.pieces(slots)) != 0)
        starts = np.concatenate((_FIRST, np.flatnonzero(apart) + 1))
        return cls(memory.addresses(slots), starts, memory.bytes_per_slot)

    def runs(self, part: Part, staging: Staging) -> tuple[Addresses, Addresses, Addresses]:
        """What to copy between host and staging: neighbours together, if whole slots are copied."""
        width, count = part.num_bytes, len(self.addresses)
        starts = self.starts if width == self.bytes_per_slot else np.arange(count, dtype=np.int64)
        sizes = np.diff(starts, append=count) * width
        hosts = self.addresses[starts] + np.uint64(part.offset)
        return hosts, (staging.address + starts * width).view(np.uint64), sizes.view(np.uint64)


@dataclass(slots=True)
class Lane:
    stream: Stream
    staging: Staging
    last: Event | None = None
    """The end of the chunk it was given last."""


@dataclass(slots=True)
class Flight:
    """An order on its way."""

    direction: Direction
    ticket: int
    done: Event | None = None
    """None until all of it was given to the device."""
    error: str | None = None
    """Why it was not given to the device as a whole, if so. What was given still ends at `done`."""
    held: list[Table] = field(default_factory=list)
    """Memory that the device reads until then."""


class Stager:
    """One direction. Called from one thread at a time."""

    def __init__(self, gpu: Gpu, slots: Slots, direction: Direction, staging: Staging) -> None:
        """`staging` is for all lanes together."""
        self.direction = direction
        urgent = direction is Direction.LOAD
        self._gpu = gpu
        self._slots = slots
        self._tables = gpu.stream(urgent=urgent)
        self._control = gpu.stream(urgent=urgent)
        staging_bytes = staging.num_bytes // LANES
        parts = [Staging(staging.address + lane * staging_bytes, staging_bytes) for lane in range(LANES)]
        self._lanes = [Lane(gpu.stream(urgent=urgent), part) for part in parts]
        self._turn = 0
        self._on_their_way: deque[Event] = deque()  # the ends of chunks
        self._bus: Event | None = None  # the end of the last copy on the bus
        self._parts = gpu.parts(staging_bytes)
        widest = max(part.num_bytes for part in self._parts)
        self.rows_at_once = max(1, min(MAX_ROWS_AT_ONCE, staging_bytes // widest))

    @property
    def ahead(self) -> int:
        """How many chunks the device has still to do of those it was given."""
        while self._on_their_way and self._on_their_way[0].query():
            self._on_their_way.popleft()
        return len(self._on_their_way)

    def issue(self, work: Work, ticket: int) -> Iterator[Flight]:
        """Give the work to the device, one chunk between two yields. What is yielded last is complete."""
        flight = Flight(self.direction, ticket)
        try:
            # In the order of slots, neighbours can travel together.
            columns = work.columns.by_slot()
            table = self._upload(flight, columns)
            uploaded = self._tables.record()
            self._control.wait(uploaded)
            after = [uploaded]
            if work.mark is not None:
                after.append(work.mark)
            if len(work.move_to):
                after.append(self._move(flight, work, after))
            rows = len(columns.slots)
            for first in range(0, rows, self.rows_at_once):
                count = min(self.rows_at_once, rows - first)
                slots = np.array(columns.slots[first : first + count], dtype=np.int64)
                way = None if work.garbage else Way.of(self._slots, slots)
                self._chunk(self._next_lane(), table, first, count, way, after)
                if first + count < rows:
                    yield flight
            for lane in self._lanes:
                if lane.last is not None:
                    self._control.wait(lane.last)
            if work.garbage:
                raise ForebayError("injected")
            if self.direction is Direction.LOAD:
                self._gpu.check(self._control, table, ticket)
            else:
                self._gpu.seal(self._control, table, ticket)
        except Exception as error:  # noqa: BLE001 - a device that fails fails in many ways
            flight.error = f"{type(error).__name__}: {error}"
            # Part of it may be on its way: wait for everybody, whatever they were given.
            for stream in (self._tables, *(lane.stream for lane in self._lanes)):
                self._control.wait(stream.record())
        flight.done = self._control.record()
        yield flight

    def synchronize(self) -> None:
        for stream in (self._tables, *(lane.stream for lane in self._lanes), self._control):
            stream.synchronize()

    def _upload(self, flight: Flight, columns: Columns) -> Table:
        table = self._gpu.upload(self._tables, columns)
        flight.held.append(table)
        return table

    def _next_lane(self) -> Lane:
        lane = self._lanes[self._turn]
        self._turn = (self._turn + 1) % LANES
        return lane

    def _chunk(
        self, lane: Lane, table: Table, first: int, count: int, way: Way | None, after: list[Event]
    ) -> None:
        gpu, stream, staging = self._gpu, lane.stream, lane.staging
        if self.direction is Direction.STORE:
            for event in after:
                stream.wait(event)
        for part in self._parts:
            if self.direction is Direction.STORE and way is not None:
                gpu.gather(stream, table, first, count, part, staging)
                hosts, stages, sizes = way.runs(part, staging)
                self._copy(stream, hosts, stages, sizes)
                continue
            if way is not None:
                hosts, stages, sizes = way.runs(part, staging)
                self._copy(stream, stages, hosts, sizes)
            else:
                gpu.fill(stream, staging, GARBAGE)
            for event in after:
                stream.wait(event)
            gpu.scatter(stream, table, first, count, part, staging)
        lane.last = stream.record()
        self._on_their_way.append(lane.last)

    def _copy(self, stream: Stream, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        if self._bus is not None:
            stream.wait(self._bus)
        self._gpu.copy(stream, destinations, sources, sizes)
        self._bus = stream.record()

    def _move(self, flight: Flight, work: Work, after: list[Event]) -> Event:
        """Copies within the device. If a source is the destination of another move, all sources are read before
        anything is written; to make that fit, a few tiles of all blocks at a time."""
        lane = self._next_lane()
        rows = len(work.move_to)
        sources = self._upload(flight, Columns.unverified(work.move_from))
        destinations = self._upload(flight, Columns.unverified(work.move_to))
        for event in (*after, self._tables.record()):
            lane.stream.wait(event)
        parts, at_once = self._parts, self.rows_at_once
        if not set(work.move_from).isdisjoint(work.move_to):
            parts, at_once = self._gpu.parts(lane.staging.num_bytes // rows), rows
        if any(part.num_bytes * min(at_once, rows) > lane.staging.num_bytes for part in parts):
            raise ForebayError(f"{rows} moves at once do not fit into {lane.staging.num_bytes} bytes of staging")
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            for part in parts:
                self._gpu.gather(lane.stream, sources, first, count, part, lane.staging)
                self._gpu.scatter(lane.stream, destinations, first, count, part, lane.staging)
        lane.last = lane.stream.record()
        return lane.last
