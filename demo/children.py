"""Runs demo.engine in a process group of its own, and leaves nothing of it behind, however it ends."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo.engine import ENVIRONMENT
from demo.model import Size
from demo.results import Answer, Run
from demo.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
SILENCE_S = 300.0  # nothing takes so long between two lines; then it hangs
END_S = 30.0

Show = Callable[[dict[str, Any]], None]


class DemoError(Exception):
    """One line for the user."""


def run(mode: str, size: Size, workload: Workload, folder: Path, show: Show) -> Run:
    """One of the three runs. `show` gets every message that says how far it is."""
    log = folder / f"{mode}.log"
    spec = {
        "mode": mode,
        "size": size.name,
        "workload": asdict(workload),
        "folder": str(folder),
        "parent": os.getpid(),
    }
    answers: list[Answer] = []
    done: dict[str, Any] | None = None
    with (
        tempfile.TemporaryDirectory(prefix="forebay-demo-", ignore_cleanup_errors=True) as temporary,
        closing(_messages(spec, log, folder, temporary)) as messages,
    ):
        for message in messages:
            if "answer" in message:
                answer = message["answer"]
                answers.append(Answer(**{**answer, "tokens": tuple(answer["tokens"])}))
            elif "problem" in message:
                raise DemoError(f"{mode}: {_first_line(message['problem'])} (all that vLLM said: {_short(log)})")
            elif "done" in message:
                done = message["done"]
            else:
                show(message)
    if done is None:
        raise DemoError(f"{mode}: vLLM ended without a word (all that it said: {_short(log)})")
    return Run(mode, tuple(answers), done["loaded_tokens"], done["total_s"], done["versions"])


def _messages(
    spec: dict[str, Any], log: Path, folder: Path, temporary: str
) -> Generator[dict[str, Any], None, None]:
    """What the child says, until it ends."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    caches = {"TMPDIR": temporary, "VLLM_CACHE_ROOT": str(folder / "cache"), "PYTHONPATH": path}
    reading, writing = os.pipe()
    child = None
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "demo.engine", json.dumps(spec), str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | caches,
                pass_fds=[writing],
                # Ctrl-C reaches this process only, which then ends the child at once and with all that it started.
                start_new_session=True,
            )
        os.close(writing)
        writing = -1
        yield from _lines(reading)
    finally:
        if child is not None:
            _end_group(child)
        for descriptor in (reading, writing):
            if descriptor >= 0:
                os.close(descriptor)
        for part in folder.glob("*.part"):
            shutil.rmtree(part, ignore_errors=True)


def _lines(reading: int) -> Iterator[dict[str, Any]]:
    unread = b""
    while True:
        if not select.select([reading], [], [], SILENCE_S)[0]:
            raise DemoError(f"vLLM has not said anything for {SILENCE_S:.0f} s")
        if not (new := os.read(reading, 1 << 16)):
            return
        *lines, unread = (unread + new).split(b"\n")
        yield from map(json.loads, lines)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it, and wait until it is gone."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + END_S
    while group_members(child.pid) and time.monotonic() < deadline:
        time.sleep(0.02)  # what the child had started may take a moment longer


def group_members(group: int) -> list[int]:
    """Those that are alive."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
            if state not in "ZX" and int(of) == group:
                found.append(int(stat.parent.name))
    return found


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")


def _short(path: Path) -> str:
    return os.path.relpath(path)
