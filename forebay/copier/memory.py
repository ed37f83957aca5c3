"""What the kernel is asked about host memory: to map, touch, bind and unmap it, and how much there is left."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

PAGE_BYTES = mmap.PAGESIZE
HUGE_BYTES = 2 << 20
MACHINE = "the machine"
_MPOL_PREFERRED = 1
_MBIND = {"x86_64": 237, "aarch64": 235}  # libc has no function for it
_MAP_FAILED = ctypes.c_void_p(-1).value

# ctypes releases the GIL for the length of a call.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memset.restype = ctypes.c_void_p
_libc.syscall.restype = ctypes.c_long


def map_private(length: int) -> int:
    """The address of so many bytes of new memory, whole pages that begin on a boundary of huge ones. They have no
    name and no other user, so they end with the process however that ends. Raises OSError."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped: int = _libc.mmap(None, length + HUGE_BYTES, protection, flags, -1, 0)
    if mapped == _MAP_FAILED:
        raise _os_error("mmap")
    address = mapped + -mapped % HUGE_BYTES
    unmap(mapped, address - mapped)
    unmap(address + length, mapped + HUGE_BYTES - address)
    # A huge page is whole or not at all. One that began in the last part of the memory could hold more than was
    # asked for, so that part gets small ones.
    _advise(address, length - length % HUGE_BYTES, mmap.MADV_HUGEPAGE)
    # A child has no use for it. Its fork would copy page tables of gigabytes, and make this process write to
    # copies of the pages that a device knows.
    _advise(address, length, mmap.MADV_DONTFORK)
    _advise(address, length, mmap.MADV_DONTDUMP)  # it is large, and tells what people have written
    return address


def unmap(address: int, length: int) -> None:
    if length and _libc.munmap(address, length):
        raise _os_error("munmap")


def touch(address: int, length: int) -> None:
    """Give new memory its pages, of which there must be enough: see memory_limits().

    By writing, although there is a call that asks the kernel for them (MADV_POPULATE_WRITE). That one lets nobody
    in the process map memory before it ends, which takes a tenth of a second where a hypervisor has to find the
    pages first; and an engine maps memory all the time.
    """
    _libc.memset(address, 0, length)


def bind(address: int, length: int, numa_node: int) -> None:
    """Take pages that are not there yet from this node, if it has some. Raises OSError."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind: not known on {platform.machine()}")
    mask = (ctypes.c_ulong * (numa_node // 64 + 1))()
    mask[numa_node // 64] = 1 << numa_node % 64
    bits = numa_node + 2  # the kernel looks at one less
    words = [ctypes.c_long(each) for each in (number, address, length, _MPOL_PREFERRED)]
    if _libc.syscall(*words, mask, ctypes.c_long(bits), ctypes.c_long(0)):
        raise _os_error("mbind")


def view(address: int, length: int) -> np.ndarray:
    """These bytes as an array. It does not keep them: touching it after they were unmapped ends the process."""
    import numpy as np  # here, because the command line asks for limits where there may be no numpy

    return np.frombuffer((ctypes.c_uint8 * length).from_address(address), np.uint8)


def _advise(address: int, length: int, advice: int) -> None:
    """A wish: a kernel that does not know it does without."""
    _libc.madvise(address, length, advice)


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


class Limit(NamedTuple):
    name: str
    total_bytes: int
    available_bytes: int

    def reserve_bytes(self, pool_bytes: int) -> int:
        """What a host pool of this size leaves alone: for the engine to live on, and for other ranks that ask at
        the same moment. A small pool is not what uses up a machine, and need not leave more than it takes."""
        return min(max(1 << 30, self.total_bytes // 50), pool_bytes)


def memory_limits(root: Path = Path("/")) -> list[Limit]:
    """What bounds the memory of this process: the machine, and its cgroup with those around it. What cannot be
    read bounds nothing."""
    limits = []
    try:
        machine = _numbers(root / "proc/meminfo")
        limits.append(Limit(MACHINE, machine["MemTotal:"] << 10, machine["MemAvailable:"] << 10))
    except (OSError, ValueError, KeyError):
        pass
    for folder, version in _cgroups(root):
        try:
            limits.append(_v2_limit(folder) if version == 2 else _v1_limit(folder))
        except (OSError, ValueError, KeyError):  # most have no limit, and some are not shown to a container
            continue
    return limits


def _cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, version = (root / "sys/fs/cgroup/memory", 1) if controllers else (root / "sys/fs/cgroup", 2)
        folder = mount / path.lstrip("/")
        # What is set on a folder holds for all that are in it.
        for each in (folder, *folder.parents):
            yield each, version
            if each == mount:
                break


def _v2_limit(folder: Path) -> Limit:
    # Above "high" the kernel slows the process down, above "max" it kills.
    written = [(folder / name).read_text().strip() for name in ("memory.max", "memory.high")]
    total = min(int(each) for each in written if each != "max")
    used, kinds = int((folder / "memory.current").read_text()), _numbers(folder / "memory.stat")
    return _cgroup_limit(total, used, kinds["inactive_file"] + kinds["active_file"])


def _v1_limit(folder: Path) -> Limit:
    total, used = (int((folder / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
    kinds = _numbers(folder / "memory.stat")
    return _cgroup_limit(total, used, kinds["total_inactive_file"] + kinds["total_active_file"])


def _cgroup_limit(total: int, used: int, files: int) -> Limit:
    # Files that were read, such as a model's weights, count as used, but the kernel lets go of them first.
    return Limit("the cgroup", total, total - max(0, used - files))


def _numbers(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}


def gpu_numa_node(pci_bus_id: str, root: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """The node that this device is attached to, as `0000:1B:00.0`. None if it has none or nobody knows."""
    domain, _, rest = pci_bus_id.strip().lower().partition(":")
    try:
        # NVML writes the domain with eight digits, the kernel with four.
        node = int((root / f"{int(domain, 16):04x}:{rest}" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
