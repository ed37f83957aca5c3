"""The small types everything else is written in. They cost nothing at run time."""

from __future__ import annotations

from typing import NewType

Key = NewType("Key", bytes)
"""What a block contains: the engine's prefix hash, then the group id in four bytes. Compared exactly."""

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
    return group.to_bytes(_GROUP_BYTES, "big")


def make_key(prefix_hash: bytes, group: int) -> Key:
    return Key(prefix_hash + group_suffix(group))


def hash_of(key: Key) -> bytes:
    return key[:-_GROUP_BYTES]


def group_of(key: Key) -> int:
    return int.from_bytes(key[-_GROUP_BYTES:], "big")
