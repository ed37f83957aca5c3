"""Stores that wait for others."""

from __future__ import annotations

from time import monotonic

from forebay.copier.threaded import Job

_ENOUGH_BLOCKS, _ENOUGH_BYTES = 16, 32 << 20


class Few:
    """Stores that are too small to be worth a flight of their own, until there are enough of them or the first has
    waited long enough. Requests that decode fill a block every few steps, and nobody waits for it."""

    def __init__(self, bytes_per_block: int, wait_s: float) -> None:
        self.jobs: list[Job] = []
        self._wait_s = wait_s
        self._blocks = 0
        self._enough = min(_ENOUGH_BLOCKS, _ENOUGH_BYTES // bytes_per_block)
        self._due_s = 0.0

    @property
    def left_s(self) -> float:
        return max(0.0, self._due_s - monotonic())

    def are_due(self) -> bool:
        return self._blocks >= self._enough or not self.left_s

    def add(self, job: Job) -> None:
        if not self.jobs:
            self._due_s = monotonic() + self._wait_s
        self.jobs.append(job)
        self._blocks += len(job.order.blocks)

    def hurry(self) -> None:
        """From another thread: those that are there by now need not wait."""
        self._due_s = 0.0

    def take(self) -> list[Job]:
        jobs, self.jobs, self._blocks = self.jobs, [], 0
        return jobs
