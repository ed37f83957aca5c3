"""Chats that do not fit on the device, in a real vLLM on the CPU, three times: without offload, eager, lazy.

make demo
make demo ARGS="--sessions 12"
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from demo.children import ROOT, DemoError, run
from demo.model import SIZES, SMALL, TINY, Size
from demo.page import page
from demo.results import TITLES, Run, as_text, equal_answers, rows, verdict
from demo.workload import ANSWER, BLOCK, Workload

FOLDER = ROOT / "build" / "demo"
MODES = ("none", "eager", "lazy")
GIBBERISH = (
    "The model is small and its weights are random: the answers are gibberish, but\nmust be the same in every run."
)
CLEAR = "\r\033[K"


class Interrupted(BaseException):
    """Somebody wants this to end: no error, and nothing that handles errors may hold it up."""


def end_on_signal() -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def end(number: int, frame: FrameType | None) -> NoReturn:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)  # asked twice, it would not clean up
        raise Interrupted(number)

    for each in signals:
        signal.signal(each, end)


class Progress:
    """One line that changes in place on a terminal; elsewhere a line for each turn."""

    def __init__(self, mode: str, workload: Workload) -> None:
        self._stem = f"    {TITLES[mode]:<11}"
        self._workload = workload

    def show(self, message: dict[str, Any]) -> None:
        if "stage" in message:
            self._say(f"{message['stage']} ...", milestone=message["stage"] == "loading vLLM")
        else:
            turn = f"turn {message['turn'] + 1} of {self._workload.turns}"
            session = f"session {message['session'] + 1} of {self._workload.sessions}"
            self._say(f"{turn}, {session}", milestone=message["session"] == 0)

    def end(self, seconds: float) -> None:
        self._say(f"done, {seconds:.0f} s", milestone=True)
        if sys.stdout.isatty():
            print()

    def _say(self, text: str, *, milestone: bool) -> None:
        if sys.stdout.isatty():
            print(f"{CLEAR}{self._stem}{text}", end="", flush=True)
        elif milestone:
            print(f"{self._stem}{text}", flush=True)


def serve(mode: str, size: Size, workload: Workload, folder: Path) -> Run:
    progress, started = Progress(mode, workload), time.monotonic()
    progress.show({"stage": "starting"})
    result = run(mode, size, workload, folder, progress.show)
    progress.end(time.monotonic() - started)
    return result


def demo(size: Size, workload: Workload, folder: Path) -> int:
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    told = describe(workload)
    print(f"{told}\n{GIBBERISH}\n")
    runs = [serve(mode, size, workload, folder) for mode in MODES]
    print(f"\n{as_text(rows(runs))}\n\n{verdict(runs)}")
    target = folder / "demo.html"
    target.write_text(page(runs, f"{told} {GIBBERISH}", machine(runs[0])))
    print(
        f"The whole demo took {time.monotonic() - started:.0f} s. A page with a chart: {os.path.relpath(target)}"
    )
    if any(equal_answers(each, runs[0]) < 1 for each in runs):
        print("demo: answers differ with offload, which must never be: please report it", file=sys.stderr)
        return 1
    return 0


def describe(workload: Workload) -> str:
    in_all = workload.sessions * workload.blocks_of_a_chat * BLOCK
    device = (workload.device_blocks - 1) * BLOCK
    return (
        f"{workload.sessions} chats of {workload.turns} turns, each about a long text; one request at a time,\n"
        f"{ANSWER} tokens per answer, and all chats take a turn before any takes the next.\n"
        f"Together they need {in_all:,} tokens of KV. The device has room for {device:,}."
    )


def machine(result: Run) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    today = datetime.datetime.now().astimezone().date()
    cores = len(os.sched_getaffinity(0))
    return f"{today}, {cores} cores, one thread computes; {versions}, Python {platform.python_version()}."


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"demo: {message} (make demo ARGS=--help lists what there is)\n")


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="make demo ARGS=...", description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    usual = Workload()
    parser.add_argument(
        "--sessions", type=whole(2, 100), default=usual.sessions, help="chats, 2 to 100 (default: %(default)s)"
    )
    parser.add_argument(
        "--turns", type=whole(2, 10), default=usual.turns, help="turns of each, 2 to 10 (default: %(default)s)"
    )
    parser.add_argument(
        "--text",
        type=whole(100, 8000),
        default=usual.text_tokens,
        help="letters, 100 to 8000 (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        choices=list(SIZES),
        default=SMALL.name,
        help=f"{TINY.name} shows that it works, not what it gains (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="for model, page and logs (default: build/demo)"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options(arguments)
    if importlib.util.find_spec("vllm") is None:
        print("demo: there is no vLLM in this environment (make demo installs it)", file=sys.stderr)
        return 2
    end_on_signal()
    try:
        return demo(SIZES[chosen.model], Workload(chosen.sessions, chosen.turns, chosen.text), chosen.folder)
    except DemoError as error:
        problem, code = str(error), 1
    except OSError as error:
        problem, code = str(error), 1
    except Interrupted as interrupted:
        problem, code = "interrupted", 128 + interrupted.args[0]
    print(f"{CLEAR if sys.stdout.isatty() else ''}demo: {problem}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
