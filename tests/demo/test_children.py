"""The process of a run, played by a few lines of shell: what it says is heard, and nothing of it stays."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from demo import children
from demo.children import DemoError, group_members, run
from demo.model import TINY
from demo.workload import Workload

DONE = '{"done": {"total_s": 2.5, "loaded_tokens": 64, "versions": {}}}'
ANSWER = (
    '{"answer": {"session": 0, "turn": 1, "prompt_tokens": 9, "cached_tokens": 3, "ttft_s": 0.5, '
    '"tokens": [1, 2], "text": "ab"}}'
)


class Stub:
    """Arguments: -m demo.engine SPEC FD."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "demo"
        self.folder.mkdir()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._program = folder / "python"
        monkeypatch.setattr(sys, "executable", str(self._program))
        monkeypatch.setattr(tempfile, "tempdir", str(self.temporary))
        self.shown: list[dict[str, Any]] = []

    def run(self, *lines: str) -> children.Run:
        self._program.write_text("\n".join(["#!/bin/bash", *lines]))
        self._program.chmod(0o755)
        return run("eager", TINY, Workload(2, 2, 100), self.folder, self.shown.append)

    def check_nothing_is_left(self) -> None:
        assert list(self.temporary.iterdir()) == []
        assert list(self.folder.glob("*.part")) == []


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(tmp_path, monkeypatch)


def say(message: str) -> str:
    return f"echo '{message}' >&$4"


def test_what_it_says_is_heard(stub: Stub) -> None:
    result = stub.run(say('{"stage": "loading"}'), say(ANSWER), say(DONE))
    assert stub.shown == [{"stage": "loading"}]
    assert result.answers[0].tokens == (1, 2)
    assert (result.name, result.loaded_tokens, result.total_s) == ("eager", 64, 2.5)
    stub.check_nothing_is_left()


def test_a_problem_is_one_line_and_names_the_log(stub: Stub) -> None:
    with pytest.raises(DemoError, match=r"^eager: ValueError: no \(all that vLLM said: .*eager\.log\)$"):
        stub.run("echo much", say('{"problem": "ValueError: no\\nand more"}'), "exit 1")
    assert (stub.folder / "eager.log").read_text() == "much\n"
    stub.check_nothing_is_left()


def test_an_end_without_a_word_is_a_problem(stub: Stub) -> None:
    with pytest.raises(DemoError, match="ended without a word"):
        stub.run(say(ANSWER), "kill -9 $$")


def test_silence_is_not_waited_for_forever(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "SILENCE_S", 0.2)
    with pytest.raises(DemoError, match="has not said anything"):
        stub.run("sleep 1000")
    stub.check_nothing_is_left()


def test_an_interrupt_ends_it_with_all_that_it_started_and_removes_what_is_unfinished(stub: Stub) -> None:
    def interrupt(message: dict[str, Any]) -> None:
        raise KeyboardInterrupt

    stub.shown = _Calling(interrupt)
    with pytest.raises(KeyboardInterrupt):
        stub.run(
            'mkdir "$(dirname $0)/demo/model.part"; touch "$TMPDIR/left"',
            "sleep 1000 & echo $$ > $(dirname $0)/group",
            say('{"stage": "loading"}'),
            "sleep 1000",
        )
    group = int((stub.folder.parent / "group").read_text())
    assert group != os.getpgid(0)
    assert group_members(group) == []
    stub.check_nothing_is_left()


def test_a_child_that_ignores_signals_is_ended_too(stub: Stub) -> None:
    started = time.monotonic()
    stub.run("trap '' INT TERM HUP", say(DONE), 'eval "exec $4>&-"', "sleep 1000")
    assert time.monotonic() - started < 20


class _Calling(list[dict[str, Any]]):
    def __init__(self, call: Any) -> None:
        super().__init__()
        self._call = call

    def append(self, message: dict[str, Any]) -> None:
        self._call(message)
