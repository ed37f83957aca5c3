"""Checksums of blocks: whether a load brings what was stored under its key.

    store   bytes as they are read from the device    ─┐ seeded with the key
    load    bytes as they are written to the device   ─┘ the same number, or they are not that block's

The key is in the sum. So a slot that holds the right bytes of another block is found out too, as are bytes that
changed while they were on the host. What is kept is a number for each slot, on the rank that copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from forebay.copier.verify import Verify as Verify  # part of what this module offers
from forebay.ids import Key, Slot
from forebay.transfers import CopyOrder

Seeds: TypeAlias = NDArray[np.uint64]

_ONE_IN = 8
_WORD_BYTES = 4


def seeds(keys: Sequence[Key]) -> Seeds:
    """A number for each key, made of all its bytes: the same for the same key, whatever others come with it."""
    lengths = set(map(len, keys))
    if len(lengths) == 1:
        return _seeds_of_equal_length(keys, lengths.pop())
    numbers = np.empty(len(keys), np.uint64)
    of_each = np.fromiter(map(len, keys), np.intp, len(keys))
    for length in lengths:  # the keys of a model with several groups have two
        at = np.flatnonzero(of_each == length)
        numbers[at] = _seeds_of_equal_length([keys[i] for i in at.tolist()], length)
    return numbers


def sampled(numbers: Seeds) -> NDArray[np.bool_]:
    """Which of these are verified if not all are. Their seeds alone decide: a store and its loads agree."""
    return numbers % np.uint64(_ONE_IN) == 0


def _seeds_of_equal_length(keys: Sequence[Key], length: int) -> Seeds:
    # Every word of a key has an odd factor of its own: no two keys that differ in one word have the same sum.
    words = -(-length // _WORD_BYTES)
    padding = bytes(words * _WORD_BYTES - length)
    joined = padding.join([*keys, Key(b"")]) if padding else b"".join(keys)
    rows = np.frombuffer(joined, "<u4").reshape(len(keys), words)
    factors = _factors(words + 1)
    return _mixed((rows * factors[1:]).sum(axis=1, dtype=np.uint64) + factors[0] * np.uint64([length]))


@cache
def _factors(count: int) -> Seeds:
    """The first so many of an endless row of odd numbers that look random (SplitMix64)."""
    return _mixed(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)) | np.uint64(1)


def _mixed(numbers: Seeds) -> Seeds:
    """Every bit of a number depends on all of them (the end of MurmurHash3)."""
    numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(0xFF51AFD7ED558CCD)
    numbers = (numbers ^ numbers >> np.uint64(33)) * np.uint64(0xC4CEB9FE1A85EC53)
    return numbers ^ numbers >> np.uint64(33)


class Checksums:
    """What one rank has stored in each of its slots, as checksums. All calls come from one thread at a time."""

    def __init__(self, slots: int, verify: Verify) -> None:
        self._verify = verify
        self._sums = np.zeros(slots, np.uint64)
        self._known = np.zeros(slots, np.bool_)

    def begin(self, order: CopyOrder) -> dict[int, int]:
        """By position, the blocks of this order that are verified, and what the sum of each begins with."""
        if self._verify is Verify.OFF or not order.keys:
            return {}
        numbers = seeds(order.keys)
        if self._verify is Verify.ALL:
            return dict(enumerate(numbers.tolist()))
        at = np.flatnonzero(sampled(numbers))
        return dict(zip(at.tolist(), numbers[at].tolist(), strict=True))

    def keep(self, order: CopyOrder, sums: dict[int, int]) -> None:
        """These blocks were stored."""
        at = self._slots(order, sums)
        self._sums[at] = _numbers(sums)
        self._known[at] = True

    def wrong_slots(self, order: CopyOrder, sums: dict[int, int]) -> list[Slot]:
        """Of the blocks that were loaded: where other bytes were found than were stored under the key, or where
        nothing was ever stored."""
        at = self._slots(order, sums)
        wrong: list[Slot] = at[(self._sums[at] != _numbers(sums)) | ~self._known[at]].tolist()
        return wrong

    def _slots(self, order: CopyOrder, sums: dict[int, int]) -> NDArray[np.intp]:
        return np.array([order.slots[i] for i in sums], np.intp)


def _numbers(sums: dict[int, int]) -> Seeds:
    return np.fromiter(sums.values(), np.uint64, len(sums))
