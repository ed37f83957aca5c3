"""`forebay.copier.streams.Gpu` on a CUDA device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl

from forebay.copier.cuda import kernels
from forebay.copier.cuda.driver import Driver
from forebay.copier.cuda.launch import Kernel
from forebay.copier.streams import Addresses, Columns, Event, Numbers, Part, Staging, Stream, Table
from forebay.copier.tiles import Tiles

_NOTHING_TOLD = -1
_WANTED = Columns._fields.index("wanted")
_SMALLEST_TABLE = 511
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
    def __init__(self, driver: Driver, device: torch.device, *, urgent: bool) -> None:
        least, greatest = torch.cuda.Stream.priority_range()
        self._driver = driver
        self.torch = torch.cuda.Stream(device, priority=greatest if urgent else least)
        self.handle: int = self.torch.cuda_stream

    def record(self) -> CudaEvent:
        return CudaEvent(self._driver, self.handle)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._driver.wait(self.handle, event.handle)

    def synchronize(self) -> None:
        self.torch.synchronize()


class _TableMemory(NamedTuple):
    on_device: torch.Tensor
    pinned: torch.Tensor
    here: Numbers  # the same as pinned


class CudaGpu:
    """The regions of one device. Raises CudaError where there is no driver."""

    def __init__(self, regions: Sequence[torch.Tensor], slots: int, *, tickets: int = 4096) -> None:
        self._device = regions[0].device
        # PyTorch gives memory that was freed on a stream to whoever asks on the same stream, although the device
        # may still be using it: there, that is safe. So the copier asks for memory on a stream of its own.
        self._own = torch.cuda.Stream(self._device)
        self._regions = list(regions)  # kept alive: kernels know their addresses only
        self.driver = Driver()
        self._tiles = Tiles.of(
            [(region.data_ptr(), region.stride(0), region.size(1)) for region in regions], kernels.WORDS_PER_TILE
        )
        self.num_blocks: int = regions[0].size(0)
        self.bytes_per_block = self._tiles.bytes_per_block
        with torch.cuda.stream(self._own):
            self._tile_table = torch.from_numpy(self._tiles.table).to(self._device)
            self._sums = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._told = torch.full((tickets,), _NOTHING_TOLD, dtype=torch.int64, pin_memory=True)
        self._told_here = self._told.numpy()
        self._stagings: list[torch.Tensor] = []
        self._tables: dict[int, deque[_TableMemory]] = {}  # by size, to be used again
        self._kernels: dict[tuple[str, bool, bool], Kernel] = {}
        self._own.synchronize()  # what was made above is there for all streams

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
        for first in (True, False):  # compiled now, before anybody waits for it
            self._move_kernel(gather=first, verify=True)
            self._settle_kernel(seal=first, verify=True)

    def stream(self, *, urgent: bool) -> CudaStream:
        return CudaStream(self.driver, self._device, urgent=urgent)

    def staging(self, num_bytes: int) -> Staging:
        try:
            with torch.cuda.stream(self._own):
                memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{num_bytes} bytes on {self._device}") from error
        self._stagings.append(memory)
        return Staging(memory.data_ptr(), num_bytes)

    def parts(self, num_bytes: int) -> list[Part]:
        return self._tiles.parts(num_bytes)

    def upload(self, stream: Stream, columns: Columns) -> Table:
        rows = max(1, len(columns.blocks))
        size = 1 << max(_SMALLEST_TABLE, kernels.COLUMNS * rows - 1).bit_length()
        free = self._tables.setdefault(size, deque())
        memory = free.pop() if free else self._new_table(size)
        here = memory.here[: kernels.COLUMNS * rows].reshape(kernels.COLUMNS, rows)
        here[:] = 0
        here[: len(columns), : len(columns.blocks)] = columns
        self.driver.upload(_handle(stream), memory.on_device.data_ptr(), memory.pinned.data_ptr(), here.nbytes)
        return Table(memory, rows, bool(here[_WANTED].any()))

    def _new_table(self, size: int) -> _TableMemory:
        pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
        with torch.cuda.stream(self._own):
            on_device = torch.empty(size, dtype=torch.int64, device=self._device)
        return _TableMemory(on_device, pinned, pinned.numpy())

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
            table.memory.on_device.data_ptr(),
            table.rows,
            first,
            self._tile_table.data_ptr(),
            part.first_tile,
            staging.address,
            part.num_bytes,
            part.offset,
        )

    def copy(self, stream: Stream, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        self.driver.copy(_handle(stream), destinations, sources, sizes)

    def fill(self, stream: Stream, staging: Staging, byte: int) -> None:
        self.driver.fill(_handle(stream), staging.address, byte, staging.num_bytes)

    def seal(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(self._settle_kernel(seal=True, verify=table.verified), stream, table, ticket)

    def check(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(self._settle_kernel(seal=False, verify=table.verified), stream, table, ticket)

    def _settle(self, kernel: Kernel, stream: Stream, table: Table, ticket: int) -> None:
        told = self._told.data_ptr() + ticket * self._told.element_size()
        kernel(_handle(stream), (1, 1), table.memory.on_device.data_ptr(), table.rows, self._sums.data_ptr(), told)

    def expect(self, ticket: int) -> None:
        self._told_here[ticket] = _NOTHING_TOLD

    # --- kernels ------------------------------------------------------------------------------------------

    def _move_kernel(self, *, gather: bool, verify: bool) -> Kernel:
        name = ("move", gather, verify)
        if name not in self._kernels:
            compiled = kernels.move.warmup(
                *(self._sums, _SMALL, _SMALL, self._tile_table, _SMALL, _ADDRESS, _SMALL, _SMALL),
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
                *(self._sums, _SMALL, self._sums, _ADDRESS),
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
