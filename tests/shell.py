"""A shell in which the commands that our pages show can be run."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SAYS_WHAT_IT_WAS_GIVEN = 'printf "%s\\n" "$@"'


def shell(folder: Path, vllm: str = SAYS_WHAT_IT_WAS_GIVEN) -> dict[str, str]:
    """An environment where `forebay` and `python` are those that run this, and `vllm` is a line of bash."""
    scripts = {
        "forebay": f'exec {shlex.quote(sys.executable)} -m forebay.cli "$@"',
        "python": f'exec {shlex.quote(sys.executable)} "$@"',
        "vllm": vllm,
    }
    for name, line in scripts.items():
        file = folder / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{line}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
