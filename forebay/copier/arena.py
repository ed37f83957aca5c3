"""Host memory for blocks, and the copies between it and the regions of a device that the host can address.

Device: a block has a row in every region.

    regions[0]   [ b0    ]  [ b1    ]  [ b2    ]  ···
    regions[1]   [ b0 ][ b1 ][ b2 ] ···

Host: a block is one run of bytes, in whatever slot it got.

    arena        [ b7     b7 ][ b2     b2 ][ b5     b5 ] ···
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from xxhash import xxh3_64_intdigest

from forebay.copier.faults import GARBAGE
from forebay.errors import CapacityError, LayoutError, is_whole
from forebay.ids import BlockId, Slot
from forebay.transfers import CopyOrder, Direction

_CHUNK_BYTES = 2 << 20
"""Copies go through a buffer of this size: index_select and index_copy_ have no way around one. Small enough to
stay in a cache, large enough that calls do not count."""

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Arena:
    """The slots of one rank. All calls come from one thread at a time."""

    def __init__(self, regions: Sequence[torch.Tensor], slots: int) -> None:
        _check_regions(regions)
        if not is_whole(slots) or slots < 1:
            raise CapacityError("slots", slots, "a whole number, at least 1")
        self.slots = slots
        self.num_blocks: int = regions[0].size(0)
        self.bytes_per_block: int = sum(region.size(1) for region in regions)
        # Not zeroed: memory that no block was stored to is never touched, and costs nothing.
        try:
            self.memory = torch.empty((slots, self.bytes_per_block), dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            allowed = f"no more slots of {self.bytes_per_block} bytes than the host has memory for"
            raise CapacityError("slots", slots, allowed) from error
        # index_copy_ works element by element: in words of 8 bytes it is eight times as fast as in bytes.
        word = _WORDS[_word_bytes(regions)]
        widths = [region.size(1) // word.itemsize for region in regions]
        columns = self.memory.view(word).split(widths, dim=1)
        self._sides = [(region.view(word), part) for region, part in zip(regions, columns, strict=True)]
        self._buffer = torch.empty(_CHUNK_BYTES // word.itemsize, dtype=word, device="cpu")
        self._bytes = memoryview(self._buffer.view(torch.uint8).numpy())

    def copy(self, order: CopyOrder, sums: dict[int, int]) -> None:
        """`sums` has the blocks that are verified, by position: what the sum of each begins with, and when this
        returns, its sum over all bytes that were copied."""
        blocks, slots = _index(order.blocks), _index(order.slots)
        # Moves come first, so that they read their sources before the order writes anything else.
        self._move(_index(order.move_from), _index(order.move_to))
        for region, part in self._sides:
            if order.direction is Direction.STORE:
                self._copy(region, blocks, part, slots, sums)
            else:
                self._copy(part, slots, region, blocks, sums)

    def garble(self, order: CopyOrder) -> None:
        """Leave garbage wherever the order would have written."""
        to_blocks, to_slots = _destinations(order)
        self.memory.index_fill_(0, _index(to_slots), GARBAGE)
        for region, _ in self._sides:
            region.view(torch.uint8).index_fill_(0, _index(to_blocks), GARBAGE)

    def release(self) -> None:
        """Let go of all memory, the engine's too. The object is of no use after that."""
        self.memory = self.memory.new_empty((0, self.bytes_per_block))
        self._buffer = self._buffer.new_empty(0)
        self._bytes = memoryview(b"")
        self._sides = []

    def _move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        # A source may be the destination of another move. So all sources are read before anything is written, and
        # to keep what was read small whatever their number, that is done for a few columns at a time.
        if not len(sources):
            return
        at_once = max(1, len(self._buffer) // len(sources))
        for region, _ in self._sides:
            for columns in region.split(at_once, dim=1):
                columns.index_copy_(0, destinations, columns.index_select(0, sources))

    def _copy(
        self,
        source: torch.Tensor,
        from_rows: torch.Tensor,
        destination: torch.Tensor,
        to_rows: torch.Tensor,
        sums: dict[int, int],
    ) -> None:
        width = min(source.size(1), len(self._buffer))
        at_once = len(self._buffer) // width
        for read, written in zip(source.split(width, dim=1), destination.split(width, dim=1), strict=True):
            first = 0
            for some, to_some in zip(from_rows.split(at_once), to_rows.split(at_once), strict=True):
                buffer = self._buffer[: len(some) * read.size(1)].view(len(some), read.size(1))
                torch.index_select(read, 0, some, out=buffer)
                written.index_copy_(0, to_some, buffer)
                if sums:
                    self._add(sums, range(first, first + len(some)), read.size(1) * read.element_size())
                first += len(some)

    def _add(self, sums: dict[int, int], positions: range, width: int) -> None:
        """The rows of the buffer are of the blocks at these positions: each goes into the sum of its block. They
        were copied just now, so they come from a cache."""
        rows = self._bytes
        for start, position in enumerate(positions):
            if position in sums:
                row = rows[start * width : (start + 1) * width]
                sums[position] = xxh3_64_intdigest(row, sums[position])


def _check_regions(regions: Sequence[torch.Tensor]) -> None:
    if not regions:
        raise LayoutError("regions", regions, "at least one")
    for index, region in enumerate(regions):
        name = f"regions[{index}]"
        if region.device.type != "cpu":
            raise LayoutError(name, str(region.device), "memory that the host can address")
        if region.dtype != torch.uint8 or region.dim() != 2 or not region.numel():
            raise LayoutError(name, (region.dtype, tuple(region.shape)), "bytes in rows, one row for each block")
        if region.size(0) != regions[0].size(0):
            raise LayoutError(name, region.size(0), f"as many blocks as in regions[0], {regions[0].size(0)}")
        if region.stride(1) != 1 or region.stride(0) < region.size(1):
            raise LayoutError(name, tuple(region.stride()), "dense rows that do not overlap")


def _word_bytes(regions: Sequence[torch.Tensor]) -> int:
    """The largest word of which all rows begin and end on a boundary."""
    marks = [mark for each in regions for mark in (each.storage_offset(), each.stride(0), each.size(1))]
    return next(size for size in _WORDS if all(mark % size == 0 for mark in marks))


def _index(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _destinations(order: CopyOrder) -> tuple[list[BlockId], list[Slot]]:
    """The blocks and the slots that the order writes."""
    if order.direction is Direction.STORE:
        return [], order.slots
    return [*order.blocks, *order.move_to], []
