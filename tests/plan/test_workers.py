"""Jobs in processes: their results, their failures, and that none stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay.errors import ForebayError
from forebay.plan.workers import Tell, WorkerError, run_jobs
from tests.cli.builders import ROOT


@dataclass(frozen=True)
class Square:
    number: int

    def __call__(self, tell: Tell) -> int:
        tell(0.5)
        return self.number**2


@dataclass(frozen=True)
class Process:
    def __call__(self, tell: Tell) -> int:
        return os.getpid()


@dataclass(frozen=True)
class Fails:
    def __call__(self, tell: Tell) -> int:
        raise ForebayError("no such size")


@dataclass(frozen=True)
class Dies:
    def __call__(self, tell: Tell) -> int:
        os._exit(7)


@dataclass(frozen=True)
class Endless:
    folder: str

    def __call__(self, tell: Tell) -> int:
        (Path(self.folder) / str(os.getpid())).touch()
        while True:
            tell(0.1)
            time.sleep(0.01)


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_results_come_in_the_order_of_the_jobs(processes: int) -> None:
    shares: list[float] = []
    assert run_jobs([Square(number) for number in range(4)], processes, shares.append) == [0, 1, 4, 9]
    assert shares[-1] == pytest.approx(1.0 if processes > 1 else 0.5)
    assert run_jobs([], processes) == []


def test_one_process_is_this_one_and_more_are_others() -> None:
    assert run_jobs([Process(), Process()], 1) == [os.getpid()] * 2
    assert os.getpid() not in run_jobs([Process(), Process()], 2)


def test_a_job_that_fails_says_why_in_one_line() -> None:
    with pytest.raises(WorkerError, match=r"^no such size$"):
        run_jobs([Square(1), Fails()], 2)


def test_a_process_that_dies_is_noticed() -> None:
    with pytest.raises(WorkerError, match="exit code 7"):
        run_jobs([Dies(), Square(2)], 2)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_stays_behind(tmp_path: Path, how: signal.Signals) -> None:
    script = (
        "from forebay.plan.workers import run_jobs\n"
        "from tests.plan.test_workers import Endless\n"
        f"run_jobs([Endless({str(tmp_path)!r})] * 2, 2)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(children := [int(each.name) for each in tmp_path.iterdir()]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(parent.pid, how)
    parent.wait(timeout=60)
    while any(map(is_running, children)):
        assert time.monotonic() < deadline, "a process stayed behind"
        time.sleep(0.02)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
