"""The lines above every table: on what it was measured, and how."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path


def has_cuda() -> bool:
    """Without torch: a process that asks torch holds on to the device."""
    return Path("/dev/nvidiactl").exists()


def about(commit: str | None = None) -> dict[str, str]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": _says(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"])
        or ("a GPU without nvidia-smi" if has_cuda() else "none"),
        "cpu": f"{cpu[0].partition(':')[2].strip() if cpu else platform.machine()}, {os.cpu_count()} cores, "
        f"{memory / 1e9:.0f} GB",
        "python": platform.python_version(),
        "commit": commit or _says(git) or "unknown",
        "command": shlex.join(["python", *sys.argv]),
    }


def print_about(lines: dict[str, str]) -> None:
    for name, value in lines.items():
        print(f"{name:<16} {value}")


def _says(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
