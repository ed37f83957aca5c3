"""How kernels see a block: tiles, each a run of bytes in one region, small enough for one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forebay.copier.streams import Numbers, Part

_WORD_BYTES = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Tiles:
    """`table` has for each tile: the address of its part of block 0, bytes from block to block, where in a slot it
    is in bytes, and its length in words."""

    table: Numbers
    word_bytes: int
    bytes_per_block: int

    @classmethod
    def of(cls, regions: Sequence[tuple[int, int, int]], words_per_tile: int) -> Tiles:
        """Of regions given by address, stride and width in bytes, side by side in a slot."""
        # The largest word of which everything begins and ends on a boundary.
        word = next(size for size in _WORD_BYTES if all(number % size == 0 for each in regions for number in each))
        rows: list[tuple[int, int, int, int]] = []
        start = 0
        for address, stride, width in regions:
            for begin in range(0, width, words_per_tile * word):
                length = min(words_per_tile * word, width - begin)
                rows.append((address + begin, stride, start + begin, length // word))
            start += width
        return cls(np.array(rows, dtype=np.int64), word, start)

    def parts(self, num_bytes: int) -> list[Part]:
        """All tiles in as few parts of at most so many bytes as there can be; of at least one tile each."""
        parts: list[Part] = []
        for tile, (_, _, start, length) in enumerate(self.table.tolist()):
            size = length * self.word_bytes
            if parts and parts[-1].num_bytes + size <= num_bytes:
                last = parts[-1]
                parts[-1] = last._replace(num_tiles=last.num_tiles + 1, num_bytes=last.num_bytes + size)
            else:
                parts.append(Part(tile, 1, start, size))
        return parts
