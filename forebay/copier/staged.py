"""A copier for devices with memory and streams of their own: GPUs.

The engine's thread only writes an order down, together with a mark in its own stream. The copier's thread gives
orders to the device, chunk by chunk and loads first; nobody waits for bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from queue import Empty

import numpy as np

from forebay.copier.checksum import Verify, sampled, seeds
from forebay.copier.faults import GARBAGE, InjectedFaults, Spoil
from forebay.copier.orders import fault_of
from forebay.copier.pages import HostPages
from forebay.copier.stager import Flight, Stager
from forebay.copier.streams import Columns, Event, Gpu
from forebay.copier.threaded import Job, Jobs, Stop, ThreadedCopier
from forebay.errors import ensure
from forebay.ids import Key, Rank
from forebay.transfers import CopyOrder, Direction, Outcome

LOAD_STAGING_BYTES = 64 << 20
STORE_STAGING_BYTES = 32 << 20
"""Of each lane. Large enough that a chunk's share of Python does not count, small enough that nobody misses it."""

_TICKETS = 4096
_LOOK_AGAIN_S = 0.0002
_AHEAD = ((Direction.LOAD, 3), (Direction.STORE, 4), (Direction.LOAD, 16))
"""Chunks that are given ahead, first to last. Few enough that others soon have their turn, enough that the bus
does not stand still when the engine keeps this thread from running for a while."""


