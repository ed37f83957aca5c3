"""What a command does when nobody reads what it prints, or nothing can be written."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.builders import forebay
from tests.shell import shell


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    made = forebay("generate", "chat", "--requests", "40", "--block-tokens", "64", "--output", str(target))
    assert made.returncode == 0, made.stderr
    return target


def bash(folder: Path, line: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """With streams that are buffered, as they are for a user."""
    env = {**shell(folder), **environment}
    if "PYTHONUNBUFFERED" not in environment:
        env.pop("PYTHONUNBUFFERED", None)
    command = ["bash", "-c", line]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


@pytest.fixture
def folder(tmp_path: Path, trace: Path) -> Path:
    shutil.copy(trace, tmp_path / "chat.jsonl")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "plan chat.jsonl --curve-only",
        "generate chat --requests 2",
        "generate chat --requests 2000",
        "config",
        "config --help",
        "--help",
        "--version",
    ],
)
def test_who_reads_no_more_is_no_error(folder: Path, command: str) -> None:
    """`true` is gone before anything is printed: `sleep` sees to that."""
    run = bash(folder, f"(sleep 0.2; forebay {command} 2>errors; echo $? >code) | true")
    assert run.returncode == 0
    assert (folder / "code").read_text() == "0\n"
    said = (folder / "errors").read_text()
    assert [line for line in said.splitlines() if not line.startswith("# ")] == []


def test_who_reads_one_line_gets_the_files_all_the_same(folder: Path) -> None:
    line = "(sleep 0.2; forebay plan chat.jsonl --curve-only --html h.html --json j.json) | true"
    bash(folder, line, PYTHONUNBUFFERED="1")
    assert (folder / "h.html").read_text().rstrip().endswith("</html>")
    assert (folder / "j.json").read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan chat.jsonl --curve-only --html /dev/full", "forebay plan: --html /dev/full: cannot be written: "),
        ("plan chat.jsonl --curve-only --json /dev/full", "forebay plan: --json /dev/full: cannot be written: "),
        ("generate chat --output /dev/full", "forebay generate: --output /dev/full: cannot be written: "),
        ("generate chat > /dev/full", "forebay generate: "),
        ("config 2>&1 >/dev/full | grep -v '^#' >&2; exit ${PIPESTATUS[0]}", "forebay config: "),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(folder: Path, command: str, said: str, unbuffered: str) -> None:
    run = bash(folder, f"forebay {command}", PYTHONUNBUFFERED=unbuffered)
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"{said}No space left on device\n"


def test_help_for_a_full_disk_is_one_line(folder: Path) -> None:
    run = bash(folder, "forebay --help > /dev/full")
    assert (run.returncode, run.stderr) == (1, "forebay: No space left on device\n")


def test_a_full_temporary_folder_is_named(folder: Path) -> None:
    made = bash(folder, "forebay generate agent --requests 200 --output long.jsonl")
    assert made.returncode == 0
    run = bash(folder, "ulimit -f 40; exec forebay plan long.jsonl --curve-only", TMPDIR=str(folder))
    assert (run.returncode, run.stdout) == (1, "")
    assert (
        run.stderr
        == f"forebay plan: the temporary folder {folder} (see TMPDIR): cannot be written: File too large\n"
    )
    assert not [*folder.glob("forebay-plan-*")]


def test_what_was_there_stays_until_the_new_one_is_whole(folder: Path) -> None:
    before = (folder / "chat.jsonl").read_bytes()
    names = {each.name for each in folder.iterdir()}
    run = bash(folder, "ulimit -f 20; exec forebay generate agent --output chat.jsonl")
    assert run.returncode == 1
    assert run.stderr == "forebay generate: --output chat.jsonl: cannot be written: File too large\n"
    assert (folder / "chat.jsonl").read_bytes() == before
    assert {each.name for each in folder.iterdir()} - {"bin"} == names - {"bin"}


def test_links_and_modes_of_what_is_written_over_stay(folder: Path) -> None:
    (folder / "real.jsonl").write_text("old\n")
    (folder / "real.jsonl").chmod(0o640)
    (folder / "link.jsonl").symlink_to("real.jsonl")
    assert bash(folder, "forebay generate chat --requests 1 --output link.jsonl").returncode == 0
    assert (folder / "link.jsonl").is_symlink()
    assert (folder / "real.jsonl").read_text().startswith("{")
    assert (folder / "real.jsonl").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("forebay generate chat --requests 1 >&-", ""),
        ("forebay generate chat --requests 1 --output out.jsonl 2>&- >&- <&-", ""),
        ("forebay plan chat.jsonl --curve-only 2>&-", "chat.jsonl: 40 requests"),
    ],
)
def test_closed_streams_are_as_if_nobody_reads(folder: Path, line: str, printed: str) -> None:
    # Not by the script: its shell would open it in the place of the stream that is closed.
    run = bash(folder, line.replace("forebay", f"{shlex.quote(sys.executable)} -m forebay.cli", 1))
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith(printed)
    assert run.stdout.isascii()


def test_names_that_cannot_be_shown_are_shown_otherwise(folder: Path) -> None:
    os.rename(folder / "chat.jsonl", folder / "gespräch.jsonl")
    line = "forebay plan gespräch.jsonl --curve-only --html gespräch.html"
    run = bash(folder, line, PYTHONIOENCODING="ascii:strict", LC_ALL="C.UTF-8")
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith(r"gespr\xe4ch.jsonl: 40 requests")
    assert "gespräch.jsonl" in (folder / "gespräch.html").read_text("utf-8")
