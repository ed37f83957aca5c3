"""Unpacks Debian's Prometheus into .venv/prometheus, for the test that lets it scrape a real server.

    .venv/bin/python tools/install_prometheus.py

`make test` calls it. Nothing is installed into the system and no rights are needed: the package is downloaded and its
files are unpacked. If the system has a Prometheus of its own, that one is used. Asked again, it does nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / ".venv" / "prometheus"
TIMEOUT_S = 300


class InstallError(Exception):
    """One line for the user."""


def main() -> int:
    try:
        program = installed() or install(FOLDER)
    except InstallError as error:
        print(f"Prometheus: {error}", file=sys.stderr)
        return 1
    print(f"==> Prometheus is there: {os.path.relpath(program)}")
    return 0


def installed(folder: Path = FOLDER) -> Path | None:
    unpacked = folder / "usr" / "bin" / "prometheus"
    if unpacked.exists():
        return unpacked
    found = shutil.which("prometheus")
    return Path(found) if found else None


def can_be_had() -> bool:
    """Whether this is a system that has Debian packages."""
    return bool(shutil.which("apt-get") and shutil.which("dpkg-deb"))


def install(folder: Path) -> Path:
    if not can_be_had():
        raise InstallError(
            "there are no Debian packages here (no apt-get); the test that needs it will be skipped"
        )
    print("==> downloading Debian's prometheus (20 MB) and unpacking it into .venv/prometheus", flush=True)
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    downloads = part / "downloads"
    downloads.mkdir(parents=True)
    try:
        download(downloads)
        [package] = downloads.glob("prometheus_*.deb")
        run(["dpkg-deb", "-x", package.name, ".."], downloads)
        shutil.rmtree(downloads)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)  # last, so that what was interrupted does not look complete
    finally:
        shutil.rmtree(part, ignore_errors=True)
    program = installed(folder)
    if program is None or not program.is_relative_to(folder):
        raise InstallError("Debian's package has no usr/bin/prometheus")
    return program


def download(folder: Path) -> None:
    """Into this folder. Where the system's lists of packages are empty, as in most containers, own ones are made."""
    try:
        run(["apt-get", "download", "prometheus"], folder)
    except InstallError:
        own = [f"-oDir::State={folder}/state", f"-oDir::Cache={folder}/cache"]
        for needed in ("state/lists/partial", "cache/archives/partial"):
            (folder / needed).mkdir(parents=True)
        print("    the lists of packages are old or empty: fetching them", flush=True)
        run(["apt-get", *own, "update"], folder)
        run(["apt-get", *own, "download", "prometheus"], folder)


def run(command: Sequence[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"{command[0]} took longer than {TIMEOUT_S} s") from None
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith(("E:", "dpkg"))]
        raise InstallError(errors[-1] if errors else f"{command[0]} failed")


if __name__ == "__main__":
    sys.exit(main())
