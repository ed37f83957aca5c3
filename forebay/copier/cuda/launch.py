"""Kernels that Triton compiled, launched without Triton.

Triton's own launch takes tens of microseconds of Python and gives the interpreter away once more; a chunk of a
copy has no more than that to spend altogether.
"""

from __future__ import annotations

import re
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from typing import Any

from forebay.copier.cuda.driver import Driver
from forebay.errors import ForebayError

_THREADS_PER_WARP = 32
_TYPES = {"32": c_uint32, "64": c_uint64}


class Kernel:
    """One variant of a kernel. Called from one thread at a time."""

    def __init__(self, driver: Driver, compiled: Any, num_values: int) -> None:
        self._driver = driver
        self._function = driver.load(compiled.asm["cubin"], compiled.metadata.name)
        self._threads: int = compiled.metadata.num_warps * _THREADS_PER_WARP
        self._shared_bytes: int = compiled.metadata.shared
        self._values = [_TYPES[bits]() for bits in parameter_bits(compiled.asm["ptx"])]
        # Behind the values come addresses of memory that Triton would give kernels that ask for it. Ours do not.
        if compiled.metadata.global_scratch_size or not num_values <= len(self._values) <= num_values + 2:
            raise ForebayError(f"expected a kernel of {num_values} values, Triton made one of {len(self._values)}")
        self._num_values = num_values
        self._addresses = (c_void_p * len(self._values))(*map(addressof, self._values))

    def __call__(self, stream: int, grid: tuple[int, int], *values: int) -> None:
        for place, value in zip(self._values[: self._num_values], values, strict=True):
            place.value = value
        self._driver.launch(self._function, grid, self._threads, self._shared_bytes, stream, self._addresses)


def parameter_bits(ptx: str) -> list[str]:
    """How wide each parameter of the kernel is."""
    entry = re.search(r"\.entry\s+\w+\((.*?)\)", ptx, re.DOTALL)
    if entry is None:
        raise ForebayError("expected a kernel, Triton made none")
    return re.findall(r"\.param\s+\.[a-z](\d+)", entry[1])
