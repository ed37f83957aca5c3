"""docs/cli.md is true: its commands run, its list is that of the code, its options are those of the commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from forebay.cli import kinds
from forebay.cli.findings import as_text
from tests.cli.builders import ROOT, forebay
from tests.cli.shell import shell

PAGE = (ROOT / "docs" / "cli.md").read_text()
HEAD = "| id | severity | what | why | type |\n| --- | --- | --- | --- | --- |\n"
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_list_of_findings_is_that_of_the_code() -> None:
    """To write it anew: `python -m tests.cli.test_docs`."""
    assert PAGE.endswith(written())


def written() -> str:
    return HEAD + "\n".join(kind.row() for kind in kinds.ALL) + "\n"


def test_every_command_shown_runs(tmp_path: Path) -> None:
    """In their order: some read what others have written."""
    shown = re.findall(r"^    (vllm serve .*)$", PAGE, re.MULTILINE) + COMMANDS
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


@pytest.mark.parametrize("command", ["config", "doctor", "plan", "generate"])
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
    (ROOT / "docs" / "cli.md").write_text(PAGE.partition(HEAD)[0] + written())
