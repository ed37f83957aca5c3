"""Pages say what the code says: lines of the log, findings, metrics, settings, tests. All are in the menu."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

from forebay.cli import kinds
from forebay.metrics import METRICS
from forebay.settings import KNOWN
from tests.test_readme import DOCS, FENCE, PAGES, ROOT

TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text()
METRIC_NAMES = {metric.name for metric in METRICS}
SUFFIXES = r"(?:_bucket|_sum|_count)?"


def _strings() -> str:
    """Every text in the code, one a line."""
    return "\n".join(
        " ".join(node.value.split())
        for path in (ROOT / "forebay").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_what_troubleshooting_quotes_is_what_the_code_says() -> None:
    texts, prose = _strings(), re.sub(r"`[^`\n]*`", "", FENCE.sub("", TROUBLE))
    quoted = re.findall(r'"([^"\n]+)"', prose)
    assert len(quoted) >= 15
    for each in quoted:
        assert each in texts, each


def test_findings_that_pages_name_exist() -> None:
    ids = {kind.id for kind in kinds.ALL}
    for page in DOCS:
        for named in re.findall(r"\((`[a-z]+(?:-[a-z]+)+`(?:, `[a-z]+(?:-[a-z]+)+`)*)\)", page.read_text()):
            assert set(re.findall(r"[a-z]+(?:-[a-z]+)+", named)) <= ids, f"{page.name}: {named}"
    named_anywhere = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", TROUBLE))
    assert len(named_anywhere) > 10
    assert named_anywhere <= ids


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_metrics_that_pages_name_exist(page: Path) -> None:
    for name in re.findall(r"`(forebay_[a-z_]+[a-z])\b", page.read_text()):
        assert re.sub(rf"{SUFFIXES}$", "", name) in METRIC_NAMES, f"{page.name}: {name}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_tests_that_pages_name_exist(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{page.name}: {path} has no {name}"


def test_settings_that_migration_names_exist() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    ours = [line.rpartition(" | ")[2] for line in page.splitlines() if line.startswith("| `")]
    assert len(ours) >= 20
    named = {name for cell in ours for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    assert named
    assert named <= set(KNOWN)


def test_every_page_is_in_the_menu_once() -> None:
    """A page in no menu is a warning of `make docs`, which is an error; this says so sooner."""
    menu = runpy.run_path(str(ROOT / "tools" / "site" / "conf.py"))["MENU"]
    entries = [re.sub(r".*<(.*)>", r"\1", entry) for entries in menu.values() for entry in entries]
    assert len(entries) == len(set(entries))
    pages = {page.stem for page in DOCS} - {"index"} | {"self"}
    assert {entry for entry in entries if not entry.startswith("/")} == pages
    for entry in entries:
        if entry.startswith("/"):
            assert (ROOT / f"{entry[1:]}.md").exists()


def test_the_picture_brings_its_own_ground_for_light_and_dark() -> None:
    picture = (ROOT / "docs" / "life-of-a-block.svg").read_text()
    assert 'class="ground" width="720" height="700"' in picture
    assert "prefers-color-scheme: dark" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