class StagedCopier(ThreadedCopier):
    def __init__(
        self,
        gpu: Gpu,
        pages: HostPages,
        *,
        rank: Rank = Rank(0),  # noqa: B008 - a number to everybody but the type checker
        verify: Verify = Verify.ALL,
        faults: InjectedFaults | None = None,
        load_staging_bytes: int = LOAD_STAGING_BYTES,
        store_staging_bytes: int = STORE_STAGING_BYTES,
    ) -> None:
        super().__init__(rank, faults)
        ensure(pages.bytes_per_slot == gpu.bytes_per_block, "slots and blocks are of different sizes")
        self._gpu = gpu
        self._pages = pages
        self._verify = verify
        self._stagers = {
            Direction.LOAD: Stager(gpu, pages, Direction.LOAD, load_staging_bytes),
            Direction.STORE: Stager(gpu, pages, Direction.STORE, store_staging_bytes),
        }
        self._tickets = deque(range(_TICKETS))
        # By direction, in the order in which they will end. The copier's thread appends, the engine's takes.
        self._flights: dict[Direction, deque[tuple[Job, Flight]]] = {each: deque() for each in Direction}
        self._begin()

    @property
    def slots(self) -> int:
        return self._pages.slots

    @property
    def ready(self) -> int:
        return self._pages.ready

    @property
    def pages(self) -> HostPages:
        return self._pages

    @property
    def bytes_per_block(self) -> int:
        return self._gpu.bytes_per_block

    # --- the engine's thread ------------------------------------------------------------------------------

    def _mark(self) -> Event:
        return self._gpu.mark()

    def _look(self) -> None:
        for flights in self._flights.values():
            while flights and (self._has_landed(flights[0][1]) or flights[0][0].fate.spoils is Spoil.EARLY):
                job, flight = flights.popleft()
                self._ended.append((job, self._outcome(job, flight)))
                self._tickets.append(flight.ticket)

    def _has_landed(self, flight: Flight) -> bool:
        try:
            return flight.done is None or flight.done.query()
        except Exception as error:  # noqa: BLE001 - a device that fails fails in many ways
            # It will not answer better next time, and what it was doing it does no more.
            flight.error = flight.error or repr(error)
            return True

    def _outcome(self, job: Job, flight: Flight) -> Outcome:
        if flight.error is not None:
            if not job.fate.fails:
                self._warn_once("failed", "transfer %d could not be copied: %s", job.order.id, flight.error)
            return Outcome.FAILED
        differ = self._gpu.told(flight.ticket)
        if differ is None:
            # The event says that it is done, but the last thing it does has not happened. Whatever the reason, it
            # must have ended before its memory is used for something else.
            self._warn_once("early", "transfer %d was reported before it was done", job.order.id)
            self._stagers[flight.direction].synchronize()
            return Outcome.MISMATCH
        if differ:
            self._warn_once(
                "mismatch",
                "transfer %d: %d of %d blocks are not what was stored; they are computed again",
                job.order.id,
                differ,
                len(job.order.blocks),
            )
            return Outcome.MISMATCH
        if job.fate.spoils is Spoil.FLIP and job.order.slots:
            self._pages.row(job.order.slots[0])[self.bytes_per_block // 2] ^= 1
        return Outcome.DONE

    def _settle_down(self) -> None:
        for stager in self._stagers.values():
            try:
                stager.synchronize()
            except Exception as error:  # noqa: BLE001 - the device or its driver may be gone
                self._warn_once("synchronize", "the device does not answer: %r", error)

    def _release(self) -> None:
        self._pages.close()

    # --- the copying thread -------------------------------------------------------------------------------

    def _serve(self, jobs: Jobs) -> None:
        self._gpu.enter()
        begun: dict[Direction, deque[tuple[Job, Iterator[Flight]]]] = {each: deque() for each in Direction}
        stopping = False
        while not stopping or any(begun.values()):
            direction = self._next_direction(begun)
            try:
                # With something to give the device, only look; with something to wait for, look again soon.
                wait_s = _LOOK_AGAIN_S if any(begun.values()) else None
                job = jobs.get(block=direction is None, timeout=wait_s)
            except Empty:
                if direction is not None:
                    self._advance(begun[direction])
                continue
            if isinstance(job, Stop):
                stopping = True
            else:
                begun[job.order.direction].append((job, self._chunks(job)))

    def _next_direction(self, begun: Mapping[Direction, Sized]) -> Direction | None:
        """Whose chunk comes next. A request waits for a load, so loads are first, and are given far ahead; but
        both ways of the bus can be used at once, and a store need not wait until the last load was given."""
        for direction, ahead in _AHEAD:
            if begun[direction] and self._stagers[direction].ahead < ahead:
                return direction
        return None

    def _advance(self, begun: deque[tuple[Job, Iterator[Flight]]]) -> None:
        job, chunks = begun[0]
        flight = next(chunks, None)
        if flight is None or self._note(job, flight):
            begun.popleft()

    def _note(self, job: Job, flight: Flight) -> bool:
        """Whether all of it is on its way."""
        if flight.done is None:
            return False
        self._flights[flight.direction].append((job, flight))
        return True

    def _chunks(self, job: Job) -> Iterator[Flight]:
        """Nothing if the order is not carried out. Then it has ended."""
        order, fate = job.order, job.fate
        fault = fault_of(order, self._gpu.num_blocks, self._pages.ready)
        if fault is None and not self._tickets:
            fault = f"{_TICKETS} are on their way already"
        if fault is not None:
            self._warn_once("refused", "transfer %d was refused: %s", order.id, fault)
            self._ended.append((job, Outcome.FAILED))
            return
        if fate.fails or fate.kills:
            yield from self._fail(job)
            return
        if fate.spoils is Spoil.REUSE and order.slots:
            self._reuse(order)
        yield from self._stager(order).issue(order, self._columns(order), job.mark, self._ticket())

    def _fail(self, job: Job) -> Iterator[Flight]:
        """An injected failure: garbage wherever the order would have written."""
        order = job.order
        if order.direction is Direction.STORE:
            for slot in order.slots:
                self._pages.row(slot)[:] = GARBAGE
            self._ended.append((job, Outcome.FAILED))
        else:
            written = [*order.blocks, *order.move_to]
            nothing = np.zeros(len(written), dtype=np.int64)
            columns = Columns(written, nothing, nothing, nothing)
            yield from self._stager(order).issue(order, columns, job.mark, self._ticket(), garbage=True)
        if job.fate.kills:
            raise SystemExit("injected")

    def _stager(self, order: CopyOrder) -> Stager:
        return self._stagers[order.direction]

    def _ticket(self) -> int:
        ticket = self._tickets.popleft()
        self._gpu.expect(ticket)
        return ticket

    def _columns(self, order: CopyOrder) -> Columns:
        rows = len(order.slots)
        nothing = np.zeros(rows, dtype=np.int64)
        if self._verify is Verify.OFF or not order.keys:
            return Columns(order.blocks, order.slots, nothing, nothing)
        found = seeds(order.keys)
        wanted = sampled(found) if self._verify is Verify.SAMPLED else np.ones(rows, dtype=bool)
        return Columns(order.blocks, order.slots, found.view(np.int64), wanted.astype(np.int64))

    def _reuse(self, order: CopyOrder) -> None:
        """An injected fault: the first slot of a load is filled with something else before it is read."""
        block, slot = order.blocks[0], order.slots[0]
        other = [Key(bytes([key[0] ^ 1]) + key[1:]) for key in order.keys[:1]]
        store = CopyOrder(order.id, Direction.STORE, [block], [slot], [], [], other)
        ticket, stager = self._ticket(), self._stager(store)
        for _ in stager.issue(store, self._columns(store), None, ticket):
            pass
        stager.synchronize()
        self._tickets.append(ticket)
