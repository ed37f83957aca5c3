"""The demo, as a user sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SMALL = ("--sessions", "8", "--turns", "3")


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.demo", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def row(output: str, label: str) -> list[str]:
    """The three values of one line of the table: none, eager, lazy."""
    [line] = [line for line in output.splitlines() if line.startswith(label)]
    return line[len(label) :].split()


def numbers(output: str, label: str) -> list[int]:
    return [int(value.replace(",", "")) for value in row(output, label)]


def test_answers_are_equal_and_offload_computes_less() -> None:
    run = demo(*SMALL)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    assert row(run.stdout, "offload") == ["none", "eager", "lazy"]
    assert row(run.stdout, "answers equal") == ["100%"] * 3
    none, eager, lazy = numbers(run.stdout, "prefill tokens computed")
    assert eager < none
    assert lazy < none


def test_without_offload_nothing_is_stored_or_loaded() -> None:
    output = demo(*SMALL).stdout
    for label in ("tokens loaded from host", "blocks stored on host"):
        none, eager, lazy = numbers(output, label)
        assert none == 0
        assert eager > 0
        assert lazy > 0


def test_it_says_that_it_is_a_simulation_and_shows_progress() -> None:
    output = demo(*SMALL).stdout
    assert "simulation" in output
    assert "No GPU" in output
    assert "lazy: turn 3 of 3" in output


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert demo(*SMALL, "--seed", "5").stdout == demo(*SMALL, "--seed", "5").stdout


def test_help_names_every_option() -> None:
    run = demo("--help")
    assert run.returncode == 0
    assert all(option in run.stdout for option in ("--sessions", "--turns", "--seed"))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--sessions", "3"),
        ("--sessions", "many"),
        ("--turns", "0"),
        ("--turns", "1.5"),
        ("--seed", "-1"),
        ("--sedsions", "8"),
    ],
)
def test_bad_input_gives_one_line_that_names_the_option(option: str, value: str) -> None:
    run = demo(option, value)
    assert run.returncode == 2
    assert run.stdout == ""
    [line] = run.stderr.splitlines()
    assert option in line
    assert value in line


def test_ctrl_c_ends_it_with_one_line() -> None:
    """A KeyboardInterrupt in the first step is what Ctrl-C is, without a race against the clock."""
    code = (
        "import sys; from forebay import demo\n"
        "def interrupted(*_): raise KeyboardInterrupt\n"
        "demo.ReadingEngine.step = interrupted\n"
        "sys.argv = ['demo']; sys.exit(demo.main())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 130
    assert run.stderr.splitlines() == ["forebay.demo: interrupted"]
