"""Checksums of blocks: whether a load brings what was stored under its key.

    store   bytes as they are read from the device    ─┐ seeded with the key
    load    bytes as they are written to the device   ─┘ the same number, or they are not that block's

The key is in the sum. So a slot that holds the right bytes of another block is found out too, as are bytes that
changed while they were on the host. What is kept is a number for each slot, on the rank that copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from forebay.copier.verify import Verify as Verify  # part of what this module offers
from forebay.ids import Key, Slot
from forebay.transfers import CopyOrder

_ONE_IN = 8


def seeds(keys: Sequence[Key]) -> list[int]:
    """A number for each key, made of all its bytes: the same for the same key, whatever others come with it."""
    return list(map(xxh3_64_intdigest, keys))


def is_sampled(seed: int) -> bool:
    """Whether this one is verified if not all are. Its seed alone decides: a store and its loads agree."""
    return seed % _ONE_IN == 0


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
        numbers = enumerate(seeds(order.keys))
        if self._verify is Verify.ALL:
            return dict(numbers)
        return {at: seed for at, seed in numbers if is_sampled(seed)}

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


def _numbers(sums: dict[int, int]) -> NDArray[np.uint64]:
    return np.fromiter(sums.values(), np.uint64, len(sums))
