from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import forebay
import forebay.copier
import forebay.policies
import forebay.testing
from forebay import errors

_ROOT = Path(forebay.__file__).parents[1]
_PACKAGES = [forebay, forebay.copier, forebay.policies, forebay.testing]
_HEAVY = ("torch", "vllm", "numpy")


@pytest.mark.parametrize("package", _PACKAGES, ids=lambda package: package.__name__)
def test_every_exported_name_exists_once(package: object) -> None:
    exported = package.__all__  # type: ignore[attr-defined]
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert getattr(package, name, None) is not None, name


def test_exported_names_are_sorted() -> None:
    assert forebay.__all__ == sorted(forebay.__all__)


def test_star_import_brings_the_exported_names_and_nothing_else() -> None:
    namespace: dict[str, object] = {}
    exec("from forebay import *", namespace)
    assert namespace.keys() - {"__builtins__"} == set(forebay.__all__)


def test_every_error_is_exported_and_a_forebay_error() -> None:
    raised = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    raised -= {"ensure", "is_whole"}
    assert raised <= set(forebay.__all__)
    for name in raised:
        assert issubclass(getattr(forebay, name), forebay.ForebayError), name


def test_version_is_the_one_in_pyproject() -> None:
    assert f'\nversion = "{forebay.__version__}"\n' in (_ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    "module",
    [
        *("forebay", "forebay.cli", "forebay.cli.config", "forebay.cli.doctor", "forebay.copier"),
        *(
            "forebay.copier.memory",
            "forebay.settings",
            "forebay.testing",
            "forebay.cli.plan",
            "forebay.cli.generate",
            "forebay.cli.top",
        ),
    ],
)
def test_importing_loads_no_heavy_module(module: str) -> None:
    # In a new process: this one may have imported anything. The heavy ones are made to fail, so that an import
    # hidden behind `try` is found as well as one that succeeds.
    script = f"""
import sys
heavy = {_HEAVY!r}
tried = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            tried.append(name)
sys.meta_path.insert(0, Watch())
import {module}
assert not tried, tried
assert not set(heavy) & {{name.partition(".")[0] for name in sys.modules}}
assert {module}.__file__.startswith({str(_ROOT)!r}), {module}.__file__
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
