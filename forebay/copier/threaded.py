"""What copiers with a thread of their own have in common: orders go in, each comes out once, whatever happens."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic
from typing import NamedTuple

from forebay.copier.faults import Fate, Fates, InjectedFaults
from forebay.copier.streams import Event
from forebay.errors import ensure
from forebay.ids import Rank
from forebay.transfers import CopyOrder, Direction, Outcome, Report
from forebay.warner import Warner

logger = logging.getLogger("forebay")

_URGENCY = {Direction.LOAD: 0, Direction.STORE: 1}  # a request waits for a load, nobody for a store
_FIRST, _LAST = -1, 2

_MANY_DEATHS = 8

_LOOK_AGAIN_S = 0.05
_PATIENCE_S = 60
"""How long close() waits for a thread that may hang in a driver."""


class Job(NamedTuple):
    """Sorted by urgency, then as submitted. No two have the same number, so comparing ends there."""

    urgency: int
    number: int
    order: CopyOrder
    fate: Fate
    mark: Event | None
    """What the device must have passed before the order may touch its blocks."""


class Stop(NamedTuple):
    """Sorted behind all jobs: they are carried out first."""

    urgency: int = _LAST


class Wake(NamedTuple):
    """There is something to do that is no job."""

    urgency: int = _FIRST
    cause_of_death: str = ""
    """What the thread is to die of, if not empty."""


class Jobs:
    """On their way to the thread, the most urgent first. Python's own priority queue has a lock: whoever loses his
    turn while he holds it makes the other side wait for that turn too, which is 5 ms beside a busy thread."""

    def __init__(self) -> None:
        self._waiting: list[Job | Stop | Wake] = []
        self._bell: SimpleQueue[None] = SimpleQueue()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, job: Job | Stop | Wake) -> None:
        heappush(self._waiting, job)
        self._bell.put(None)

    def get(self, timeout_s: float | None = None) -> Job | Stop | Wake | None:
        """None if nothing comes in time."""
        try:
            self._bell.get(timeout=timeout_s)
        except Empty:
            return None
        return heappop(self._waiting)


@dataclass(slots=True)
class _Held:
    report: Report
    polls_left: int


class ThreadedCopier(ABC):
    """Fulfils `forebay.copier.Copier` with one thread. All calls come from one other thread, the engine's.

    The engine keeps its side of the bargain: it does not write a device block that a store or a move reads, and
    neither reads nor writes one that a load writes, until that order is reported. Orders that are on their way at
    the same time are carried out in any order, loads first.

    If the copying thread dies, the next poll reports all that it left behind as failed, and starts another. If
    that happens again and again and nothing gets done, the copier stops, says so, and fails all that follows.
    """

    def __init__(self, rank: Rank, faults: InjectedFaults | None) -> None:
        self.rank = rank
        faults = faults or InjectedFaults()
        if faults.concerns(rank):
            logger.warning("rank %d: faults are injected into copies, as asked for: %s", rank, faults)
        self._fates = Fates(faults, rank)
        self._submitted = 0
        self._unsettled: dict[int, Job] = {}  # by number: nobody knows yet how they end
        self._held: list[_Held] = []
        self._closed = False
        self._stopped = False
        self._deaths = 0  # in a row
        # The thread gets jobs from here, and puts here how they ended. Nothing else is shared.
        self._jobs = Jobs()
        self._ended: deque[tuple[Job, Outcome]] = deque()
        self._cause_of_death = "unknown cause"
        self._warner = Warner()

    def _begin(self) -> None:
        """Called at the end of a constructor."""
        self._thread = self._start()

    # --- what differs -----------------------------------------------------------------------------------

    @abstractmethod
    def _serve(self, jobs: Jobs) -> None:
        """In the thread: carry out jobs until Stop comes."""

    @abstractmethod
    def _release(self) -> None:
        """Let go of all memory. The thread has ended, and nothing is on its way. May be called twice."""

    def _mark(self) -> Event | None:
        """What a job has to wait for."""
        return None

    def _begin_here(self, job: Job) -> bool:
        """Whether the job was begun in the engine's thread, and is not for the other."""
        return False

    def _look(self) -> None:  # noqa: B027 - most have nothing to do here
        """Put into _ended what has ended since, where the thread does not do so itself."""

    def _settle_down(self) -> None:  # noqa: B027
        """The thread is dead: wait until nothing touches the memory of what it had begun."""

    # --- the engine's thread ------------------------------------------------------------------------------

    def submit(self, order: CopyOrder) -> None:
        ensure(not self._closed, f"transfer {order.id} was submitted to a copier that is closed")
        self._submitted += 1
        order = order.detached()
        fate = self._fates.draw(order.direction)
        job = Job(_URGENCY[order.direction], self._submitted, order, fate, self._mark())
        self._unsettled[job.number] = job
        if self._stopped:
            self._ended.append((job, Outcome.FAILED))
        elif not self._begin_here(job):
            self._jobs.put(job)

    def poll(self) -> list[Report]:
        # Asked before collecting: if it was dead by then, all that it had to say has been said.
        died = not self._closed and not self._stopped and not self._thread.is_alive()
        self._collect()
        if died:
            self._settle_down()
            self._collect()
            self._bury()
            self._jobs = Jobs()
            self._deaths += 1
            if self._deaths < _MANY_DEATHS:
                self._thread = self._start()
            else:
                logger.error("rank %d: the copier has stopped; nothing is stored or loaded any more", self.rank)
                self._stopped = True
        due = [held.report for held in self._held if held.polls_left <= 0 or self._closed]
        self._held = [held for held in self._held if held.polls_left > 0 and not self._closed]
        for held in self._held:
            held.polls_left -= 1
        return due

    def close(self) -> None:
        """Carry out what was submitted, then let go of the memory. What ended can still be polled."""
        self._closed = True
        self._jobs.put(Stop())
        deadline_s = monotonic() + _PATIENCE_S
        while self._thread.is_alive() and monotonic() < deadline_s:
            self._thread.join(_LOOK_AGAIN_S)
            self._collect()  # it may wait for that
        if self._thread.is_alive():
            # Its memory stays as it is: freeing it under a copy would be worse than keeping it.
            logger.warning("rank %d: the copying thread did not end within %d s", self.rank, _PATIENCE_S)
            return
        self._settle_down()
        self._collect()
        if self._unsettled:
            self._bury()
        self._release()

    def _collect(self) -> None:
        self._look()
        while self._ended:
            self._settle(*self._ended.popleft())

    def _bury(self) -> None:
        """The thread is dead, so nobody will touch the memory of what it left behind."""
        line = "the copying thread died (%s); orders failed with it: %d"
        self._warn("died", line, self._cause_of_death, len(self._unsettled))
        for job in list(self._unsettled.values()):
            self._settle(job, Outcome.FAILED)

    def _settle(self, job: Job, outcome: Outcome) -> None:
        del self._unsettled[job.number]
        if outcome is Outcome.DONE:
            self._deaths = 0
        self._held.append(_Held(Report(job.order.id, self.rank, outcome), job.fate.delay_polls))

    def _start(self) -> Thread:
        thread = Thread(target=self._run, args=(self._jobs,), name=f"forebay-copier-{self.rank}", daemon=True)
        thread.start()
        return thread

    # --- the copying thread -------------------------------------------------------------------------------

    def _run(self, jobs: Jobs) -> None:
        try:
            self._serve(jobs)
        except BaseException as error:  # noqa: BLE001 - told by whoever finds the thread dead
            # The text only: the error itself would keep alive all memory that was in use.
            self._cause_of_death = repr(error)

    def _warn(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        """What fails once may fail in every step. From any thread."""
        self._warner.warn(kind, f"rank %d: {message}", self.rank, *values, exc_info=exc_info)
