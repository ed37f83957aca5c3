"""The small types everything else is written in.

They are for the type checker. Calling one costs a Python call, so batches are cast as a whole.
"""

from __future__ import annotations

from typing import NewType

Key = NewType("Key", bytes)
"""What a block contains: the engine's prefix hash, and for any group but the first its number in four bytes after
it. Most models have one group: their keys are the engine's own hash objects. Compared exactly."""

Slot = NewType("Slot", int)
"""A place in host memory that holds one block."""

BlockId = NewType("BlockId", int)
"""A place in device memory, in the engine's own numbering."""

TransferId = NewType("TransferId", int)
Rank = NewType("Rank", int)
RequestId = NewType("RequestId", str)

_GROUP_BYTES = 4


def group_suffix(group: int) -> bytes:
    """The bytes that turn a prefix hash into the key of that group."""
    return group.to_bytes(_GROUP_BYTES, "big") if group else b""


def make_key(prefix_hash: bytes, group: int) -> Key:
    return Key(prefix_hash + group_suffix(group))
