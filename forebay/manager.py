"""OffloadManager: the only place that decides. An engine adapter calls it; it never calls back.

    engine                          manager                                   every rank
    a request wants to start   →    match()        what can be had, pinned
    blocks were allocated      →    allocated()    plans the load
    a step is planned          →    step()         plans the stores   →       submit(orders)
    a step has ended           →    report()       ends transfers     ←       poll() -> reports
    a request ends             →    finish()       flushes it

All calls come from the engine's scheduling thread. No call blocks, and none fails because of what a worker did.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from forebay import audit
from forebay.books import Books
from forebay.config import Mode, OffloadConfig
from forebay.ends import Ends, Outcomes
from forebay.engine import DevicePool, Progress, Request
from forebay.errors import CapacityError, ConfigError
from forebay.events import Event
from forebay.ghost import Ghost, Predicted
from forebay.groups import KVLayout
from forebay.ids import BlockId, RequestId
from forebay.journal import Journal
from forebay.loads import Loads, RefusedLoadError
from forebay.policies import policy_class
from forebay.pool import HostPool
from forebay.recording import Recorder
from forebay.requests import MISS, Answer, RequestState
from forebay.stats import Stats
from forebay.stores import Stores
from forebay.transfers import (
    CopyOrder,
    Direction,
    Late,
    Ledger,
    Outcome,
    Report,
    State,
    Transfer,
)

_PUT_OFF = 32
"""Hits of so many requests, mostly, that the policy may hear of later: those of a wave."""


class Step(NamedTuple):
    """What every rank has to copy, loads before stores."""

    loads: list[CopyOrder]
    stores: list[CopyOrder]
    waiting: list[RequestId]
    """Who waits for each of the loads."""
    stored_for: list[RequestId]
    """Whose blocks were planned to be stored as they ran. Stores of what goes next look at blocks and know no
    requests."""


class OffloadManager:
    def __init__(
        self,
        layout: KVLayout,
        config: OffloadConfig,
        device: DevicePool,
        *,
        ranks: int = 1,
        slots: int | None = None,
        ready: int | None = None,
        max_batched_tokens: int = 8192,
        max_requests: int = 1,
        engine_reserves: bool = False,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        predicts: bool = True,
    ) -> None:
        """`slots` if the adapter has agreed on a number with its ranks, else what capacity_bytes holds. `ready` if
        not all of them can be used yet: see grow().
        `max_batched_tokens` and `max_requests` are what the engine computes in a step at most; they set how far
        lazy stores look. `engine_reserves` if the engine itself lets a load in only where all that were let in
        before it still have the blocks to run in, and lets those run before it looks at others; else the manager
        sees to that. `recorder` if requests are recorded; the adapter closes it. `predicts`: whether to keep a
        ghost of the pool, for `predicted`."""
        if ranks < 1:
            raise ConfigError("ranks", ranks, "at least 1")
        if max_batched_tokens < 1:
            raise ConfigError("max_batched_tokens", max_batched_tokens, "at least 1")
        if max_requests < 1:
            raise ConfigError("max_requests", max_requests, "at least 1")
        if slots is None:
            slots = config.capacity_bytes // layout.bytes_per_block
            if slots < 1:
                needed = f"at least one block ({layout.bytes_per_block} bytes)"
                raise CapacityError("capacity_bytes", config.capacity_bytes, needed)
        self._books = Books(
            layout=layout,
            config=config,
            pool=HostPool(slots, policy_class(config.eviction_policy)(slots), ready),
            device=device,
            ledger=Ledger(ranks),
            journal=Journal(layout.bytes_per_block, clock, events_on=events),
            clock=clock,
            max_batched_tokens=max_batched_tokens,
        )
        self._requests: dict[RequestId, RequestState] = {}
        reach = layout.lazy_reach_blocks(max_batched_tokens, max_requests)
        self._stores = Stores(self._books, reach, self._requests)
        self._loads = Loads(self._books, self._stores, engine_reserves)
        self._ends = Ends(self._books, self._loads, self._stores, self._requests)
        self._planned_loads: list[Transfer] = []
        self._draining = False
        self._hits_are_due = False  # for the policy to hear of: a step was planned since the last admission
        self._recorder = recorder
        # Eager stores put on the host what is on the device too. Lazy ones mostly put there what no longer is; of
        # what is on the device, about half is on the host as well, because it was loaded.
        beside = device.num_blocks / 2 if config.mode is Mode.LAZY else 0
        self._ghost = Ghost(layout, slots, beside) if predicts else None

    @property
    def pool(self) -> HostPool:
        return self._books.pool

    @property
    def stats(self) -> Stats:
        return self._books.journal.stats

    @property
    def predicted(self) -> Predicted | None:
        """What would have been found with more or less host memory: None if that is not kept track of."""
        return self._ghost.predicted if self._ghost is not None else None

    # --- requests ----------------------------------------------------------------------------------

    def match(self, request: Request, device_tokens: int) -> Answer:
        """How many tokens beyond the `device_tokens` that the engine has itself this request can have.

        What is found stays pinned until allocated(), another match() or finish(). May be called any number of
        times; asking again without a change costs microseconds.
        """
        if self._draining:
            return MISS
        return self._loads.match(self._state_of(request), device_tokens)

    def allocated(
        self,
        request: Request,
        table: Sequence[Sequence[BlockId]],
        device_tokens: int,
        loaded_tokens: int,
        *,
        must_end: bool = False,
    ) -> bool:
        """The engine admitted a request: its block table by group, the tokens it has itself and how many of the
        tokens offered it accepts. Returns whether it has to wait for outcomes; then it must not run before.

        `must_end` is for engines that compute what was not loaded into the same blocks: the load is then waited
        for, however late it is, because until it ends it may write there.

        Engines call this for every request, also without an offer, and again when a load has ended.
        """
        books = self._books
        state = self._state_of(request)
        if request.id in self._ends.to_tell or books.ledger.of_request(request.id):
            return True  # called again while it waits
        if not state.table:
            if device_tokens == 0:
                state.stores = request.may_store  # nothing of what it computed before a reset is left
            self._count_admission(state, device_tokens, loaded_tokens)
        self._stores.ahead.admitted(table)
        self._hits_are_due = False
        state.set_table(table)
        state.waiting_since, state.waited_enough = None, False
        self._loads.has_moved(state)
        if not loaded_tokens:
            self._loads.let_go(state)
            self._loads.end_reservation(request.id)
            return False
        promised = state.held is not None and state.held.answer.needs_load
        try:
            transfer = self._loads.claim(state, state.table, device_tokens, loaded_tokens)
        except RefusedLoadError as refusal:
            books.journal.refused(refusal)
            self._stores.ahead.may_lose(*state.table)
            state.clear_table()
            self._ends.will_tell(request.id, loaded=False)
            return True
        if transfer is None:
            if promised:  # of what was accepted nothing has to be copied, but the engine waits for an outcome
                self._ends.will_tell(request.id, loaded=True)
            else:
                self._loads.end_reservation(request.id)
            return promised
        transfer.must_end = must_end
        self._planned_loads.append(transfer)
        return True

    def finish(
        self,
        request_id: RequestId,
        confirmed_tokens: int,
        table: Sequence[Sequence[BlockId]] | None = None,
    ) -> bool:
        """The request ended, in whatever way, and the engine is about to free its blocks, which it may do at
        once: what is still to be copied is pinned. `table` if the engine has a newer one than it told.

        Returns whether it was waiting for a load. No outcome will come for it; an engine that holds on to its
        blocks until one does need not: the pins protect them.
        """
        state = self._requests.pop(request_id, None)
        if state is None:
            return False
        if state.recorded is not None and self._recorder is not None:
            self._recorder.ended(state.recorded, state.request.num_tokens)
        waited = self._ends.leave(state)
        if not waited and not self._draining:  # else nothing in its blocks is what their keys say, or nobody asks
            if table is not None and state.table:
                state.table = [list(blocks) for blocks in table]
            self._stores.flush(state, confirmed_tokens)
            if self._ghost is not None and state.asked and state.stores:
                self._ghost.ended(state.keys, state.asked)
        else:
            self._stores.ahead.may_lose(*state.table)
        if self._ghost is not None and not self._requests:
            self._ghost.catch_up()
        return waited

    def preempt(self, request_id: RequestId) -> None:
        """The engine takes the request's blocks away and will start it again, with a new table. If the request
        waits for a load, call this before they are freed: the load goes on writing them."""
        state = self._requests.get(request_id)
        if state is not None:
            self._ends.leave(state)
            self._loads.was_preempted(state)
            self._stores.ahead.may_lose(*state.table)
            if not state.stores:
                self._stores.refuse(state)
            state.clear_table()

    def _state_of(self, request: Request) -> RequestState:
        state = self._requests.get(request.id)
        if state is None:
            state = self._requests[request.id] = RequestState.of(request, self._books.layout)
            if self._recorder is not None:
                state.recorded = self._recorder.arrived(request.num_tokens, request.hashes)
        return state

    # --- steps -------------------------------------------------------------------------------------

    def step(self, progress: Iterable[Progress] = ()) -> Step:
        """Plan this step's stores and hand out every transfer that the ranks have not been told of yet."""
        stored_for: list[RequestId] = []
        idle = True
        if self._hits_are_due:  # nobody is admitted in this step, whose first token would wait for that
            self._books.pool.settle()
        if not self._draining:
            eager = self._books.config.mode is Mode.EAGER or self._stores.ahead.is_pressed
            for request_id, confirmed_tokens, new_blocks in progress:
                idle = False
                state = self._requests.get(request_id)
                if state is None:
                    continue
                self._loads.end_reservation(request_id)
                if new_blocks is not None and state.table:
                    for blocks, added in zip(state.table, new_blocks, strict=True):
                        if added:
                            blocks.extend(added)
                            self._stores.ahead.taken(added)
                if not state.stores:
                    self._stores.refuse(state)
                elif eager and self._stores.advance(state, confirmed_tokens):
                    stored_for.append(request_id)
            self._loads.note_stop(idle=idle)
            if self._books.config.mode is Mode.LAZY:
                self._stores.walk_evictions()
        self._loads.end_pass()
        self._hits_are_due = True
        self._books.note_removed()
        now = self._books.clock()
        submit = self._books.ledger.submit
        loads = [transfer for transfer in self._planned_loads if transfer.state is State.PLANNED]
        self._planned_loads = []
        return Step(
            [submit(transfer, now) for transfer in loads],
            [submit(transfer, now) for transfer in self._stores.take_planned()],
            [transfer.request_id for transfer in loads if transfer.request_id is not None],
            stored_for,
        )

    def report(self, reports: Iterable[Report]) -> Outcomes:
        """Take what the ranks said since the last call, in any order; call it every step, also with nothing."""
        outcomes = Outcomes([], [])
        self._books.pool.settle(leave=_PUT_OFF)  # or where every step admits somebody, it would be all at once
        self._ends.tell(outcomes)
        for report in reports:
            ended = self._books.ledger.report(report)
            if isinstance(ended, Late):
                self._books.journal.ignored(report, ended)
                continue
            if report.outcome is Outcome.MISMATCH:
                self._books.journal.mismatch(report)
            if ended is not None:
                self._ends.settle(ended, outcomes)
        self._ends.enforce_deadlines(outcomes)
        return outcomes

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request: copies are on their way. One that has
        passed its deadline is not waited for."""
        return bool(self._ends.to_tell) or not all(transfer.overdue for transfer in self._books.ledger)

    def has_pending_stores(self) -> bool:
        """Whether blocks are on their way to the host, or planned to be."""
        return any(transfer.direction is Direction.STORE for transfer in self._books.ledger)

    @property
    def is_settled(self) -> bool:
        """Whether another step would change nothing, unless the engine has news: no copy is on its way or planned,
        and everything near eviction is safe. For planners, which need not take steps in which nothing happens."""
        return not len(self._books.ledger) and not self._ends.to_tell and self._stores.ahead.is_settled

    def skip_steps(self, count: int) -> None:
        """So many steps pass without news, while everything is settled: the same as that many calls of step()."""
        self._stores.ahead.skip_walks(count)

    def drain(self) -> bool:
        """Plan nothing new from now on. True once nothing is on its way; keep stepping until then."""
        self._draining = True
        for state in self._requests.values():
            self._loads.let_go(state)
        return not self.has_pending_work()

    def reset(self) -> None:
        """Forget every key, in one call, whatever is on its way. Copies that run go on into memory that stays
        theirs until they end; their results are dropped. Requests that wait for a load are failed when it ends.
        Requests that run now store nothing more: what they compute rests on what is being forgotten."""
        books = self._books
        for state in self._requests.values():
            if state.held is not None and state.held.answer.needs_load:
                self._loads.let_go(state)
            if state.table:
                state.stores = False
                self._stores.refuse(state)
        for transfer in list(books.ledger):
            if transfer.wanted:
                self._ends.give_up(transfer)
        books.pool.reset()
        if self._ghost is not None:
            self._ghost.clear()
        books.journal.cleared()

    def grow(self, ready: int) -> None:
        """The first so many slots can be used by now, on every rank: never fewer than before, and at most all.
        What was not stored for want of room is tried again in the next step."""
        before = self.pool.ready
        self.pool.grow(ready)
        if before < ready:
            self._stores.room_has_grown(self._requests.values())

    def take_events(self) -> list[Event]:
        self._books.note_removed()
        return self._books.journal.take_events()

    def _count_admission(self, state: RequestState, device_tokens: int, loaded_tokens: int) -> None:
        books = self._books
        state.learn_keys(books.layout)
        stats = books.journal.stats
        stats.lookups += 1
        stats.miss_tokens += max(0, state.request.num_tokens - device_tokens - loaded_tokens)
        for group, keys in zip(books.layout.groups, state.keys, strict=True):
            hit_blocks = (device_tokens + loaded_tokens) // group.span_tokens
            stats.miss_blocks += max(0, len(keys) - hit_blocks)
            # Also what the engine found on its own device: the hottest prefix must not be the first to leave the
            # host because nobody ever needs to load it.
            books.pool.touch(keys[:hit_blocks])
        if self._ghost is not None and state.stores:
            state.asked = self._ghost.asked(state.keys, state.request.num_tokens, device_tokens)

    # --- proof -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every pin has a live owner and all books agree. For tests and when idle:
        it looks at everything."""
        audit.check(self._books, self._loads, self._stores, self._requests)
        if self._ghost is not None:
            self._ghost.check()

    def device_pins(self) -> Counter[BlockId]:
        """Pins that the device pool should hold for Forebay now. For adapters' tests."""
        return audit.device_pins(self._books, self._requests)
