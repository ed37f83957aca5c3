"""What the manager remembers of a request between its first match and its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.engine import Request
from forebay.groups import KVLayout
from forebay.ids import BlockId, Key, Slot
from forebay.matching import Match
from forebay.recording import Recorded


class Hit(NamedTuple):
    """So many tokens can be had beyond those on the device. None, if `tokens` is 0."""

    tokens: int
    needs_load: bool
    """Whether the request has to wait for copies; False also where a hit needs no bytes at all."""


class NotYet(NamedTuple):
    """What this request needs is being copied just now; waiting for it beats copying it again or computing it. Or
    it has no room, and others have to come first. Go on to the next request, and ask again in the next step."""

    waited_s: float


Answer = Hit | NotYet
MISS = Hit(0, needs_load=False)


@dataclass(slots=True)
class Held:
    """A match whose slots and device blocks are pinned until the engine has allocated."""

    match: Match
    answer: Hit
    device_tokens: int
    num_tokens: int
    epoch: int
    loads_planned: int
    out_of_room: bool
    slots: list[Slot]
    blocks: list[BlockId]


@dataclass(slots=True)
class RequestState:
    request: Request
    keys: list[list[Key]]  # by group
    table: list[list[BlockId]] = field(default_factory=list)  # by group; empty until allocated
    cursors: list[int] = field(default_factory=list)  # by group: blocks before it were looked at for storing
    refused: list[int] = field(default_factory=list)  # by group: keys before it are known as not to be kept
    next_store_tokens: int = 0  # nothing new can be stored before that many tokens are confirmed
    held: Held | None = None
    bridges: bool = True  # gaps may be bridged from the device; not again after it was not admitted with that
    still_waits: Callable[[], bool] | None = None  # whether the reason of the last NotYet holds
    waiting_since: float | None = None
    waited_enough: bool = False
    computes: bool = False  # a load failed it: it is not promised anything again
    stores: bool = True
    recorded: Recorded | None = None
    asked: int = 0  # blocks of the prompt, as the ghost was told

    @classmethod
    def of(cls, request: Request, layout: KVLayout) -> RequestState:
        return cls(request, [[] for _ in layout.groups], stores=request.may_store)

    def learn_keys(self, layout: KVLayout) -> None:
        layout.extend_keys(self.keys, self.request.hashes)

    def set_table(self, table: Sequence[Sequence[BlockId]]) -> None:
        """The engine has given the request a table of its own, new or once more. Everything in it is looked at
        again: what is on the host is not stored twice, and what has left the host meanwhile is."""
        self.table = [list(blocks) for blocks in table]
        self.cursors = [0] * len(self.table)
        self.next_store_tokens = 0

    def clear_table(self) -> None:
        """The request starts over: nothing it computed before counts any more."""
        self.table = []
        self.cursors = []
