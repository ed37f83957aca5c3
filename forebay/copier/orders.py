"""Orders, as copiers look at them before they touch memory.

With Python's own lists: for more than 500 numbers numpy gives the interpreter away, and a copier beside a busy
thread gets it back 5 ms later. Each time.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.transfers import CopyOrder, Direction


def fault_of(order: CopyOrder, num_blocks: int, slots: int) -> str | None:
    """Why the order must not be carried out where there are so many blocks and slots, if so."""
    uneven = len(order.blocks) != len(order.slots) or len(order.move_from) != len(order.move_to)
    if uneven or len(order.keys) not in (0, len(order.slots)):
        return "its columns are of unequal length"
    if order.direction is Direction.STORE and order.move_to:
        return "a store has no moves"
    columns: list[tuple[str, Sequence[int], int]] = [
        ("block", order.blocks, num_blocks),
        ("slot", order.slots, slots),
        ("block", order.move_from, num_blocks),
        ("block", order.move_to, num_blocks),
    ]
    for what, numbers, end in columns:
        if numbers and not 0 <= min(numbers) <= max(numbers) < end:
            wrong = next(number for number in numbers if not 0 <= number < end)
            return f"there is no {what} {wrong}, only 0 to {end - 1}"
    written = order.slots if order.direction is Direction.STORE else order.blocks + order.move_to
    if len(set(written)) < len(written):
        return "it names a destination twice"
    return None
