"""What installing Forebay brings along: one package. docs/dependencies.md says which, and why."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from tests.test_readme import ROOT, cells

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MOST = 6
COME_WITH_VLLM = ("vllm", "torch", "numpy", "triton", "prometheus_client")


def _name(requirement: str) -> str:
    found = re.match(r"[\w-]+", requirement)
    assert found
    return found[0].lower()


RUNTIME = [_name(each) for each in PROJECT["dependencies"]]


def test_the_page_has_every_dependency_with_a_reason() -> None:
    page = cells("dependencies.md", "At run time")
    assert list(page) == RUNTIME == ["xxhash"]
    assert len(RUNTIME) <= MOST
    assert all(all(row) for row in page.values())


def test_the_page_has_every_extra_with_its_packages() -> None:
    page = cells("dependencies.md", "Extras")
    extras = {name: sorted(map(_name, each)) for name, each in PROJECT["optional-dependencies"].items()}
    assert {name: re.findall(r"`([\w-]+)`", row[0]) for name, row in page.items()} == extras


def test_installing_it_brings_nothing_else() -> None:
    """All that the metadata of the installed packages asks for, without extras, and what that asks for."""
    brought: set[str] = set()
    to_see = ["forebay"]
    while to_see:
        for each in metadata.requires(to_see.pop()) or []:
            if "extra ==" not in each and _name(each) not in brought:
                brought.add(_name(each))
                to_see.append(_name(each))
    assert brought == set(RUNTIME)


BLOCKED = """
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top not in ("forebay", {allowed}):
            raise ModuleNotFoundError(f"{{top}} is not there", name=top)

sys.meta_path.insert(0, Only())
import importlib
for name in {modules}:
    importlib.import_module(name)
"""
WITHOUT_VLLM = (
    *("forebay", "forebay.cli", "forebay.cli.config", "forebay.cli.doctor", "forebay.settings", "forebay.metrics"),
    *("forebay.testing", "forebay.copier", "forebay.policies"),
)


def _imports(modules: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    script = BLOCKED.format(allowed=", ".join(map(repr, RUNTIME)), modules=modules)
    command = [sys.executable, "-c", script]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_core_and_command_line_do_with_that() -> None:
    run = _imports(WITHOUT_VLLM)
    assert run.returncode == 0, run.stderr
    assert "torch is not there" in _imports(("forebay.copier.torch_copier",)).stderr


@pytest.mark.parametrize("package", COME_WITH_VLLM)
def test_who_imports_what_comes_with_vllm(package: str) -> None:
    """As the page has it: a file, or a part of the tree."""
    importers = set()
    for path in (ROOT / "forebay").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == package for name in names):
                importers.add(str(path.relative_to(ROOT)))
    [said] = cells("dependencies.md", "If they are there")[package]
    allowed = {
        "vllm": ("forebay/vllm/",),
        "torch": ("forebay/vllm/", "forebay/copier/"),
        "numpy": ("forebay/copier/",),
        "triton": ("forebay/copier/cuda/",),
        "prometheus_client": ("forebay/vllm/prometheus.py",),
    }[package]
    assert said
    assert importers
    assert all(path.startswith(allowed) for path in importers), importers


def test_make_test_fast_asks_for_no_test_that_needs_torch() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ntest-fast:")[2].partition("\n\n")[0]
    left_out = re.findall(r"--ignore=\S+", recipe)
    assert left_out
    without = "import sys; sys.modules |= {'torch': None, 'vllm': None}; import pytest; sys.exit(pytest.main())"
    command = [sys.executable, "-c", without, "--collect-only", "-qq", "-p", "no:cacheprovider", *left_out]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]
