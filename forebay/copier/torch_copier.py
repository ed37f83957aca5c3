"""A copier for engines whose device memory the host can address, such as vLLM on CPU."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import PriorityQueue
from threading import Thread
from typing import NamedTuple

import torch

from forebay.copier.arena import Arena
from forebay.copier.checksum import Checksums, Verify
from forebay.copier.faults import Fate, Fates, InjectedFaults
from forebay.errors import ensure
from forebay.ids import Rank
from forebay.transfers import CopyOrder, Direction, Outcome, Report

logger = logging.getLogger("forebay")

_URGENCY = {Direction.LOAD: 0, Direction.STORE: 1}  # a request waits for a load, nobody for a store
_LAST = 2


class _Job(NamedTuple):
    """Sorted by urgency, then as submitted. No two have the same number, so comparing ends there."""

    urgency: int
    number: int
    order: CopyOrder
    fate: Fate


class _Stop(NamedTuple):
    """Sorted behind all jobs: they are carried out first."""

    urgency: int = _LAST


@dataclass(slots=True)
class _Held:
    report: Report
    polls_left: int


class TorchCopier:
    """Fulfils `forebay.copier.Copier` with one thread. All calls come from one other thread, the engine's.

    The engine keeps its side of the bargain: it does not write a device block that a store or a move reads, and
    neither reads nor writes one that a load writes, until that order is reported. Orders that are on their way at
    the same time are carried out in any order, loads first.

    If the copying thread dies, the next poll reports all that it left behind as failed, and starts another.
    """

    def __init__(
        self,
        regions: Sequence[torch.Tensor],
        slots: int,
        *,
        rank: Rank = Rank(0),  # noqa: B008 - a number to everybody but the type checker
        faults: InjectedFaults | None = None,
        verify: Verify = Verify.ALL,
    ) -> None:
        """`regions` as `block_regions()` returns them. Raises LayoutError or CapacityError if they do not do.
        `verify` says which blocks of a load have to be what was stored; those of orders without keys never are."""
        self.rank = rank
        self._arena = Arena(regions, slots)
        self._checksums = Checksums(slots, verify)
        faults = faults or InjectedFaults()
        if faults.concerns(rank):
            logger.warning("rank %d: faults are injected into copies, as asked for: %s", rank, faults)
        self._fates = Fates(faults, rank)
        self._submitted = 0
        self._unsettled: dict[int, _Job] = {}  # by number: nobody knows yet how they end
        self._held: list[_Held] = []
        self._closed = False
        # The thread gets jobs from here, and puts here how they ended. Nothing else is shared.
        self._jobs: PriorityQueue[_Job | _Stop] = PriorityQueue()
        self._ended: deque[tuple[_Job, Outcome]] = deque()
        self._cause_of_death = "unknown cause"
        self._warned: set[str] = set()
        self._thread = self._start()

    @property
    def slots(self) -> int:
        return self._arena.slots

    @property
    def ready(self) -> int:
        """All of them: plain memory can be used as soon as it was asked for."""
        return self._arena.slots

    @property
    def bytes_per_block(self) -> int:
        """What the regions hold of a block: the padding of the engine's pages is not copied."""
        return self._arena.bytes_per_block

    @property
    def arena(self) -> torch.Tensor:
        """uint8 [slots, bytes_per_block]: in each slot the rows of all regions, one after the other. Without slots
        once the copier is closed."""
        return self._arena.memory

    # --- the engine's thread ------------------------------------------------------------------------------

    def submit(self, order: CopyOrder) -> None:
        ensure(not self._closed, f"transfer {order.id} was submitted to a copier that is closed")
        self._submitted += 1
        order = order.detached()
        job = _Job(_URGENCY[order.direction], self._submitted, order, self._fates.draw(order.direction))
        self._unsettled[job.number] = job
        self._jobs.put(job)

    def poll(self) -> list[Report]:
        # Asked before collecting: if it was dead by then, all that it had to say has been said.
        died = not self._closed and not self._thread.is_alive()
        self._collect()
        if died:
            self._bury()
            self._jobs = PriorityQueue()
            self._thread = self._start()
        due = [held.report for held in self._held if held.polls_left <= 0 or self._closed]
        self._held = [held for held in self._held if held.polls_left > 0 and not self._closed]
        for held in self._held:
            held.polls_left -= 1
        return due

    def close(self) -> None:
        """Carry out what was submitted, then let go of the memory. What ended can still be polled."""
        self._closed = True
        self._jobs.put(_Stop())
        self._thread.join()
        self._collect()
        if self._unsettled:
            self._bury()
        self._arena.release()

    def _collect(self) -> None:
        while self._ended:
            self._settle(*self._ended.popleft())

    def _bury(self) -> None:
        """The thread is dead, so nobody will touch the memory of what it left behind."""
        logger.warning(
            "rank %d: the copying thread died (%s); orders failed with it: %d",
            self.rank,
            self._cause_of_death,
            len(self._unsettled),
        )
        for job in list(self._unsettled.values()):
            self._settle(job, Outcome.FAILED)

    def _settle(self, job: _Job, outcome: Outcome) -> None:
        del self._unsettled[job.number]
        self._held.append(_Held(Report(job.order.id, self.rank, outcome), job.fate.delay_polls))

    def _start(self) -> Thread:
        thread = Thread(target=self._serve, args=(self._jobs,), name=f"forebay-copier-{self.rank}", daemon=True)
        thread.start()
        return thread

    # --- the copying thread -------------------------------------------------------------------------------

    def _serve(self, jobs: PriorityQueue[_Job | _Stop]) -> None:
        try:
            # Engines allocate in inference mode. Such memory can be written in that mode only, and modes are a
            # thread's own.
            with torch.inference_mode():
                while isinstance(job := jobs.get(), _Job):
                    self._ended.append((job, self._carry_out(job)))
        except BaseException as error:  # noqa: BLE001 - told by whoever finds the thread dead
            # The text only: the error itself would keep alive all memory that was in use.
            self._cause_of_death = repr(error)

    def _carry_out(self, job: _Job) -> Outcome:
        order, fate = job.order, job.fate
        try:
            fault = self._arena.fault_of(order)
            if fault is None and (fate.fails or fate.kills):
                self._arena.garble(order)
            if fate.kills:
                raise SystemExit("injected")
            if fault is not None and self._is_first("refused"):
                logger.warning(
                    "rank %d: transfer %d was refused: %s (not logged again)", self.rank, order.id, fault
                )
            if fault is not None or fate.fails:
                return Outcome.FAILED
            sums = self._checksums.begin(order)
            self._arena.copy(order, sums)
            if order.direction is Direction.STORE:
                self._checksums.keep(order, sums)
            elif wrong := self._checksums.wrong_slots(order, sums):
                if self._is_first("mismatch"):
                    logger.warning(
                        "rank %d: transfer %d found other bytes than were stored in slots %s (not logged again)",
                        self.rank,
                        order.id,
                        wrong,
                    )
                return Outcome.MISMATCH
        except Exception as error:
            if self._is_first(type(error).__name__):
                logger.warning(
                    "rank %d: transfer %d could not be copied (not logged again)",
                    self.rank,
                    order.id,
                    exc_info=True,
                )
            return Outcome.FAILED
        return Outcome.DONE

    def _is_first(self, kind: str) -> bool:
        """What fails once may fail in every step: it is logged once."""
        first = kind not in self._warned
        self._warned.add(kind)
        return first
