"""Kernels between blocks and staging memory, and the checksums they compute on the way.

The checksum of a row is a sum over its words, mod 2**64, of each word scrambled together with its position: any
order of adding gives the same, a word that changes or moves gives another. What it is compared with begins with
the scrambled seed of the row's key, so bytes stored under another key differ too.

A table has five columns of `rows` numbers each: block, slot, seed, whether a checksum is wanted, the sum so far.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 5
WORDS_PER_TILE = 1024
ROWS_AT_ONCE = 1024

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _scrambled(word):
    word = (word ^ (word >> 30)) * _FIRST
    word = (word ^ (word >> 27)) * _SECOND
    return word ^ (word >> 31)


@triton.jit(do_not_specialize=["rows", "first", "first_tile", "staging", "pitch", "offset"])
def move(
    table,
    rows,
    first,
    tiles,
    first_tile,
    staging,
    pitch,
    offset,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    GATHER: tl.constexpr,
    VERIFY: tl.constexpr,
):
    """One tile of one row: blocks → staging, or back. `offset` is where in a block the staged part begins."""
    tile = tiles + (tl.program_id(0) + first_tile) * 4
    nth = tl.program_id(1).to(tl.int64)
    row = table + first + nth
    base, stride, start, length = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    blocks = (base + tl.load(row) * stride).to(tl.pointer_type(WORD))
    staged = (staging + nth * pitch + start - offset).to(tl.pointer_type(WORD))
    i = tl.arange(0, WORDS)
    inside = i < length
    if GATHER:
        words = tl.load(blocks + i, mask=inside, other=0)
        tl.store(staged + i, words, mask=inside)
    else:
        words = tl.load(staged + i, mask=inside, other=0)
        tl.store(blocks + i, words, mask=inside)
    if VERIFY:
        if tl.load(row + 3 * rows) != 0:
            position = (start // WORD_BYTES + i + 1).to(tl.uint64)
            scrambled = _scrambled(words.to(tl.uint64) + position * _GOLDEN)
            part = tl.sum(tl.where(inside, scrambled, 0).to(tl.int64), axis=0)
            tl.atomic_add(row + 4 * rows, part)


@triton.jit(do_not_specialize=["rows", "told"])
def settle(table, rows, sums, told, ROWS: tl.constexpr, SEAL: tl.constexpr, VERIFY: tl.constexpr):
    """The last of an order. SEAL: what was summed up becomes the checksum of each slot. Otherwise it is compared
    with that. `told` is in the host's memory: how many differ."""
    differ = tl.zeros((), tl.int64)
    if VERIFY:
        for begin in range(0, rows, ROWS):
            row = begin + tl.arange(0, ROWS)
            wanted = tl.load(table + 3 * rows + row, mask=row < rows, other=0) != 0
            slot = tl.load(table + rows + row, mask=wanted, other=0)
            seed = tl.load(table + 2 * rows + row, mask=wanted, other=0)
            total = tl.load(table + 4 * rows + row, mask=wanted, other=0)
            total += _scrambled(seed.to(tl.uint64) + _GOLDEN).to(tl.int64)
            if SEAL:
                tl.store(sums + slot, total, mask=wanted)
            else:
                known = tl.load(sums + slot, mask=wanted, other=0)
                differ += tl.sum((wanted & (known != total)).to(tl.int64), axis=0)
    tl.store(told.to(tl.pointer_type(tl.int64)), differ)
