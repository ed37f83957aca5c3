"""`forebay.copier.streams.Gpu` on a CUDA device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton.language as tl

from forebay.copier.cuda import kernels
from forebay.copier.cuda.driver import Driver
from forebay.copier.streams import Addresses, Columns, Event, Part, Staging, Stream, Table
from forebay.copier.tiles import Tiles

_NOTHING_TOLD = -1
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


class CudaGpu:
    """The regions of one device. Raises CudaError where there is no driver."""

    def __init__(self, regions: Sequence[torch.Tensor], slots: int, *, tickets: int = 4096) -> None:
        self._device = regions[0].device
        self._regions = list(regions)  # kept alive: kernels know their addresses only
        self.driver = Driver()
        self._tiles = Tiles.of(
            [(region.data_ptr(), region.stride(0), region.size(1)) for region in regions], kernels.WORDS_PER_TILE
        )
        self.num_blocks: int = regions[0].size(0)
        self.bytes_per_block = self._tiles.bytes_per_block
        self._word = _WORDS[self._tiles.word_bytes]
        self._tile_table = torch.from_numpy(self._tiles.table).to(self._device)
        self._sums = torch.zeros(slots, dtype=torch.int64, device=self._device)
        self._told = torch.full((tickets,), _NOTHING_TOLD, dtype=torch.int64, pin_memory=True)
        self._told_here = self._told.numpy()
        self._stagings: list[torch.Tensor] = []
        torch.cuda.current_stream(self._device).synchronize()  # what was made above is there for all streams

    # --- the engine's thread ------------------------------------------------------------------------------

    def mark(self) -> Event:
        return CudaEvent(self.driver, torch.cuda.current_stream(self._device).cuda_stream)

    def told(self, ticket: int) -> int | None:
        differ = int(self._told_here[ticket])
        return None if differ == _NOTHING_TOLD else differ

    # --- the copier's thread ------------------------------------------------------------------------------

    def enter(self) -> None:
        torch.cuda.set_device(self._device)
        self.driver.enter()

    def stream(self, *, urgent: bool) -> CudaStream:
        return CudaStream(self.driver, self._device, urgent=urgent)

    def staging(self, num_bytes: int) -> Staging:
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._stagings.append(memory)
        return Staging(memory.data_ptr(), num_bytes)

    def parts(self, num_bytes: int) -> list[Part]:
        return self._tiles.parts(num_bytes)

    def upload(self, stream: Stream, columns: Columns) -> Table:
        rows = len(columns.blocks)
        # Pinned: from other memory the driver would copy when it pleases, and make this thread wait.
        pinned = torch.zeros((kernels.COLUMNS, max(1, rows)), dtype=torch.int64, pin_memory=True)
        pinned[: len(columns), :rows].numpy()[:] = columns
        torch.cuda.set_stream(_torch(stream))  # of this thread, which is the copier's
        memory = pinned.to(self._device, non_blocking=True)
        return Table((memory, pinned), rows, bool(np.any(columns.wanted)))

    def gather(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        self._move(stream, table, first, count, part, staging, gather=True)

    def scatter(self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        self._move(stream, table, first, count, part, staging, gather=False)

    def _move(
        self, stream: Stream, table: Table, first: int, count: int, part: Part, staging: Staging, *, gather: bool
    ) -> None:
        torch.cuda.set_stream(_torch(stream))
        kernels.move[(part.num_tiles, count)](
            table.memory[0],
            max(1, table.rows),
            first,
            self._tile_table,
            part.first_tile,
            staging.address,
            part.num_bytes,
            part.offset,
            WORD=self._word,
            WORD_BYTES=self._tiles.word_bytes,
            WORDS=kernels.WORDS_PER_TILE,
            GATHER=gather,
            VERIFY=table.verified,
        )

    def copy(self, stream: Stream, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        assert isinstance(stream, CudaStream)
        self.driver.copy(stream.handle, destinations, sources, sizes)

    def fill(self, stream: Stream, staging: Staging, byte: int) -> None:
        memory = next(each for each in self._stagings if each.data_ptr() == staging.address)
        torch.cuda.set_stream(_torch(stream))
        memory.fill_(byte)

    def seal(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(stream, table, ticket, seal=True)

    def check(self, stream: Stream, table: Table, ticket: int) -> None:
        self._settle(stream, table, ticket, seal=False)

    def _settle(self, stream: Stream, table: Table, ticket: int, *, seal: bool) -> None:
        torch.cuda.set_stream(_torch(stream))
        kernels.settle[(1,)](
            table.memory[0],
            max(1, table.rows),
            self._sums,
            self._told.data_ptr() + ticket * self._told.element_size(),
            ROWS=kernels.ROWS_AT_ONCE,
            SEAL=seal,
            VERIFY=table.verified,
        )

    def expect(self, ticket: int) -> None:
        self._told_here[ticket] = _NOTHING_TOLD


def _torch(stream: Stream) -> torch.cuda.Stream:
    assert isinstance(stream, CudaStream)
    return stream.torch
