"""A shell in which the commands that our pages show can be run."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path

from tests.cli.builders import ROOT


def shell(folder: Path) -> dict[str, str]:
    """An environment where `forebay` is this one, and `vllm` says what it was given."""
    scripts = {
        "forebay": f'exec {shlex.quote(sys.executable)} -m forebay.cli "$@"',
        "vllm": 'printf "%s\\n" "$@"',
    }
    for name, line in scripts.items():
        file = folder / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\n{line}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
