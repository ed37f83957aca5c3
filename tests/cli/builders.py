"""Machines that are well, and the command as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from forebay.cli.machine import Gpus, Machine, Torch
from forebay.copier.memory import MACHINE, Limit

ROOT = Path(__file__).parents[2]
GB = 10**9

GPU_MACHINE = Machine(
    python=(3, 12, 3),
    vllm="0.32.0",
    torch=Torch("2.13.0+cu130", cuda="13.0"),
    gpus=Gpus(["0000:1B:00.0"], "13.0", batched_copies=True),
    triton_error=None,
    memlock_bytes=None,
    limits=[Limit(MACHINE, 256 * GB, 200 * GB)],
    huge_pages="madvise",
    overcommit=0,
    commit_left_bytes=100 * GB,
    numa_bytes={0: 128 * GB, 1: 128 * GB},
    gpu_nodes=[1],
)
CPU_MACHINE = replace(
    GPU_MACHINE,
    torch=Torch("2.13.0+cpu"),
    gpus=Gpus(reason="no driver"),
    memlock_bytes=8 << 20,
    numa_bytes={0: 256 * GB},
    gpu_nodes=[],
)

# Refuses modules as if they were not installed, then runs the command.
_WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
from forebay.cli import main
sys.exit(main({arguments!r}))
"""


def right(**changes: Any) -> dict[str, Any]:
    """A kv_transfer_config that is right, but for these. None takes a key out."""
    config = {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_module_path": "forebay.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": "64GB"},
    }
    return {key: value for key, value in {**config, **changes}.items() if value is not None}


def forebay(
    *arguments: str, text: str | None = None, without: tuple[str, ...] = (), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    script = _WITHOUT.format(refused=without, arguments=list(arguments))
    command = ["-c", script] if without else ["-m", "forebay.cli", *arguments]
    return subprocess.run(
        [sys.executable, "-W", "error", *command],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=text,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
