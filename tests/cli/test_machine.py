"""Readings of a machine, from files and a driver that are planted."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.machine import Gpus, SharedFile, Torch, read_gpus, read_machine


def plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_what_is_in_files_is_read(tmp_path: Path) -> None:
    plant(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 100 kB\nMemAvailable: 50 kB\nCommitLimit: 90 kB\nCommitted_AS: 30 kB\n",
            "proc/sys/vm/overcommit_memory": "2\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       64 kB\n",
            "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:       32 kB\n",
            "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal:       0 kB\n",  # a device's own memory
            "dev/shm/vllm_offload_1.mmap": "x" * 5000,
            "dev/shm/lmcache_2": "x" * 5000,
            "dev/shm/psm_3": "x" * 5000,
            "proc/77/maps": "7f00-7f01 rw-s 0 00:19 5 /dev/shm/vllm_offload_1.mmap\n",
        },
    )
    machine = read_machine(tmp_path)
    assert [(limit.total_bytes, limit.available_bytes) for limit in machine.limits] == [(102_400, 51_200)]
    assert (machine.overcommit, machine.commit_left_bytes) == (2, 61_440)
    assert machine.huge_pages == "never"
    assert machine.numa_bytes == {0: 65_536, 1: 32_768}
    assert [(file.name, file.in_use) for file in machine.shared] == [
        ("lmcache_2", False),
        ("vllm_offload_1.mmap", True),
    ]


def test_what_cannot_be_read_is_not_known(tmp_path: Path) -> None:
    machine = read_machine(tmp_path)
    assert machine.limits == []
    assert (machine.huge_pages, machine.overcommit, machine.commit_left_bytes) == (None, None, None)
    assert machine.numa_bytes == {}
    assert machine.shared == []


def test_a_file_that_was_never_filled_takes_no_memory(tmp_path: Path) -> None:
    plant(tmp_path, {"dev/shm/vllm_offload_1.mmap": ""})
    with open(tmp_path / "dev/shm/vllm_offload_1.mmap", "r+b") as file:
        file.truncate(1 << 30)
    assert read_machine(tmp_path).shared == [SharedFile("vllm_offload_1.mmap", 0, False)]


def test_this_machine_is_read() -> None:
    machine = read_machine()
    assert machine.python == sys.version_info[:3]
    assert machine.limits


def test_torch_and_vllm_are_found_without_importing_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(
        tmp_path,
        {
            "torch/__init__.py": "raise ImportError('libcudart.so.13')",
            "torch/version.py": "__version__ = '2.13.0+cu130'\ncuda = '13.0'\nhip = None\n",
            "vllm/__init__.py": "raise ImportError('libtorch.so')",
            "vllm-0.31.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n",
        },
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] in ("torch", "vllm")]:
        monkeypatch.delitem(sys.modules, name)
    machine = read_machine(tmp_path)
    assert machine.torch == Torch("2.13.0+cu130", "13.0", None)
    assert machine.vllm == "0.31.2"


# --- the driver -------------------------------------------------------------------------------------------


class FakeDriver:
    """Of libcuda, what is called. `byref` keeps what it points to in `_obj`."""

    def __init__(self, gpus: int = 2, init: int = 0, *, batched: bool = True) -> None:
        self._gpus, self._init = gpus, init
        self.contexts = 0
        if batched:
            self.cuMemcpyBatchAsync = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("cuCtx") or name == "cuDevicePrimaryCtxRetain":
            raise AssertionError("a context takes memory of the device")
        raise AttributeError(name)

    def cuDriverGetVersion(self, version: Any) -> int:  # noqa: N802
        version._obj.value = 12_080
        return 0

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._init

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self._gpus
        return 0

    def cuDeviceGetPCIBusId(self, name: Any, length: int, device: int) -> int:  # noqa: N802
        name.value = f"0000:{device:02X}:00.0".encode()
        return 0

    def cuGetErrorName(self, error: int, name: Any) -> int:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0


def gpus_of(driver: object, monkeypatch: pytest.MonkeyPatch) -> Gpus:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return read_gpus()


def test_the_driver_is_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus_of(FakeDriver(), monkeypatch)
    assert found == Gpus(["0000:00:00.0", "0000:01:00.0"], "12.8", True, "")
    assert not gpus_of(FakeDriver(batched=False), monkeypatch).batched_copies


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus_of(FakeDriver(init=100), monkeypatch)
    assert (found.bus_ids, found.reason) == ([], "CUDA_ERROR_NO_DEVICE")
    assert gpus_of(FakeDriver(gpus=0), monkeypatch).reason == "the driver counts none"
    assert gpus_of(object(), monkeypatch).reason == "libcuda.so.1 is not a driver"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: FakeDriver(init=100))
    assert read_gpus().reason.endswith("with CUDA_VISIBLE_DEVICES='7'")


def test_without_a_driver_the_reason_names_the_library() -> None:
    found = read_gpus("libnothing.so.9")
    assert not found.bus_ids
    assert "libnothing.so.9" in found.reason


def test_the_calls_looked_for_are_those_that_a_copier_makes() -> None:
    from forebay.cli.machine import _BATCHED_COPIES

    source = (Path(__file__).parents[2] / "forebay/copier/cuda/driver.py").read_text()
    assert all(f'"{call}"' in source for call in _BATCHED_COPIES)
