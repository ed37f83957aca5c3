"""A copier for devices with memory and streams of their own: GPUs.

The engine's thread writes an order down, together with a mark in its own stream. The copier's thread gives orders
to the device, chunk by chunk and loads first; nobody waits for bytes.

Python lets one thread run at a time. While an engine takes requests in, two of its threads are busy, and a third
one may wait for 20 to 50 ms until it runs at all. So the engine's thread, which runs anyway, gives the device the
first chunks of a load itself, and more with a poll if the device would else run dry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sized
from itertools import chain
from threading import Event as Flag
from threading import Lock
from time import monotonic, sleep

from forebay.copier.checksum import Verify, is_sampled, seeds
from forebay.copier.faults import GARBAGE, Fate, InjectedFaults, Spoil
from forebay.copier.few import Few
from forebay.copier.orders import fault_of
from forebay.copier.pages import HostPages
from forebay.copier.rests import Rests
from forebay.copier.stager import LANES, Flight, Stager, Work
from forebay.copier.streams import Columns, Event, Gpu, Staging
from forebay.copier.threaded import Job, Jobs, Stop, ThreadedCopier, Wake
from forebay.errors import ensure
from forebay.ids import Key, Rank
from forebay.transfers import CopyOrder, Direction, Outcome

LOAD_STAGING_BYTES = 128 << 20
STORE_STAGING_BYTES = 64 << 20
"""Of each lane. Large enough that a chunk's share of Python does not count, small enough that nobody misses it. It
counts most with loads: the engine's thread gives some of their chunks, and has a step to begin."""
FEW_WAIT_S = 0.2

_LEAST_STAGING_BYTES = 1 << 20

_TICKETS = 4096
_LOOK_AGAIN_S = 0.006
_TURN_S, _BREATH_S = 0.001, 0.0001
"""How long the copier's thread runs without a break, and how long that is. One that never waits is made to after
5 ms by Python, and the engine's has launches to do. Not after every chunk, and not if the device has little to do:
beside a busy thread, one that waits gets its turn back 5 ms later, too."""
_AHEAD = ((Direction.LOAD, 4), (Direction.STORE, 12), (Direction.LOAD, 8))
"""Chunks that are given ahead, first to last. Few enough that others soon have their turn, enough that the bus
does not stand still while this thread waits and then gives the next ones: some 15 to 20 ms of it. That it waits
long is the point: each time it runs, the engine does not."""
_MOST_HERE = 1024
"""Blocks of a load that the engine's thread may begin: that takes it a microsecond for two of them."""
_LOW = {Direction.LOAD: 3, Direction.STORE: 6}
"""Chunks that the bus needs some 7 ms for: with less the device has little to do."""
_AT_ONCE = 4
"""Chunks of loads that the engine's thread gives, ahead and between two polls."""


