"""`forebay.copier.streams.Gpu` on a CUDA device."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from forebay.copier.cuda import kernels
from forebay.copier.cuda.driver import Driver
from forebay.copier.cuda.launch import Kernel
from forebay.copier.streams import Addresses, Columns, Event, Numbers, Part, Staging, Stream, Table
from forebay.copier.tiles import Tiles

_NOTHING_TOLD = -1
_SMALLEST_TABLE = 511
_WORD_BYTES = 8
# Examples, from which Triton takes how wide a number is.
_SMALL, _ADDRESS = 7, 1 << 40
_WORDS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}


class CudaEvent:
    def __init__(self, driver: Driver, stream: int) -> None:
        self._driver = driver
        self.handle = 0
        self.handle = driver.new_event()
        driver.record(self.handle, stream)

    def __del__(self) -> None:
        if self.handle:
            self._driver.drop_event(self.handle)

    def query(self) -> bool:
        return self._driver.has_passed(self.handle)

    def synchronize(self) -> None:
        self._driver.wait_here(self.handle)


class CudaStream:
    def __init__(self, driver: Driver, *, urgent: bool) -> None:
        self._driver = driver
        self.handle = driver.new_stream(urgent=urgent)

    def record(self) -> CudaEvent:
        return CudaEvent(self._driver, self.handle)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._driver.wait(self.handle, event.handle)

    def synchronize(self) -> None:
        self._driver.synchronize(self.handle)


class _TableMemory(NamedTuple):
    address: int  # on the device
    pinned: torch.Tensor
    here: Numbers  # the same as pinned


class CudaGpu:
    """The regions of one device. Raises CudaError where there is no driver."""

    def __init__(self, regions: Sequence[torch.Tensor], slots: int, *, tickets: int = 4096) -> None:
        self._device = regions[0].device
        self._regions = list(regions)  # kept alive: kernels know their addresses only
        self.driver = Driver()
        self.is_host_pinned: Callable[[], bool] = lambda: True
        self._tiles = Tiles.of(
            [(region.data_ptr(), region.stride(0), region.size(1)) for region in regions], kernels.WORDS_PER_TILE
        )
        self.num_blocks: int = regions[0].size(0)
        self.bytes_per_block = self._tiles.bytes_per_block
        self._allocated: list[int] = []
        self._tile_table = self._allocate(self._tiles.table.nbytes)
        self._sums = self._allocate(slots * _WORD_BYTES)
        self._told = torch.full((tickets,), _NOTHING_TOLD, dtype=torch.int64, pin_memory=True)
        self._told_here = self._told.numpy()
        # Kept for good: the driver reads and writes them behind PyTorch's back.
        self._every_table: list[_TableMemory] = []
        self._tables: dict[int, deque[_TableMemory]] = {}  # by size, to be used again
        self._kernels: dict[tuple[str, bool, bool], Kernel] = {}
        pinned = torch.from_numpy(self._tiles.table).pin_memory()
        stream = self.stream(urgent=True)
        self.driver.upload(stream.handle, self._tile_table, pinned.data_ptr(), self._tiles.table.nbytes)
        stream.synchronize()

    def _allocate(self, num_bytes: int) -> int:
        address = self.driver.allocate(num_bytes)
        self._allocated.append(address)
        return address

    # --- the engine's thread ------------------------------------------------------------------------------

    def mark(self) -> CudaEvent:
        return CudaEvent(self.driver, torch.cuda.current_stream(self._device).cuda_stream)

    def told(self, ticket: int) -> int | None:
        differ = int(self._told_here[ticket])
        return None if differ == _NOTHING_TOLD else differ

    # --- the copier's thread ------------------------------------------------------------------------------

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        self.driver.enter()
        for verify in (True, False):  # compiled now, before anybody waits for it
            for first in (True, False):
                self._move_kernel(gather=first, verify=verify)
                self._settle_kernel(seal=first, verify=verify)

    def stream(self, *, urgent: bool) -> CudaStream:
        return CudaStream(self.driver, urgent=urgent)

    def staging(self, num_bytes: int) -> Staging:
        return Staging(self._allocate(num_bytes), num_bytes)

    def parts(self, num_bytes: int) -> list[Part]:
        return self._tiles.parts(num_bytes)

    def upload(self, stream: Stream, columns: Columns) -> Table:
        rows = max(1, len(columns.blocks))
        size = 1 << max(_SMALLEST_TABLE, kernels.COLUMNS * rows - 1).bit_length()
        free = self._tables.setdefault(size, deque())
        memory = free.pop() if free else self._new_table(size)
        words = array("Q")
        for column in columns:
            words.extend(column)
        words.extend([0] * (kernels.COLUMNS * rows - len(words)))  # the sums
        memory.here.data.cast("B")[: len(words) * _WORD_BYTES] = memoryview(words).cast("B")
        self.driver.upload(_handle(stream), memory.address, memory.pinned.data_ptr(), len(words) * _WORD_BYTES)
        return Table(memory, rows, any(columns.wanted))

    def _new_table(self, size: int) -> _TableMemory:
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        memory = _TableMemory(self._allocate(size * pinned.element_size()), pinned, pinned.numpy())
        self._every_table.append(memory)
        return memory

    def drop(self, table: Table) -> None:
        memory: _TableMemory = table.memory
        self._tables[len(memory.here)].append(memory)

    def gather(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        kernel = self._move_kernel(gather=True, verify=table.verified)
        self._move(kernel, stream, table, first, count, part, staging)

    def scatter(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        kernel = self._move_kernel(gather=False, verify=table.verified)
        self._move(kernel, stream, table, first, count, part, staging)

    def _move(
        self, kernel: Kernel, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging
    ) -> None:
        kernel(
            _handle(stream),
            (part.num_tiles, count),
            table.memory.address,
            table.rows,
            first,
            self._tile_table,
            part.first_tile,
            staging.address,
            part.num_bytes,
            part.offset,
        )

    def copy(self, stream: Stream, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self.driver.copy(_handle(stream), destinations, sources, sizes, pinned=self.is_host_pinned())

    def fill(self, stream: Stream, staging: Staging, byte: int) -> None:
        self.driver.fill(_handle(stream), staging.address, byte, staging.num_bytes)

    def seal(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(self._settle_kernel(seal=True, verify=table.verified), stream, table, ticket)

    def check(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(self._settle_kernel(seal=False, verify=table.verified), stream, table, ticket)

    def _settle(self, kernel: Kernel, stream: Stream, table: Table, ticket: int) -> None:
        told = self._told.data_ptr() + ticket * self._told.element_size()
        kernel(_handle(stream), (1, 1), table.memory.address, table.rows, self._sums, told)

    def expect(self, ticket: int) -> None:
        self._told_here[ticket] = _NOTHING_TOLD

    def release(self) -> None:
        """Let go of all memory, the engine's too. Nothing is on its way any more."""
        self._regions = []
        while self._allocated:
            self.driver.free(self._allocated.pop())

    # --- kernels ------------------------------------------------------------------------------------------

    def _move_kernel(self, *, gather: bool, verify: bool) -> Kernel:
        name = ("move", gather, verify)
        if name not in self._kernels:
            compiled = kernels.move.warmup(
                *(torch.int64, _SMALL, _SMALL, torch.int64, _SMALL, _ADDRESS, _SMALL, _SMALL),
                grid=(1, 1),
                WORD=_WORDS[self._tiles.word_bytes],
                WORD_BYTES=self._tiles.word_bytes,
                WORDS=kernels.WORDS_PER_TILE,
                GATHER=gather,
                VERIFY=verify,
            )
            self._kernels[name] = Kernel(self.driver, compiled, 8)
        return self._kernels[name]

    def _settle_kernel(self, *, seal: bool, verify: bool) -> Kernel:
        name = ("settle", seal, verify)
        if name not in self._kernels:
            compiled = kernels.settle.warmup(
                *(torch.int64, _SMALL, torch.int64, _ADDRESS),
                grid=(1, 1),
                ROWS=kernels.ROWS_AT_ONCE,
                SEAL=seal,
                VERIFY=verify,
            )
            self._kernels[name] = Kernel(self.driver, compiled, 4)
        return self._kernels[name]


def _handle(stream: Stream) -> int:
    assert isinstance(stream, CudaStream)
    return stream.handle
