"""What README and docs say is true: commands exist, snippets run, links lead somewhere, tables are complete."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path

import pytest

from demo.results import rows
from forebay import OffloadConfig, Stats
from forebay.copier import InjectedFaults
from forebay.policies import POLICIES
from tests.demo.builders import make_run

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def snippets(page: Path, *, served: bool = False) -> list[str]:
    """`served`: those that ask a server, which `tests/vllm/test_commands.py` starts."""
    code = [textwrap.dedent(code) for _, language, code in FENCE.findall(page.read_text()) if language == "python"]
    return [each for each in code if ("localhost:8000" in each) is served]


def commands(page: Path) -> list[str]:
    """What stands in code: between backticks, or in an indented block."""
    text = page.read_text()
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^    (\S.*)$", text, re.MULTILINE)


@each_page
def test_commands_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(page):
        if named := re.match(r"(?:PYTHON=\S+ )?make ([a-z][a-z-]*)", command):
            assert named[1] in targets, f"{page.name}: make has no target {named[1]}"
        if named := re.match(r"python -m (\S+)", command):
            assert importlib.util.find_spec(named[1]), f"{page.name}: there is no module {named[1]}"


def test_the_first_screen_of_the_readme_has_the_first_commands() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:12]
    for command in ("make demo", "make test"):
        assert any(line.strip().startswith(command) for line in first_screen)


def test_the_table_of_the_demo_has_the_rows_that_the_demo_prints() -> None:
    shown = (ROOT / "README.md").read_text().partition("<!-- demo-table -->\n")[2].partition("<!-- /demo-table")[0]
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    printed = [row[0] for row in rows([make_run("none", 1.0, 1.0), make_run("eager", 1.0, 1.0)])]
    assert [row[0] for row in table if "---" not in row[0]] == printed
    assert table[-1] == ["answers equal", "reference", "100 %", "100 %"]


def test_ci_runs_what_developers_run() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "make test"


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)], ids=lambda page: page.name)
def test_snippets_run(page: Path, tmp_path: Path) -> None:
    """All python snippets of a page, one after the other, as one script."""
    script = tmp_path / "snippets.py"
    script.write_text("\n".join(snippets(page)))
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leaves the project"
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_proofs_name_only_tests_that_exist() -> None:
    text = (ROOT / "docs" / "proofs.md").read_text()
    named = re.findall(r"(tests/[\w/]+\.py)::(\w+)", text)
    assert named
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text())
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in functions, f"{path} has no {test}"


@each_page
def test_files_named_in_full_exist(page: Path) -> None:
    for path in re.findall(r"`((?:forebay|demo|tests|docs|bench|\.ci)/[\w/.-]+)`", page.read_text()):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_design_names_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = text.partition("## The rooms")[2].partition("\n## ")[0]
    there = {path.name for path in (ROOT / "forebay").rglob("*.py")}
    named = set(re.findall(r"\w+\.py", rooms))
    assert named
    assert named <= there


def cells(page: str, heading: str) -> dict[str, list[str]]:
    """The rows of all tables under a heading, or on the whole page, whose first cell is a name in backticks."""
    text = (ROOT / "docs" / page).read_text()
    if heading:
        found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        assert found, f"{page} has no heading {heading}"
        text = found[1]
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}


def default_of(field: Field[object]) -> str:
    if field.default is MISSING:
        return "required"
    if field.default is None:
        return "none"
    default = field.default.value if isinstance(field.default, Enum) else field.default
    return f"`{json.dumps(default)}`"


@pytest.mark.parametrize("field", fields(OffloadConfig), ids=lambda field: field.name)
def test_every_setting_is_described_with_its_default(field: Field[object]) -> None:
    default, meaning = cells("configuration.md", "The core")[field.name]
    assert default == default_of(field)
    assert meaning


@pytest.mark.parametrize("field", fields(InjectedFaults), ids=lambda field: field.name)
def test_every_fault_is_described_with_its_default(field: Field[object]) -> None:
    default, meaning = cells("configuration.md", "Faults on demand")[field.name]
    assert default == default_of(field)
    assert meaning


def test_every_policy_is_described() -> None:
    _, meaning = cells("configuration.md", "The core")["eviction_policy"]
    for policy in POLICIES:
        assert f'`"{policy}"`' in meaning


@pytest.mark.parametrize("name", [field.name for field in fields(Stats)])
def test_every_counter_is_described(name: str) -> None:
    assert cells("metrics.md", "")[name][0]


def test_every_mutant_still_names_a_line_of_the_core() -> None:
    tree = ast.parse((ROOT / "tools" / "mutants.py").read_text())
    [mutants] = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "MUTANTS"
    ]
    for name, line, _, _ in mutants:
        assert (ROOT / "forebay" / name).read_text().count(line) == 1, f"{name}: {line}"
