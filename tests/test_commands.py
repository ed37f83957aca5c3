"""Every command that README and docs show is run by a test, or stands in a list with the reason why not."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.builders import right
from tests.commands import RULES, How, Shown, rule_of, shown, to_run
from tests.shell import shell
from tests.test_readme import PAGES, ROOT

ALL = [command for page in PAGES for command in shown(page)]
SUBSTITUTES = {"FITS": "8GiB", "SIZE": "8GiB", "FILE": "given.json"}
"""By word in capitals: what a page cannot know."""


@pytest.mark.parametrize("command", sorted(set(ALL)), ids=lambda command: f"{command.page}: {command.line}")
def test_every_command_fits_a_rule(command: Shown) -> None:
    assert rule_of(command), "no rule in tests/commands.py says how it is run, or why it is not"


def test_every_rule_is_needed() -> None:
    used = [rule_of(command) for command in ALL]
    for rule in RULES:
        assert rule in used, f"no page has a command like {rule.pattern}"


def test_tests_that_run_commands_exist() -> None:
    for rule in RULES:
        if rule.how is How.BY:
            path, _, name = rule.why.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, rule.why
        elif rule.how is How.LEFT:
            assert rule.why


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    """In their order: some read what others have written."""
    outside = shell(tmp_path)
    (tmp_path / "given.json").write_text(json.dumps(right()))
    for command in (each for each in to_run(How.HERE) if each.page == page.name):
        rule = rule_of(command)
        assert rule is not None
        text = rule.instead or command.text
        for word, value in SUBSTITUTES.items():
            text = re.sub(rf"\b{word}\b", value, text)
        run = subprocess.run(
            ["bash", "-o", "pipefail", "-c", text],
            cwd=ROOT if text.startswith(("make", "python")) else tmp_path,
            env=outside,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        # What doctor finds here is not known. That it ran is.
        assert run.returncode in ((0, 1, 2) if "doctor" in text else (0,)), f"{text}: {run.stderr}"
        assert run.stdout or ">" in text or "--check" in text, text
        assert "Traceback" not in run.stderr
        assert "usage:" not in run.stderr, text


def test_make_knows_every_target_that_is_shown(tmp_path: Path) -> None:
    for line in sorted({command.line for command in ALL if re.match(r"(PYTHON=\S+ )?make\b", command.line)}):
        said = subprocess.run(
            ["bash", "-c", f"{line} --dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert said.returncode == 0, f"{line}: {said.stderr}"
        if line == "make bench":
            assert "bench/scheduler_cost.py" in said.stdout


def test_commands_are_found_where_pages_have_them(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Say `make demo` or `forebay`, not `forebay/cli`.\n\n"
        "    forebay config --memory 64GB\n\n"
        "```bash\n# a remark\none 'a\nb'   # why\ntwo \\\n  --more\n```\n\n"
        "| `echo a \\| tee b` |\n\n"
        "1. Step\n\n   ```sh\n   three\n   ```\n"
    )
    assert [command.line for command in shown(page)] == [
        "one 'a b'",
        "two \\ --more",
        "three",
        "forebay config --memory 64GB",
        "make demo",
        "echo a | tee b",
    ]
