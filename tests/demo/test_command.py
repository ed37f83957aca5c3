"""The command, without an engine."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import demo.__main__ as command
from demo.model import SMALL
from demo.results import Run
from demo.workload import Workload
from tests.demo.builders import make_run, make_runs


@pytest.fixture(autouse=True)
def _signals_as_before(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sessions", "1"),
        ("--sessions", "many"),
        ("--sessions", "101"),
        ("--turns", "1.5"),
        ("--turns", "-1"),
        ("--text", "99"),
        ("--model", "huge"),
        ("--session", "8"),
    ],
)
def test_bad_input_gives_one_line_that_names_option_and_value(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([option, value])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    [line] = output.err.splitlines()
    assert option in line
    assert value in line


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--help"])
    assert ended.value.code == 0
    output = capsys.readouterr().out
    assert all(option in output for option in ("--sessions", "--turns", "--text", "--model", "--folder"))


def test_without_vllm_one_line_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert command.main([]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "make demo" in line


def play(monkeypatch: pytest.MonkeyPatch, runs: list[Run]) -> None:
    by_name = {run.name: run for run in runs}
    monkeypatch.setattr(command, "run", lambda mode, *rest: by_name[mode])


def test_table_page_and_success(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, make_runs())
    assert command.main(["--folder", str(tmp_path / "new")]) == 0
    output = capsys.readouterr().out
    assert "no offload done" in output
    assert "12.0 x lower with eager" in output
    assert "gibberish" in output
    assert (tmp_path / "new" / "demo.html").read_text().startswith("<!doctype html>")
    assert all(len(line) <= 80 for line in output.splitlines() if "demo.html" not in line)


def test_answers_that_differ_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    none, eager, _ = make_runs()
    play(monkeypatch, [none, eager, make_run("lazy", 1.0, 0.3, 0.3, tokens=(7, 9))])
    assert command.main(["--folder", str(tmp_path)]) == 1
    output = capsys.readouterr()
    assert "0 %" in output.out
    assert len(output.err.splitlines()) == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert command.main(["--folder", str(tmp_path / "file")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "file" in line


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_it_once_with_one_line(
    number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    cleaned = []

    def busy(*arguments: Any) -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # an impatient user
            cleaned.append(True)

    monkeypatch.setattr(command, "run", busy)
    assert command.main(["--folder", str(tmp_path)]) == code
    assert cleaned == [True]
    assert capsys.readouterr().err == "demo: interrupted\n"


def test_what_is_said_about_the_usual_workload_is_true() -> None:
    said = command.describe(Workload())
    assert "8 chats of 3 turns" in said
    assert f"{Workload().sessions * Workload().max_model_len:,} tokens" in said
    assert SMALL.kv_bytes_per_token == 8192
