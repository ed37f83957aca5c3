"""Copiers that hold real bytes, with switches for everything that can go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from sys import maxsize

from forebay.errors import ensure
from forebay.ids import Key, Rank, Slot, TransferId
from forebay.transfers import CopyOrder, Direction, Outcome, Report


class Memory:
    """Numbered places of equal size. What was never written reads as a pattern no block contains."""

    def __init__(self, bytes_per_place: int) -> None:
        self._never = b"\xa5" * bytes_per_place
        self._places: dict[int, bytes] = {}

    def read(self, place: int) -> bytes:
        return self._places.get(place, self._never)

    def write(self, place: int, content: bytes) -> None:
        self._places[place] = content


@dataclass
class Faults:
    """Switches of one copier. All off: every copy is done by the next poll."""

    only: Direction | None = None
    """The switches below concern copies in this direction only."""
    hold: bool = False
    """Copies wait until it is switched off."""
    delay_polls: int = 0
    """Copies end so many polls later."""
    fail_nth: set[int] = field(default_factory=set)
    """The Nth order from the copier's start (1, 2, …) fails and leaves garbage behind."""
    fail_chance: float = 0.0
    mismatch_chance: float = 0.0
    """Loads find other bytes in their slots than were stored there, and say so."""
    drop_chance: float = 0.0
    """The bytes move, but nobody is told."""
    duplicate: bool = False
    """Every report is made twice."""
    reorder: bool = False
    """What ends together is copied and reported in random order."""
    stray: bool = False
    """With every report come two about a transfer and a rank that do not exist."""


@dataclass
class _Job:
    order: CopyOrder
    number: int
    polls_left: int


class ByteCopier:
    """The reference for `forebay.copier.Copier`: one rank's part of device and host, in plain bytes.

    Bytes move when a copy ends, not when it is submitted: if anybody reuses memory too early, the wrong bytes
    arrive, and a test that compares bytes sees it.
    """

    def __init__(self, rank: Rank, device: Memory, host: Memory, rng: Random, slots: int = maxsize) -> None:
        self.rank = rank
        self.faults = Faults()
        self.device, self.host = device, host
        self.slots = slots
        self.ready = slots  # set it lower, and raise it, to be memory that becomes usable bit by bit
        self.mismatched: list[TransferId] = []  # not by a fault: a slot did not hold what the order said
        self._stored: dict[Slot, Key] = {}
        self.reports_dropped: list[Report] = []
        self.failed: list[TransferId] = []
        self._rng = rng
        self._jobs: list[_Job] = []
        self._submitted = 0

    @property
    def busy(self) -> int:
        return len(self._jobs)

    def submit(self, order: CopyOrder) -> None:
        ensure(max(order.slots, default=-1) < self.ready, f"transfer {order.id} names a slot that is not ready")
        self._submitted += 1
        # Orders travel between processes in a real engine: nothing that happens to the caller's lists may matter.
        self._jobs.append(_Job(order.detached(), self._submitted, self.faults.delay_polls))

    def poll(self) -> list[Report]:
        ending: list[_Job] = []
        waiting: list[_Job] = []
        for job in self._jobs:
            (waiting if self._is_held(job) else ending).append(job)
        self._jobs = waiting
        if self.faults.reorder:
            self._rng.shuffle(ending)
        reports = []
        for job in ending:
            reports += self._end(job)
        if self.faults.reorder:
            self._rng.shuffle(reports)
        return reports

    def close(self) -> None:
        self.faults = Faults()
        while self._jobs:
            self.poll()

    def _is_held(self, job: _Job) -> bool:
        faults = self.faults
        if faults.hold and faults.only in (None, job.order.direction):
            return True
        job.polls_left -= 1
        return job.polls_left >= 0

    def _end(self, job: _Job) -> list[Report]:
        order = job.order
        faults = self.faults if self.faults.only in (None, order.direction) else Faults()
        fails = job.number in faults.fail_nth or self._rng.random() < faults.fail_chance
        outcome = Outcome.FAILED if fails else self._verify(order, faults)
        self._copy(order, garble=outcome.failed)
        if outcome.failed:
            self.failed.append(order.id)
        report = Report(order.id, self.rank, outcome)
        if self._rng.random() < faults.drop_chance:
            self.reports_dropped.append(report)
            return []
        reports = [report]
        if faults.duplicate:
            reports *= 2
        if faults.stray:
            reports.append(Report(TransferId(order.id + 1_000_000), self.rank, Outcome.DONE))
            reports.append(Report(order.id, Rank(self.rank + 1_000), Outcome.FAILED))
        return reports

    def _verify(self, order: CopyOrder, faults: Faults) -> Outcome:
        if order.direction is Direction.STORE:
            self._stored.update(zip(order.slots, order.keys, strict=False))
            return Outcome.DONE
        if any(self._stored.get(slot) != key for slot, key in zip(order.slots, order.keys, strict=False)):
            self.mismatched.append(order.id)
            return Outcome.MISMATCH
        chance = faults.mismatch_chance  # not drawn for without it: seeds go on meaning what they meant
        return Outcome.MISMATCH if chance and self._rng.random() < chance else Outcome.DONE

    def _copy(self, order: CopyOrder, *, garble: bool) -> None:
        device, host = self.device, self.host
        writes: list[tuple[Memory, int, bytes]] = []
        for block, slot in zip(order.blocks, order.slots, strict=True):
            if order.direction is Direction.STORE:
                writes.append((host, slot, device.read(block)))
            else:
                writes.append((device, block, host.read(slot)))
        for source, block in zip(order.move_from, order.move_to, strict=True):
            writes.append((device, block, device.read(source)))
        for memory, place, content in writes:
            memory.write(place, bytes(~byte & 0xFF for byte in content) if garble else content)
