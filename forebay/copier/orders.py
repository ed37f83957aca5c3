"""Orders, as copiers look at them before they touch memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forebay.copier.streams import Numbers
from forebay.transfers import CopyOrder, Direction


def ids(numbers: Sequence[int]) -> Numbers:
    return np.array(numbers, dtype=np.int64)


def fault_of(order: CopyOrder, num_blocks: int, slots: int) -> str | None:
    """Why the order must not be carried out where there are so many blocks and slots, if so."""
    uneven = len(order.blocks) != len(order.slots) or len(order.move_from) != len(order.move_to)
    if uneven or len(order.keys) not in (0, len(order.slots)):
        return "its columns are of unequal length"
    if order.direction is Direction.STORE and order.move_to:
        return "a store has no moves"
    columns = [
        ("block", ids(order.blocks), num_blocks),
        ("slot", ids(order.slots), slots),
        ("block", ids(order.move_from), num_blocks),
        ("block", ids(order.move_to), num_blocks),
    ]
    for what, numbers, end in columns:
        wrong = numbers[(numbers < 0) | (numbers >= end)]
        if len(wrong):
            return f"there is no {what} {wrong[0]}, only 0 to {end - 1}"
    blocks, slot_ids, _, move_to = (numbers for _, numbers, _ in columns)
    written = slot_ids if order.direction is Direction.STORE else np.concatenate((blocks, move_to))
    if len(np.unique(written)) < len(written):
        return "it names a destination twice"
    return None