class StagedCopier(ThreadedCopier):
    def __init__(
        self,
        gpu: Gpu,
        pages: HostPages,
        *,
        rank: Rank = Rank(0),  # noqa: B008 - a number to everybody but the type checker
        verify: Verify = Verify.ALL,
        faults: InjectedFaults | None = None,
        few_wait_s: float = FEW_WAIT_S,
        load_staging_bytes: int = LOAD_STAGING_BYTES,
        store_staging_bytes: int = STORE_STAGING_BYTES,
        waits: bool = False,
    ) -> None:
        """`few_wait_s`: how long stores of a few blocks may wait for others. `waits`: kernels are not compiled
        before go_on() is called, or an order is submitted."""
        super().__init__(rank, faults)
        self._few_wait_s = few_wait_s
        ensure(pages.bytes_per_slot == gpu.bytes_per_block, "slots and blocks are of different sizes")
        self._gpu = gpu
        self._pages = pages
        self._verify = verify
        self._stagers = self._with_staging(load_staging_bytes, store_staging_bytes)
        self._tickets = deque(range(_TICKETS))
        self._giving = Lock()  # held by whoever gives the device something, for as long as that takes
        self._begun = _begun()
        self._go = Flag()
        if not waits:
            self._go.set()
        self._entered = False  # whether the thread has done what takes long, once
        self._left_to_give = _AT_ONCE  # chunks, for the engine's thread until it polls
        self._rests = Rests()
        self._few = Few(self.bytes_per_block, few_wait_s)
        # By direction, in the order in which they will end. The copier's thread appends, the engine's takes.
        self._flights: dict[Direction, deque[tuple[list[Job], Flight]]] = {each: deque() for each in Direction}
        self._begin()

    def _with_staging(self, load_bytes: int, store_bytes: int) -> dict[Direction, Stager]:
        """With less staging memory where the device has little left. Copies are slower then, and work."""
        while True:
            try:
                whole = self._gpu.staging(LANES * (load_bytes + store_bytes))
                break
            except MemoryError:
                if min(load_bytes, store_bytes) <= _LEAST_STAGING_BYTES:
                    raise
                load_bytes, store_bytes = load_bytes // 2, store_bytes // 2
        of_loads = Staging(whole.address, LANES * load_bytes)
        of_stores = Staging(whole.address + LANES * load_bytes, LANES * store_bytes)
        return {
            Direction.LOAD: Stager(self._gpu, self._pages, Direction.LOAD, of_loads),
            Direction.STORE: Stager(self._gpu, self._pages, Direction.STORE, of_stores),
        }

    def go_on(self) -> None:
        """The engine has started: what would have kept it from that may begin. May be called twice."""
        self._go.set()
        self._pages.go_on()

    def rest(self) -> None:
        """The engine's thread is about to give the device a step: hundreds of calls, each of which lets other
        threads run. The copier's thread had better not be one of them: both would take several times as long, and
        the device waits for the step. So it rests, for a while, and unless the device runs out of loads."""
        self._rests.begin()

    def resume(self) -> None:
        self._rests.end()
        if self._rests.holds_up and not self._stopped:
            self._jobs.put(Wake())

    def hurry(self) -> None:
        """The engine has nothing to compute, so few blocks need not wait for others."""
        if self._few.jobs and not self._stopped:
            self._few.hurry()
            self._jobs.put(Wake())

    def close(self) -> None:
        self._closed = True
        self._go.set()
        self.resume()
        super().close()

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

    def _begin_here(self, job: Job) -> bool:
        if not self._go.is_set():
            self.go_on()
        if not self._may_give(job) or not self._giving.acquire(blocking=False):
            return False
        try:
            if not self._is_refused(job):
                self._begun[Direction.LOAD].append(([job], self._issue([job])))
                self._give_loads(_AT_ONCE)
        except Exception as error:  # noqa: BLE001 - it must not be the engine's
            self._jobs.put(Wake(cause_of_death=repr(error)))
        finally:
            self._giving.release()
        self._jobs.put(Wake())
        return True

    def _may_give(self, job: Job) -> bool:
        """Whether the engine's thread may give the device chunks of this job. Not if that takes long, as it does
        until kernels are compiled and if memory is not pinned, nor if it might be told to die of it."""
        return (
            self._left_to_give > 0
            and job.order.direction is Direction.LOAD
            and job.order.num_copies <= _MOST_HERE
            and job.fate == Fate()
            and self._entered
            and self._pages.pinned
        )

    def _give_loads(self, below: int) -> None:
        """Give the device more if it has less than so many chunks."""
        begun, stager = self._begun[Direction.LOAD], self._stagers[Direction.LOAD]
        if stager.ahead < below:
            while begun and self._tickets and stager.ahead < _AT_ONCE and self._may_give(begun[0][0][0]):
                self._advance(begun)
                self._left_to_give -= 1

    def _look(self) -> None:
        self._left_to_give = _AT_ONCE
        if self._begun[Direction.LOAD] and self._giving.acquire(blocking=False):
            try:
                self._give_loads(_LOW[Direction.LOAD])
            except Exception as error:  # noqa: BLE001 - it must not be the engine's
                self._jobs.put(Wake(cause_of_death=repr(error)))
            finally:
                self._giving.release()
        for flights in self._flights.values():
            while flights and (self._has_landed(flights[0][1]) or flights[0][0][0].fate.spoils is Spoil.EARLY):
                jobs, flight = flights.popleft()
                self._ended.extend((job, self._outcome(job, flight)) for job in jobs)
                self._tickets.append(flight.ticket)
                for table in flight.held:
                    self._gpu.drop(table)

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
                self._warn("failed", "transfer %d could not be copied: %s", job.order.id, flight.error)
            return Outcome.FAILED
        differ = self._gpu.told(flight.ticket)
        if differ is None:
            # The event says that it is done, but the last thing it does has not happened. Whatever the reason, it
            # must have ended before its memory is used for something else.
            self._warn("early", "transfer %d was reported before it was done", job.order.id)
            self._stagers[flight.direction].synchronize()
            return Outcome.MISMATCH
        if differ:
            self._warn(
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
        self._begun = _begun()  # or the next look would give the device more of it
        for stager in self._stagers.values():
            try:
                stager.synchronize()
            except Exception as error:  # noqa: BLE001 - the device or its driver may be gone
                self._warn("synchronize", "the device does not answer: %r", error)

    def _release(self) -> None:
        self._pages.close()
        try:
            self._gpu.release()
        except Exception as error:  # noqa: BLE001 - a process that ends may have lost its driver before
            self._warn("release", "the device's memory could not be given back: %r", error)

    def _bury(self) -> None:
        super()._bury()
        self._rests.caught_up()
        self._tickets = deque(range(_TICKETS))  # nothing is on its way any more

    # --- the copying thread -------------------------------------------------------------------------------

    def _serve(self, jobs: Jobs) -> None:
        self._go.wait()
        if self._closed and not self._submitted:
            return  # so nobody needs what takes long
        self._gpu.enter()
        self._entered = True
        begun = self._begun
        few = self._few = Few(self.bytes_per_block, self._few_wait_s)  # of a thread that died, all has failed
        stopping, waited_at_s = False, monotonic()
        while not stopping or few.jobs or any(begun.values()):
            direction, breathes = None, False
            with self._giving:
                rest_s = self._rests.left_s
                if not rest_s or (begun[Direction.LOAD] and self._runs_dry(Direction.LOAD)):
                    if few.jobs and (stopping or few.are_due()):
                        together = few.take()
                        begun[Direction.STORE].append((together, self._issue(together)))
                    direction = self._next_direction(begun)
                    if direction is not None:
                        self._advance(begun[direction])
                        breathes = monotonic() - waited_at_s >= _TURN_S and not self._runs_dry(direction)
            wait_s = _LOOK_AGAIN_S if any(begun.values()) else few.left_s if few.jobs else None
            if direction is not None:
                wait_s = 0.0
            elif rest_s and (any(begun.values()) or (few.jobs and few.are_due())):
                self._rests.hold_up()
                wait_s = min(_LOOK_AGAIN_S, rest_s)
            else:
                self._rests.caught_up()
            if breathes:
                sleep(_BREATH_S)
            job = jobs.get(wait_s)
            if breathes or (job is None and wait_s):
                waited_at_s = monotonic()
            if isinstance(job, Wake) and job.cause_of_death:
                raise RuntimeError(job.cause_of_death)  # the engine's thread met it, but this one can be replaced
            if isinstance(job, Stop):
                stopping = True
            elif isinstance(job, Job) and not self._is_refused(job):
                if job.order.direction is Direction.STORE and job.fate == Fate():
                    few.add(job)
                else:
                    begun[job.order.direction].append(([job], self._fated(job)))

    def _runs_dry(self, direction: Direction) -> bool:
        """Whether the device has little to do of what it was given: no time to rest."""
        return self._stagers[direction].ahead < _LOW[direction]

    def _next_direction(self, begun: Mapping[Direction, Sized]) -> Direction | None:
        """Whose chunk comes next. A request waits for a load, so loads are first, and are given far ahead; but
        both ways of the bus can be used at once, and a store need not wait until the last load was given."""
        for direction, ahead in _AHEAD:
            if begun[direction] and self._tickets and self._stagers[direction].ahead < ahead:
                return direction
        return None

    def _advance(self, begun: deque[tuple[list[Job], Iterator[Flight]]]) -> None:
        jobs, chunks = begun[0]
        flight = next(chunks, None)
        if flight is None or flight.done is not None:
            begun.popleft()
        if flight is not None and flight.done is not None:
            self._flights[flight.direction].append((jobs, flight))

    def _is_refused(self, job: Job) -> bool:
        fault = fault_of(job.order, self._gpu.num_blocks, self._pages.ready)
        if fault is not None:
            self._warn("refused", "transfer %d was refused: %s", job.order.id, fault)
            self._ended.append((job, Outcome.FAILED))
        return fault is not None

    def _issue(self, jobs: list[Job]) -> Iterator[Flight]:
        """As one flight. All are of one direction, and were submitted in this order."""
        orders = [job.order for job in jobs]
        columns = zip(*map(self._columns, orders), strict=True)
        work = Work(
            Columns(*(list(chain.from_iterable(of_each)) for of_each in columns)),
            jobs[-1].mark,  # a later point of the same stream
            [block for order in orders for block in order.move_from],
            [block for order in orders for block in order.move_to],
        )
        yield from self._stagers[orders[0].direction].issue(work, self._ticket())

    def _columns(self, order: CopyOrder) -> Columns:
        if self._verify is Verify.OFF or not order.keys:
            return Columns.unverified(order.blocks, order.slots)
        found = seeds(order.keys)
        wanted = map(is_sampled, found) if self._verify is Verify.SAMPLED else [1] * len(found)
        return Columns(order.blocks, order.slots, found, list(wanted))

    def _ticket(self) -> int:
        ticket = self._tickets.popleft()
        self._gpu.expect(ticket)
        return ticket

    # --- injected faults ----------------------------------------------------------------------------------

    def _fated(self, job: Job) -> Iterator[Flight]:
        if job.fate.fails or job.fate.kills:
            yield from self._fail(job)
            return
        if job.fate.spoils is Spoil.REUSE and job.order.keys:
            self._reuse(job)
        yield from self._issue([job])

    def _fail(self, job: Job) -> Iterator[Flight]:
        """Garbage wherever the order would have written."""
        order = job.order
        if order.direction is Direction.STORE:
            for slot in order.slots:
                self._pages.row(slot)[:] = GARBAGE
            self._ended.append((job, Outcome.FAILED))
        else:
            work = Work(Columns.unverified([*order.blocks, *order.move_to]), job.mark, garbage=True)
            yield from self._stagers[order.direction].issue(work, self._ticket())
        if job.fate.kills:
            raise SystemExit("injected")

    def _reuse(self, job: Job) -> None:
        """The first slot of a load is filled with something else before it is read."""
        block, slot, key = job.order.blocks[0], job.order.slots[0], job.order.keys[0]
        other = Key(bytes([key[0] ^ 1]) + key[1:])
        store = CopyOrder(job.order.id, Direction.STORE, [block], [slot], [], [], [other])
        *_, flight = self._issue([job._replace(order=store)])
        self._stagers[Direction.STORE].synchronize()
        self._tickets.append(flight.ticket)


def _begun() -> dict[Direction, deque[tuple[list[Job], Iterator[Flight]]]]:
    """What was begun and not given to the device as a whole, by direction."""
    return {each: deque() for each in Direction}
