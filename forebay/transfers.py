"""Transfers: sets of copies with one id, one state and one outcome, and the ledger that holds the live ones.

                 submit                 all ranks: done
    PLANNED ───────────────▶ SUBMITTED ─────────────────▶ DONE      published
       │                        │ │   all ranks, one failed
       │ cancel                 │ └─────────────────────▶ FAILED    nothing published
       │                        │ abandon
       │                        ▼        all ranks
       └──────────▶ DROPPED ◀── ABANDONED                           nothing published

Pins are released on reaching a terminal state and at no other time. No transfer ends while a rank has not
reported: one rank's failure must not free memory that another still reads or writes. A transfer that never
reports keeps its memory for ever, and is counted and logged once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from forebay.errors import TransitionError, ensure
from forebay.events import Stored
from forebay.ids import BlockId, Key, Rank, RequestId, Slot, TransferId


class Direction(Enum):
    STORE = "store"  # device → host
    LOAD = "load"  # host → device


class State(Enum):
    PLANNED = auto()  # pins held, workers not told
    SUBMITTED = auto()  # bytes may be moving: memory must not be reused
    ABANDONED = auto()  # still moving, result no longer wanted (reset, abort, deadline)
    DONE = auto()  # terminal: published
    FAILED = auto()  # terminal: nothing published
    DROPPED = auto()  # terminal: cancelled, or abandoned and ended


NEXT: dict[State, frozenset[State]] = {
    State.PLANNED: frozenset({State.SUBMITTED, State.DROPPED}),
    State.SUBMITTED: frozenset({State.DONE, State.FAILED, State.ABANDONED}),
    State.ABANDONED: frozenset({State.DROPPED}),
    State.DONE: frozenset(),
    State.FAILED: frozenset(),
    State.DROPPED: frozenset(),
}


class Outcome(Enum):
    """What one rank says about its part of a transfer."""

    DONE = "done"
    FAILED = "failed"
    MISMATCH = "mismatch"  # copied, but the bytes are not those that were stored under the key: a failure too

    @property
    def failed(self) -> bool:
        return self is not Outcome.DONE


class Report(NamedTuple):
    transfer_id: TransferId
    rank: Rank
    outcome: Outcome


class CopyOrder(NamedTuple):
    """What a worker is told: plain data that travels between processes.

    Columns, not a list of pairs: copiers turn them into address arrays without touching each block. Every rank
    copies its own part of every block. `slots[i]` belongs to `blocks[i]`; `move_from[i]` is copied to
    `move_to[i]` within the device, and only loads have such moves. `keys[i]` is what `slots[i]` holds (loads) or
    will hold (stores), for copiers that verify what they copy; an order without keys is not verified.
    """

    id: TransferId
    direction: Direction
    blocks: list[BlockId]
    slots: list[Slot]
    move_from: list[BlockId]
    move_to: list[BlockId]
    keys: Sequence[Key] = ()

    def detached(self) -> CopyOrder:
        """The same order in lists of its own. In an engine of one process the lists are the manager's."""
        return CopyOrder(
            self.id,
            self.direction,
            list(self.blocks),
            list(self.slots),
            list(self.move_from),
            list(self.move_to),
            list(self.keys),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # To ranks in other processes orders go pickled, by the engine's scheduling thread. Keys go as one piece of
        # bytes: a third of what thousands of them would cost.
        lengths, times = list(map(len, self.keys)), 1
        if len(set(lengths)) == 1:
            lengths, times = lengths[:1], len(lengths)
        return _unpickled, (self[:-1], b"".join(self.keys), lengths, times)

    @property
    def num_copies(self) -> int:
        return len(self.blocks) + len(self.move_to)


def _unpickled(columns: tuple[Any, ...], joined: bytes, lengths: list[int], times: int) -> CopyOrder:
    ends = accumulate(lengths * times, initial=0)
    return CopyOrder._make((*columns, [joined[start:end] for start, end in pairwise(ends)]))


class Brings(NamedTuple):
    """The blocks [start, stop) of a chain of keys."""

    keys: Sequence[Key]
    start: int
    stop: int

    def overlaps(self, other: Brings) -> bool:
        """Whether a block is in both. Keys of a chain are equal up to where two prompts part, so the first
        position they have in common tells."""
        first = max(self.start, other.start)
        return first < min(self.stop, other.stop) and self.keys[first] == other.keys[first]


@dataclass(slots=True)
class Transfer:
    order: CopyOrder
    waiting_on: set[Rank]  # ranks that have not reported
    request_id: RequestId | None = None  # loads: who waits for it; None once nobody does
    must_end: bool = False  # loads: not given up for being late; the request would compute into the same blocks
    orphaned: bool = False  # loads: the request has left; the blocks it would have had are pinned
    brings: list[Brings] = field(default_factory=list)  # loads: by group, what will be on the device
    keeps_place: bool = False  # lazy stores: the blocks go back to their place in the eviction order
    events: list[Stored] = field(default_factory=list)  # stores: what to announce when done
    state: State = State.PLANNED
    failed: bool = False
    submitted_at: float | None = None
    overdue: bool = False  # counted and logged already

    @property
    def id(self) -> TransferId:
        return self.order.id

    @property
    def direction(self) -> Direction:
        return self.order.direction

    @property
    def pinned_blocks(self) -> list[BlockId]:
        """Device blocks that are pinned on behalf of this transfer."""
        order = self.order
        if self.direction is Direction.STORE:
            return order.blocks
        if self.orphaned:
            return [*order.move_from, *order.blocks, *order.move_to]
        return order.move_from

    @property
    def is_live(self) -> bool:
        return bool(NEXT[self.state])

    @property
    def wanted(self) -> bool:
        return self.state in (State.PLANNED, State.SUBMITTED)

    def move_to(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise TransitionError(f"transfer {self.id}: {self.state.name} cannot become {state.name}")
        if state is not State.DROPPED or self.state is State.ABANDONED:
            ensure(
                state in (State.SUBMITTED, State.ABANDONED) or not self.waiting_on,
                f"transfer {self.id}: {state.name} while ranks {sorted(self.waiting_on)} are copying",
            )
        self.state = state


class Late(Enum):
    """Why a report could not be used. Each is counted; none of them is a crash."""

    UNKNOWN_TRANSFER = "unknown transfer"  # an id that was never given out
    ENDED_TRANSFER = "ended transfer"  # every rank had reported already
    UNKNOWN_RANK = "unknown rank"
    REPEATED = "repeated report"  # this rank had reported already


class Ledger:
    """All live transfers by id. Other views of them are derived."""

    def __init__(self, ranks: int) -> None:
        self._ranks = frozenset(map(Rank, range(ranks)))
        self._live: dict[TransferId, Transfer] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._live.values())

    def next_id(self) -> TransferId:
        self._next_id += 1
        return TransferId(self._next_id)

    def plan(self, order: CopyOrder, request_id: RequestId | None = None) -> Transfer:
        transfer = Transfer(order, set(self._ranks), request_id)
        self._live[order.id] = transfer
        return transfer

    def of_request(self, request_id: RequestId) -> list[Transfer]:
        """Live loads this request waits for: none or one, unless an adapter asked for a second."""
        return [t for t in self._live.values() if t.request_id == request_id]

    def submit(self, transfer: Transfer, now: float) -> CopyOrder:
        transfer.move_to(State.SUBMITTED)
        transfer.submitted_at = now
        return transfer.order

    def cancel(self, transfer: Transfer) -> None:
        """Nobody was told yet: it ends at once."""
        transfer.move_to(State.DROPPED)
        del self._live[transfer.id]

    def abandon(self, transfer: Transfer) -> None:
        transfer.move_to(State.ABANDONED)

    def report(self, report: Report) -> Transfer | Late | None:
        """Take one rank's word. Returns the transfer if it ended with this, None if other ranks are still
        copying, or why the report was of no use."""
        transfer = self._live.get(report.transfer_id)
        if transfer is None or transfer.state is State.PLANNED:
            given_out = 0 < report.transfer_id <= self._next_id and transfer is None
            return Late.ENDED_TRANSFER if given_out else Late.UNKNOWN_TRANSFER
        if report.rank not in transfer.waiting_on:
            return Late.REPEATED if report.rank in self._ranks else Late.UNKNOWN_RANK
        transfer.waiting_on.remove(report.rank)
        transfer.failed |= report.outcome.failed
        if transfer.waiting_on:
            return None
        if transfer.state is State.ABANDONED:
            transfer.move_to(State.DROPPED)
        else:
            transfer.move_to(State.FAILED if transfer.failed else State.DONE)
        del self._live[transfer.id]
        return transfer

    def older_than(self, submitted_before: float, direction: Direction) -> list[Transfer]:
        """Submitted transfers that have been on the way since before that time."""
        # Ids, and so the dict, are in the order of planning, but planned and submitted times need not agree.
        return [
            transfer
            for transfer in self._live.values()
            if transfer.submitted_at is not None
            and transfer.submitted_at < submitted_before
            and transfer.direction is direction
        ]

    def check(self) -> None:
        for transfer_id, transfer in self._live.items():
            ensure(transfer.id == transfer_id, "a transfer is filed under another id")
            ensure(transfer.is_live, f"transfer {transfer_id} ended but is still in the ledger")
            ensure(bool(transfer.waiting_on), f"transfer {transfer_id} waits for nobody")
            order = transfer.order
            ensure(len(order.blocks) == len(order.slots) == len(order.keys), "uneven columns")
            ensure(len(order.move_from) == len(order.move_to), "uneven moves")
            started = transfer.submitted_at is not None
            ensure(started is (transfer.state is not State.PLANNED), "state and clock disagree")
