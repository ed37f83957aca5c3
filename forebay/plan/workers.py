"""Runs jobs in a few processes, and leaves none behind, however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar

from forebay.errors import ForebayError

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
Tell = Callable[[float], None]


class Job(Protocol[R_co]):
    """Goes to another process and has to be small."""

    def __call__(self, tell: Tell) -> R_co:
        """`tell` is told the share that is done, now and then."""


class WorkerError(ForebayError):
    """A process ended without a result."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def run_jobs(jobs: Sequence[Job[R]], processes: int, tell: Tell = lambda share: None) -> list[R]:
    """Their results, in their order. With one process, it is this one."""
    if not jobs:
        return []
    if processes <= 1:
        shares = _Shares(len(jobs), tell)
        return [job(shares.of(number)) for number, job in enumerate(jobs)]
    return _Workers(jobs, min(processes, len(jobs)), tell).run()


class _Shares:
    def __init__(self, jobs: int, tell: Tell) -> None:
        self._done, self._tell = [0.0] * jobs, tell

    def of(self, number: int) -> Tell:
        def tell(share: float) -> None:
            self._done[number] = share
            self._tell(sum(self._done) / len(self._done))

        return tell


@dataclass(slots=True)
class _Worker:
    process: Any
    pipe: Connection
    job: int | None = None


class _Workers(Generic[R]):
    def __init__(self, jobs: Sequence[Job[R]], processes: int, tell: Tell) -> None:
        self._jobs, self._processes = jobs, processes
        self._shares = _Shares(len(jobs), tell)
        self._results: dict[int, R] = {}

    def run(self) -> list[R]:
        # Not forked: a child then holds nothing of its parent, and ends when the other side of its pipe is gone.
        context = multiprocessing.get_context("spawn")
        waiting = list(enumerate(self._jobs))[::-1]
        workers: list[_Worker] = []
        try:
            with _deaf():
                for _ in range(self._processes):
                    here, there = context.Pipe()
                    process = context.Process(target=_serve, args=(there,), daemon=True)
                    workers.append(_Worker(process, here))
                    process.start()
                    there.close()
            while len(self._results) < len(self._jobs):
                for worker in workers:
                    if worker.job is None and waiting:
                        worker.job, job = waiting.pop()
                        worker.pipe.send(job)
                self._listen(workers)
        finally:
            for worker in workers:
                worker.pipe.close()
                if worker.process.pid is not None:
                    worker.process.kill()
                    worker.process.join()
        return [self._results[number] for number in range(len(self._jobs))]

    def _listen(self, workers: Sequence[_Worker]) -> None:
        by_pipe = {worker.pipe: worker for worker in workers if worker.job is not None}
        for ready in wait(list(by_pipe)):
            worker = by_pipe[ready]  # type: ignore[index]
            assert worker.job is not None
            try:
                kind, value = worker.pipe.recv()
            except (EOFError, ConnectionError):
                worker.process.join()
                raise WorkerError(f"a replay ended with exit code {worker.process.exitcode}") from None
            if kind == "share":
                self._shares.of(worker.job)(value)
            elif kind == "failed":
                raise WorkerError(value)
            else:
                self._results[worker.job] = value
                self._shares.of(worker.job)(1.0)
                worker.job = None


@contextmanager
def _deaf() -> Iterator[None]:
    """Who is started now never hears Control-C, which a terminal sends to all. This process hears, and ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only that one may say so
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _serve(pipe: Connection) -> None:
    try:
        while True:
            job = pipe.recv()
            try:
                result = job(lambda share: pipe.send(("share", share)))
            except ForebayError as error:
                pipe.send(("failed", str(error)))
            else:
                pipe.send(("done", result))
    except (EOFError, ConnectionError):
        pass  # the parent is gone
