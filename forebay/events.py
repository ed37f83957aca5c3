"""What a router is told about the host pool. The medium is in every event, so that losing a block from the host
is never read as losing it from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.ids import Key

MEDIUM = "CPU"


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one group can now be had from the host."""

    keys: Sequence[Key]
    parent: Key | None
    """The key before the first, None at the start of a prompt or where it is not known: of blocks that were about
    to be evicted, whose request is gone."""
    token_ids: Sequence[int]
    """The tokens of all the blocks; empty where they are not known."""
    tokens_per_block: int
    group: int
    start: int | None = None
    """Which block of its prompt the first is; None where it is not known."""
    extra: object = None
    medium: str = MEDIUM


@dataclass(frozen=True, slots=True)
class Removed:
    keys: Sequence[Key]
    medium: str = MEDIUM


@dataclass(frozen=True, slots=True)
class Cleared:
    medium: str = MEDIUM


Event = Stored | Removed | Cleared
