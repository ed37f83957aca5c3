"""Processes that may fail, hang or leave something behind, each in a group of its own with a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 40
SHARED = Path("/dev/shm")
HOST_CACHES = re.compile(
    r"vllm_offload|lmcache"
)  # names under which peers keep gigabytes, also once they are dead

_ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*(?:[A-Z]\w*)?(?:Error|Exception|SystemExit): .+)")
_SAYS_LITTLE = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineDeadError",
    "EngineGenerateError",
    "CancelledError",
)


@dataclass(frozen=True)
class End:
    """How a child ended. `record` is what it had written by then."""

    problem: str | None
    wall_s: float
    record: dict[str, Any]
    tail: list[str]


def run_child(
    script: Path,
    spec: Mapping[str, Any],
    folder: Path,
    *,
    limit_s: float,
    environment: Mapping[str, str],
    on_stage: Callable[[str, float], None] = lambda stage, seconds: None,
) -> End:
    """Run `script SPEC RECORD`. The child writes its record again whenever its "stage" changes (see write_record).
    Once that says "complete" nothing can go wrong any more, and the child is killed like one that is late."""
    folder.mkdir(parents=True, exist_ok=True)
    spec_file, record_file, log_file = (folder / name for name in ("spec.json", "record.json", "log.txt"))
    spec_file.write_text(json.dumps(spec))
    record_file.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = shared_files()
    started = time.monotonic()
    with log_file.open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, str(script), str(spec_file), str(record_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
    stage, late = "", False
    try:
        while child.poll() is None and not late:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            record = read_record(record_file)
            now = str(record.get("stage", ""))
            if now != stage:
                stage = now
                on_stage(stage, time.monotonic() - started)
            if record.get("complete"):
                break  # all that is left is to tidy up, which end_group() does faster
            late = time.monotonic() - started > limit_s
    finally:
        end_group(child.pid)
        code = child.wait()
        for each in shared_files() - shared:
            with suppress(OSError):
                each.unlink()
    record = read_record(record_file)
    tail = log_file.read_text(errors="replace").splitlines()[-400:]
    problem = None
    if not record.get("complete"):
        where = f" in {stage}" if stage else ""
        if late:
            problem = f"late: killed after {limit_s:.0f} s{where}"
        else:
            problem = f"failed{where}: {reason(tail) or f'exit status {code}'}"
    return End(problem, time.monotonic() - started, record, tail[-TAIL_LINES:] if problem is None else tail[-150:])


def end_on_signal() -> None:
    """Who is told to end takes the children along: they have groups of their own, and hold on to the device."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """At once or not at all: the parent reads while the child writes."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(path)


def read_record(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return record


def reason(lines: list[str]) -> str | None:
    """The last error that says more than that there was one."""
    found = [
        " ".join([match[1], *lines[i + 1 : i + 3]] if "validation error" in line else [match[1]])
        for i, line in enumerate(lines)
        if (match := _ERROR.search(line))
    ]
    telling = [each for each in found if not any(word in each for word in _SAYS_LITTLE)]
    return (telling or found or [None])[-1]


def end_group(group: int, patience_s: float = 30.0) -> None:
    """Kill what is left of a child's process group, and wait until its memory is free again."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(pgrp == group for _, _, pgrp in processes()):
        time.sleep(0.05)


def processes() -> list[tuple[int, int, int]]:
    """Process id, parent and group of all that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent, group = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX":
                found.append((int(stat.parent.name), int(parent), int(group)))
    return found


def resident_bytes(root: int) -> int:
    """Resident memory, shared pages among it, of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for pid, parent, _ in processes():
        children.setdefault(parent, []).append(pid)
    todo, total = [root], 0
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def available_bytes() -> int:
    """What the whole machine could still give away. Pinned memory is missing here even where no process is charged
    for it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def wait_until_available(num_bytes: int, patience_s: float = 15.0) -> None:
    """Pinned memory of a process that was killed comes back seconds after it has gone, and slows down who starts
    meanwhile."""
    deadline = time.monotonic() + patience_s
    while available_bytes() < num_bytes and time.monotonic() < deadline:
        time.sleep(0.1)


def shared_files() -> set[Path]:
    return {path for path in SHARED.glob("*") if HOST_CACHES.search(path.name)} if SHARED.is_dir() else set()
