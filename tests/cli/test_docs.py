"""docs/cli.md is true: its commands run, its list is that of the code, its options are those of the commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from forebay.cli import kinds
from forebay.cli.findings import as_text
from forebay.cli.top.board import ZOOMS
from forebay.cli.top.canvas import Look, Style
from forebay.cli.top.draw import frame
from forebay.cli.top.view import Alarm
from tests.cli.builders import ROOT, forebay
from tests.cli.top.fake import FakeServer, engine_lines, page
from tests.cli.top.screens import down, screen, server
from tests.shell import shell

PAGE = (ROOT / "docs" / "cli.md").read_text()
HEAD = "| id | severity | what | why | type |\n| --- | --- | --- | --- | --- |\n"
SCREEN = "<!-- screen -->"
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_list_of_findings_is_that_of_the_code() -> None:
    """To write it anew: `python -m tests.cli.test_docs`."""
    assert PAGE.endswith(written())


def written() -> str:
    return HEAD + "\n".join(kind.row() for kind in kinds.ALL) + "\n"


def test_every_command_shown_runs(tmp_path: Path) -> None:
    """In their order: some read what others have written."""
    shown = re.findall(r"^    (vllm serve .*)$", PAGE, re.MULTILINE) + COMMANDS
    shown = [command for command in shown if not command.startswith("forebay top ")]
    assert len(shown) >= 9
    for command in shown:
        run = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=tmp_path,
            env=shell(tmp_path),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        # What doctor finds here is not known. That it ran is.
        assert run.returncode in ((0, 1, 2) if "doctor" in command else (0,)), f"{command}: {run.stderr}"
        assert run.stdout or ">" in command or "--output" in command, command
        assert "Traceback" not in run.stderr
        assert "expected" not in run.stderr, command


def test_every_command_that_asks_a_server_runs(tmp_path: Path) -> None:
    shown = re.findall(r"^ *(forebay top \S.*)$", PAGE, re.MULTILINE)
    assert len(shown) >= 5
    for command in shown:
        with FakeServer(lambda: page(engine_lines())) as one:
            here, times = re.subn(r"(http://localhost|gpu-\d):8000", one.url, command)
            assert times, command
            here = here.replace(" --interval 5", "").replace("forebay top", "forebay top --interval 0.2")
            if "--once" not in here and "--json" not in here:
                here = f"{{ {here}; }} | head -n 2"  # it ends when nobody reads on
            run = subprocess.run(
                ["bash", "-c", here],
                cwd=tmp_path,
                env=shell(tmp_path),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert (run.returncode, run.stderr) == (0, ""), command
            assert "72.3 %" in run.stdout or '"occupancy": 0.72' in run.stdout, command


def test_zooms_are_those_of_the_code() -> None:
    *some, last = map(str, ZOOMS)
    assert f"a column of the charts is {', '.join(some)} or {last} intervals" in PAGE


def test_the_screen_is_what_is_drawn() -> None:
    """To write it anew: `python -m tests.cli.test_docs`."""
    assert drawn() in PAGE


def drawn() -> str:
    shown = screen(
        server(),
        server("gpu-2:8000", load_failures=Alarm.TROUBLE, recomputes=Alarm.TROUBLE),
        down(),
        selected=1,
    )
    lines = frame(shown, 80, 24, Look(Style.NONE))
    return "\n".join([SCREEN, "```text", *lines, "```", "<!-- end -->"])


@pytest.mark.parametrize("command", ["config", "doctor", "top", "plan", "generate"])
def test_every_option_is_described_and_no_other(command: str) -> None:
    section = re.search(rf"^## forebay {command}\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    assert section
    described = re.findall(r"^\| `(--[\w-]+)", section[1], re.MULTILINE)
    there = re.findall(r"^  (--[\w-]+)", forebay(command, "--help").stdout, re.MULTILINE)
    assert sorted(described) == sorted(there)


def test_the_example_is_what_is_printed() -> None:
    lines = as_text([kinds.HUGE_PAGES_OFF.found()]).splitlines()[:-2]
    assert "\n".join(f"    {line}" for line in lines) in PAGE


if __name__ == "__main__":
    text = PAGE.partition(HEAD)[0] + written()
    before, _, after = text.partition(SCREEN)
    (ROOT / "docs" / "cli.md").write_text(before + drawn() + after.partition("<!-- end -->")[2])
