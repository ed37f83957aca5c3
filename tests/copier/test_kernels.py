"""The kernels by themselves, in Triton's interpreter: what they compute needs no GPU to be seen."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from forebay.copier.tiles import Tiles

pytest.importorskip("triton")
import triton.language as tl

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
WORDS = {8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter, which is a process of its own")


@pytest.mark.skipif(INTERPRETED, reason="this is that process")
def test_in_the_interpreter() -> None:
    """Triton is interpreted, or not, from its import on. So this file is run a second time."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert "1 skipped" in run.stdout, run.stdout


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return importlib.import_module("forebay.copier.cuda.kernels")


def scrambled(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def checksum(data: bytes, word_bytes: int, seed: int) -> int:
    """By the book."""
    total = scrambled((seed + GOLDEN) & MASK)
    for position in range(len(data) // word_bytes):
        word = int.from_bytes(data[position * word_bytes : (position + 1) * word_bytes], "little")
        total += scrambled((word + (position + 1) * GOLDEN) & MASK)
    return total & MASK


class Device:
    def __init__(self, kernels: ModuleType, widths: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.kernels = kernels
        self.regions = [torch.from_numpy(rng.integers(0, 256, (6, width), dtype=np.uint8)) for width in widths]
        self.tiles = Tiles.of(
            [(region.data_ptr(), region.stride(0), region.size(1)) for region in self.regions],
            kernels.WORDS_PER_TILE,
        )
        self.sums = torch.zeros(8, dtype=torch.int64)
        self.told = torch.full((1,), -1, dtype=torch.int64)

    def block(self, block: int) -> bytes:
        return b"".join(region[block].numpy().tobytes() for region in self.regions)

    def move(self, table: torch.Tensor, staging: torch.Tensor, *, gather: bool, parts_of: int = 1 << 30) -> None:
        for part in self.tiles.parts(parts_of):
            self.kernels.move[(part.num_tiles, table.size(1))](
                table,
                table.size(1),
                0,
                torch.from_numpy(self.tiles.table),
                part.first_tile,
                # Parts behind each other, as if each had been sent on before the next came.
                staging.data_ptr() + part.offset * table.size(1),
                part.num_bytes,
                part.offset,
                WORD=WORDS[self.tiles.word_bytes],
                WORD_BYTES=self.tiles.word_bytes,
                WORDS=self.kernels.WORDS_PER_TILE,
                GATHER=gather,
                VERIFY=True,
            )

    def settle(self, table: torch.Tensor, *, seal: bool) -> int:
        self.told[0] = -1
        self.kernels.settle[(1,)](
            table, table.size(1), self.sums, self.told.data_ptr(), ROWS=4, SEAL=seal, VERIFY=True
        )
        return int(self.told[0])


def table_of(blocks: list[int], slots: list[int], seeds: list[int], wanted: list[int]) -> torch.Tensor:
    return torch.tensor([blocks, slots, seeds, wanted, [0] * len(blocks)], dtype=torch.int64)


@interpreted
@pytest.mark.parametrize("parts_of", [1 << 30, 8192])
@pytest.mark.parametrize(("widths", "word"), [([64, 9000, 24], 8), ([20, 12], 4), ([30, 12], 2), ([7], 1)])
def test_there_and_back(kernels: ModuleType, widths: list[int], word: int, parts_of: int) -> None:
    device = Device(kernels, widths)
    assert device.tiles.word_bytes == word
    before = [device.block(block) for block in range(6)]
    slots, seeds, wanted = [2, 0, 7, 3, 1], [11, -5, 1 << 40, 0, -(1 << 63)], [1, 0, 1, 1, 1]
    out = table_of([3, 1, 5, 0, 2], slots, seeds, wanted)
    staging = torch.zeros(5 * device.tiles.bytes_per_block, dtype=torch.uint8)
    device.move(out, staging, gather=True, parts_of=parts_of)
    if parts_of > device.tiles.bytes_per_block:
        assert staging.numpy().tobytes() == b"".join(before[block] for block in (3, 1, 5, 0, 2))
    assert device.settle(out, seal=True) == 0
    for block, slot, seed, want in zip([3, 1, 5, 0, 2], slots, seeds, wanted, strict=True):
        known = checksum(before[block], word, seed & MASK) if want else 0
        assert int(device.sums[slot]) & MASK == known
    back = table_of([0, 1, 2, 4, 5], slots, seeds, wanted)
    device.move(back, staging, gather=False, parts_of=parts_of)
    assert [device.block(block) for block in (0, 1, 2, 4, 5)] == [before[block] for block in (3, 1, 5, 0, 2)]
    assert device.block(3) == before[3], "a block that nobody named"
    assert device.settle(back, seal=False) == 0


@interpreted
def test_what_differs_is_counted(kernels: ModuleType) -> None:
    device = Device(kernels, [64, 24])
    staging = torch.zeros(3 * 88, dtype=torch.uint8)
    out = table_of([0, 1, 2], [0, 1, 2], [5, 6, 7], [1, 1, 1])
    device.move(out, staging, gather=True)
    device.settle(out, seal=True)
    for flipped, seeds, differ in (
        ([], [5, 6, 7], 0),
        ([9], [5, 6, 7], 1),
        ([0, 200], [5, 6, 7], 2),
        ([], [5, 6, 8], 1),
    ):
        spoiled = staging.clone()
        for place in flipped:
            spoiled[place] ^= 1
        back = table_of([3, 4, 5], [0, 1, 2], seeds, [1, 1, 1])
        device.move(back, spoiled, gather=False)
        assert device.settle(back, seal=False) == differ


@interpreted
def test_words_that_change_places_are_noticed(kernels: ModuleType) -> None:
    device = Device(kernels, [64])
    staging = torch.zeros(64, dtype=torch.uint8)
    out = table_of([0], [0], [5], [1])
    device.move(out, staging, gather=True)
    device.settle(out, seal=True)
    staging.view(torch.int64)[[0, 7]] = staging.view(torch.int64)[[7, 0]]
    back = table_of([1], [0], [5], [1])
    device.move(back, staging, gather=False)
    assert device.settle(back, seal=False) == 1
