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
from itertools import chain
from typing import NamedTuple

from forebay.books import Books
from forebay.config import Mode, OffloadConfig
from forebay.engine import DevicePool, Progress, Request
from forebay.errors import CapacityError, ConfigError, ensure
from forebay.events import Event
from forebay.groups import KVLayout
from forebay.ids import BlockId, Key, RequestId, Slot
from forebay.journal import Journal
from forebay.loads import Loads, RefusedLoadError
from forebay.policies import policy_class
from forebay.pool import HostPool
from forebay.requests import MISS, Answer, RequestState
from forebay.stats import Stats
from forebay.stores import Stores
from forebay.transfers import (
    CopyOrder,
    Direction,
    Late,
    Ledger,
    Report,
    State,
    Transfer,
)


class Step(NamedTuple):
    """What every rank has to copy, loads before stores."""

    loads: list[CopyOrder]
    stores: list[CopyOrder]


class Outcomes(NamedTuple):
    """Requests whose load has ended, each named once."""

    loaded: list[RequestId]
    """Their bytes have arrived on every rank."""
    failed: list[RequestId]
    """They have to compute what was promised, in blocks that the engine allocates anew."""


class OffloadManager:
    def __init__(
        self,
        layout: KVLayout,
        config: OffloadConfig,
        device: DevicePool,
        *,
        ranks: int = 1,
        slots: int | None = None,
        max_batched_tokens: int = 8192,
        events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`slots` if the adapter has agreed on a number with its ranks, else what capacity_bytes holds.
        `max_batched_tokens` is what the engine computes in a step at most; it sets how far lazy stores look."""
        if ranks < 1:
            raise ConfigError("ranks", ranks, "at least 1")
        if max_batched_tokens < 1:
            raise ConfigError("max_batched_tokens", max_batched_tokens, "at least 1")
        if slots is None:
            slots = config.capacity_bytes // layout.bytes_per_block
            if slots < 1:
                needed = f"at least one block ({layout.bytes_per_block} bytes)"
                raise CapacityError("capacity_bytes", config.capacity_bytes, needed)
        self._books = Books(
            layout=layout,
            config=config,
            pool=HostPool(slots, policy_class(config.eviction_policy)(slots)),
            device=device,
            ledger=Ledger(ranks),
            journal=Journal(layout.bytes_per_block, events_on=events),
            clock=clock,
            max_batched_tokens=max_batched_tokens,
        )
        self._loads = Loads(self._books)
        self._stores = Stores(self._books, layout.lazy_target_blocks(max_batched_tokens))
        self._requests: dict[RequestId, RequestState] = {}
        self._planned_loads: list[Transfer] = []
        self._refused: list[RequestId] = []  # loads that could not be planned, to be reported as failed
        self._draining = False

    @property
    def pool(self) -> HostPool:
        return self._books.pool

    @property
    def stats(self) -> Stats:
        return self._books.journal.stats

    # --- requests ----------------------------------------------------------------------------------

    def match(self, request: Request, device_tokens: int) -> Answer:
        """How many tokens beyond the `device_tokens` that the engine has itself this request can have.

        What is found stays pinned until allocated(), another match() or finish(). May be called any number of
        times; asking again without a change costs microseconds.
        """
        if self._draining:
            return MISS
        state = self._requests.get(request.id)
        if state is None:
            state = self._requests[request.id] = RequestState.of(request, self._books.layout)
        return self._loads.match(state, device_tokens)

    def allocated(
        self,
        request: Request,
        table: Sequence[Sequence[BlockId]],
        device_tokens: int,
        loaded_tokens: int,
    ) -> bool:
        """The engine admitted a request: its block table by group, the tokens it has itself and how many of the
        tokens offered it accepts. Returns whether it has to wait for outcomes; then it must not run before.

        Engines call this for every request, also without an offer, and again when a load has ended.
        """
        books = self._books
        state = self._requests.get(request.id)
        if state is None:
            state = self._requests[request.id] = RequestState.of(request, books.layout)
        if any(t.request_id == request.id for t in books.ledger):
            # Called again while its own load is on the way: the table is what matters.
            state.set_table(table)
            return True
        if not state.table:
            self._count_admission(state, device_tokens, loaded_tokens)
        state.set_table(table)
        state.waiting_since, state.waited_enough = None, False
        if not loaded_tokens:
            self._loads.let_go(state)
            self._loads.runs(request.id)
            return False
        try:
            transfer = self._loads.claim(state, state.table, device_tokens, loaded_tokens)
        except RefusedLoadError as refusal:
            books.journal.stats.loads_refused += 1
            books.journal.warn_once("refused", f"a load was refused and is recomputed: {refusal}")
            self._refused.append(request.id)
            return True
        if transfer is None:
            return False
        self._planned_loads.append(transfer)
        return True

    def finish(
        self,
        request_id: RequestId,
        confirmed_tokens: int,
        table: Sequence[Sequence[BlockId]] | None = None,
    ) -> None:
        """The request ended, in whatever way, and the engine is about to free its blocks, which it may do at
        once: what is still to be copied is pinned. `table` if the engine has a newer one than it told."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return
        self._leave(state)
        if table is not None and state.table:
            state.table = [list(blocks) for blocks in table]
        if not self._draining:
            self._stores.flush(state, confirmed_tokens)

    def preempt(self, request_id: RequestId) -> None:
        """The engine is about to take the request's blocks away and will start it again, with a new table."""
        state = self._requests.get(request_id)
        if state is not None:
            self._leave(state)
            state.clear_table()

    # --- steps -------------------------------------------------------------------------------------

    def step(self, progress: Iterable[Progress] = ()) -> Step:
        """Plan this step's stores and hand out every transfer that the ranks have not been told of yet."""
        if not self._draining:
            for request_id, confirmed_tokens, new_blocks in progress:
                state = self._requests.get(request_id)
                if state is None:
                    continue
                self._loads.runs(request_id)
                if new_blocks is not None and state.table:
                    for blocks, added in zip(state.table, new_blocks, strict=True):
                        blocks.extend(added)
                if self._books.config.mode is Mode.EAGER:
                    self._stores.advance(state, confirmed_tokens)
            if self._books.config.mode is Mode.LAZY:
                self._stores.walk_evictions()
        self._loads.end_pass()
        self._note_removed()
        now = self._books.clock()
        submit = self._books.ledger.submit
        loads, self._planned_loads = self._planned_loads, []
        return Step(
            [submit(transfer, now) for transfer in loads if transfer.state is State.PLANNED],
            [submit(transfer, now) for transfer in self._stores.take_planned()],
        )

    def report(self, reports: Iterable[Report]) -> Outcomes:
        """Take what the ranks said since the last call, in any order; call it every step, also with nothing."""
        outcomes = Outcomes([], [])
        for request_id in self._refused:
            self._recompute(request_id, outcomes)
        self._refused = []
        for report in reports:
            ended = self._books.ledger.report(report)
            if isinstance(ended, Late):
                self._books.journal.ignored(report, ended)
            elif ended is not None:
                self._settle(ended, outcomes)
        self._enforce_deadlines(outcomes)
        return outcomes

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request: copies are on their way."""
        return bool(len(self._books.ledger) or self._refused)

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
            self._loads.let_go(state)
            if state.table:
                state.stores = False
        for transfer in list(books.ledger):
            if transfer.wanted:
                self._give_up(transfer)
        books.pool.reset()
        books.journal.cleared()

    def take_events(self) -> list[Event]:
        self._note_removed()
        return self._books.journal.take_events()

    def _note_removed(self) -> None:
        self._books.journal.removed(self._books.pool.take_removed())

    # --- the ends of transfers ------------------------------------------------------------------------

    def _settle(self, transfer: Transfer, outcomes: Outcomes) -> None:
        """A transfer has ended: publish it or not, tell who waits, and let go of both sides. The only place
        where the pins of a transfer are released."""
        books, order = self._books, transfer.order
        done = transfer.state is State.DONE
        if transfer.direction is Direction.STORE:
            if done:
                books.pool.commit(transfer.keys, order.slots)
                self._note_removed()  # before a key that left is announced again
                books.journal.stored(transfer.events)
            elif transfer.state is State.FAILED:
                books.pool.forget(transfer.keys, order.slots)
        else:
            if transfer.state is State.FAILED:
                # Before the next lookup, so that nobody is promised the same bytes again.
                books.pool.forget(transfer.keys, order.slots)
            if transfer.state is not State.DROPPED:
                self._loads.stop_waiting_for(transfer)
            if transfer.request_id is not None:
                if done:
                    outcomes.loaded.append(transfer.request_id)
                else:
                    self._recompute(transfer.request_id, outcomes)
        self._release(transfer)
        books.journal.ended(transfer, books.clock() - (transfer.submitted_at or 0.0))

    def _release(self, transfer: Transfer) -> None:
        books, order = self._books, transfer.order
        if transfer.direction is Direction.STORE:
            books.pool.release(order.slots)
        elif order.slots:
            books.pool.unpin(order.slots)
        if transfer.keeps_place:
            books.device.unpin(order.blocks[::-1], in_place=True)
        elif pinned := transfer.pinned_blocks:
            books.device.unpin(pinned)

    def _give_up(self, transfer: Transfer) -> None:
        """Nobody wants the result any more. If the ranks know of it, its memory stays its own until they end."""
        books = self._books
        if transfer.direction is Direction.STORE:
            books.pool.forget(transfer.keys, transfer.order.slots)
        else:
            self._loads.stop_waiting_for(transfer)
        if transfer.state is State.PLANNED:
            books.ledger.cancel(transfer)
            self._release(transfer)
            if transfer.request_id is not None:
                self._refused.append(transfer.request_id)
        else:
            books.ledger.abandon(transfer)
            books.journal.stats.abandoned_transfers += 1

    def _leave(self, state: RequestState) -> None:
        """The request gives up what it holds and what it waits for."""
        self._loads.let_go(state)
        request_id = state.request.id
        self._loads.runs(request_id)
        for transfer in self._books.ledger.of_request(request_id):
            self._orphan(transfer)
        if request_id in self._refused:
            self._refused.remove(request_id)

    def _orphan(self, transfer: Transfer) -> None:
        """The request that waits for this load leaves, and the engine is about to free its blocks: what the ranks
        know of goes on writing them, so they are pinned until it ends."""
        transfer.request_id = None
        if transfer.state is not State.PLANNED:
            transfer.orphaned = True
            self._books.device.pin(transfer.order.blocks + transfer.order.move_to)
        if transfer.wanted:
            self._give_up(transfer)

    def _recompute(self, request_id: RequestId, outcomes: Outcomes) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            # One failure is enough: a second offer could fail again, without end.
            state.computes = True
            state.clear_table()
            self._loads.runs(request_id)
        self._books.journal.stats.recomputes += 1
        outcomes.failed.append(request_id)

    def _enforce_deadlines(self, outcomes: Outcomes) -> None:
        books = self._books
        if not len(books.ledger):
            return
        now = books.clock()
        late_loads = books.ledger.older_than(now - books.config.load_deadline_s, Direction.LOAD)
        late_stores = books.ledger.older_than(now - books.config.store_overdue_s, Direction.STORE)
        for transfer in late_loads + late_stores:
            if not transfer.overdue:
                transfer.overdue = True
                books.journal.overdue(transfer)
        for transfer in late_loads:
            request_id = transfer.request_id
            if request_id is not None:
                self._orphan(transfer)
                self._recompute(request_id, outcomes)

    def _count_admission(self, state: RequestState, device_tokens: int, loaded: int) -> None:
        books = self._books
        state.learn_keys(books.layout)
        books.journal.stats.lookups += 1
        missed = max(0, state.request.num_tokens - device_tokens - loaded)
        books.journal.stats.miss_tokens += missed
        for group, keys in zip(books.layout.groups, state.keys, strict=True):
            hit_blocks = (device_tokens + loaded) // group.span_tokens
            books.journal.stats.miss_blocks += len(keys) - min(hit_blocks, len(keys))
            # Also what the engine found on its own device: the hottest prefix must not be the first to leave the
            # host because nobody ever needs to load it.
            books.pool.touch(keys[:hit_blocks])

    # --- proof -----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless every pin has a live owner and all books agree. For tests and when idle:
        it looks at everything."""
        books = self._books
        books.ledger.check()
        loads = [transfer for transfer in books.ledger if transfer.direction is Direction.LOAD]
        stores = [transfer for transfer in books.ledger if transfer.direction is Direction.STORE]
        held = [state.held for state in self._requests.values() if state.held is not None]
        pins: Counter[Slot] = Counter()
        for owner in chain((load.order.slots for load in loads), (match.slots for match in held)):
            pins.update(owner)
        filling: dict[Key, Slot] = {}
        for store in stores:
            if store.wanted:
                filling.update(zip(store.keys, store.order.slots, strict=True))
        books.pool.check(pins, [slot for store in stores for slot in store.order.slots], filling)
        wanted = {load.id for load in loads if load.wanted}
        ensure(set(self._loads.wanted) == wanted, "a load is waited for that nobody wants")
        for transfer in books.ledger:
            if transfer.request_id is not None:
                ensure(transfer.request_id in self._requests, "a load for a request that is gone")

    def device_pins(self) -> Counter[BlockId]:
        """Pins that the device pool should hold for Forebay now. For adapters' tests."""
        pins: Counter[BlockId] = Counter()
        for transfer in self._books.ledger:
            pins.update(transfer.pinned_blocks)
        for state in self._requests.values():
            if state.held is not None:
                pins.update(state.held.blocks)
        return pins
