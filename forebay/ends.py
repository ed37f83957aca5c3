"""How transfers end: published, failed, given up or late, and who is told."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from forebay.books import Books
from forebay.ids import RequestId
from forebay.loads import Loads
from forebay.requests import RequestState
from forebay.stores import Stores
from forebay.transfers import Direction, State, Transfer


class Outcomes(NamedTuple):
    """Requests whose load has ended, each named once."""

    loaded: list[RequestId]
    """Their bytes have arrived on every rank."""
    failed: list[RequestId]
    """They have to compute what was promised, in blocks that the engine allocates anew."""


class Ends:
    def __init__(
        self, books: Books, loads: Loads, stores: Stores, requests: dict[RequestId, RequestState]
    ) -> None:
        self._books = books
        self._loads = loads
        self._stores = stores
        self._requests = requests  # the manager's own: who is there to be told
        self._to_tell: dict[RequestId, bool] = {}  # who waits for no copy but for an outcome: loaded, or failed

    @property
    def to_tell(self) -> Collection[RequestId]:
        return self._to_tell.keys()

    def will_tell(self, request_id: RequestId, *, loaded: bool) -> None:
        """There is nothing to copy for this request, but it waits for an outcome."""
        self._to_tell[request_id] = loaded

    def tell(self, outcomes: Outcomes) -> None:
        to_tell, self._to_tell = self._to_tell, {}
        for request_id, loaded in to_tell.items():
            if loaded:
                outcomes.loaded.append(request_id)
            else:
                self.recompute(request_id, outcomes)

    def settle(self, transfer: Transfer, outcomes: Outcomes) -> None:
        """A transfer has ended: publish it or not, tell who waits, and let go of both sides."""
        books, order = self._books, transfer.order
        done = transfer.state is State.DONE
        if transfer.direction is Direction.STORE:
            if done:
                books.pool.commit(order.keys, order.slots)
                books.note_removed()  # before a key that left is announced again
                books.journal.stored(transfer.events)
            elif transfer.state is State.FAILED:
                books.pool.forget(order.keys, order.slots)
        else:
            if transfer.failed:
                # Before the next lookup, so that nobody is promised the same bytes again.
                books.pool.forget(order.keys, order.slots)
            if transfer.state is not State.DROPPED:
                self._loads.stop_waiting_for(transfer)
            if transfer.request_id is not None:
                if done:
                    outcomes.loaded.append(transfer.request_id)
                else:
                    self.recompute(transfer.request_id, outcomes)
        self._release(transfer)
        books.journal.ended(transfer, books.clock() - (transfer.submitted_at or 0.0))

    def _release(self, transfer: Transfer) -> None:
        """The one place where the pins of a transfer go. It is in a terminal state."""
        books, order = self._books, transfer.order
        if transfer.direction is Direction.STORE:
            books.pool.release(order.slots)
        elif order.slots:
            books.pool.unpin(order.slots)
        if transfer.keeps_place:
            in_place = books.device.unpin(order.blocks[::-1], in_place=True)
            self._stores.ahead.returned(transfer, in_place)
        elif pinned := transfer.pinned_blocks:
            books.device.unpin(pinned)
            if transfer.direction is Direction.LOAD:
                self._stores.ahead.may_lose(pinned)

    def give_up(self, transfer: Transfer) -> None:
        """Nobody wants the result any more. If the ranks know of it, its memory stays its own until they end."""
        books = self._books
        if transfer.direction is Direction.STORE:
            books.pool.forget(transfer.order.keys, transfer.order.slots)
        else:
            self._loads.stop_waiting_for(transfer)
        if transfer.state is State.PLANNED:
            books.ledger.cancel(transfer)
            self._release(transfer)
            if transfer.request_id is not None:
                self.will_tell(transfer.request_id, loaded=False)
        else:
            books.ledger.abandon(transfer)
            books.journal.stats.abandoned_transfers += 1

    def leave(self, state: RequestState) -> bool:
        """The request gives up what it holds and what it waits for. Returns whether it waited for anything."""
        self._loads.let_go(state)
        self._loads.has_moved(state)
        request_id = state.request.id
        self._loads.end_reservation(request_id)
        loads = self._books.ledger.of_request(request_id)
        for transfer in loads:
            self._orphan(transfer)
        return self._to_tell.pop(request_id, None) is not None or bool(loads)

    def _orphan(self, transfer: Transfer) -> None:
        """The request that waits for this load leaves, and the engine is about to free its blocks: what the ranks
        know of goes on writing them, so they are pinned until it ends."""
        transfer.request_id = None
        if transfer.state is not State.PLANNED:
            transfer.orphaned = True
            self._books.device.pin(transfer.order.blocks + transfer.order.move_to)
        if transfer.wanted:
            self.give_up(transfer)

    def recompute(self, request_id: RequestId, outcomes: Outcomes) -> None:
        state = self._requests.get(request_id)
        if state is not None:
            # One failure is enough: a second offer could fail again, without end.
            state.computes = True
            self._stores.ahead.may_lose(*state.table)
            state.clear_table()
            # Its reservation stays until the engine asks again: some free the blocks of a failed load only then.
        self._books.journal.stats.recomputes += 1
        outcomes.failed.append(request_id)

    def enforce_deadlines(self, outcomes: Outcomes) -> None:
        books = self._books
        if not len(books.ledger):
            return
        now = books.clock()
        late_loads = books.ledger.older_than(now - books.config.load_deadline_s, Direction.LOAD)
        late_stores = books.ledger.older_than(now - books.config.store_deadline_s, Direction.STORE)
        for transfer in late_loads + late_stores:
            if not transfer.overdue:
                transfer.overdue = True
                books.journal.overdue(transfer)
                if transfer.direction is Direction.STORE and transfer.wanted:
                    self.give_up(transfer)  # nobody should wait for it; it may be stored again
        for transfer in late_loads:
            request_id = transfer.request_id
            if request_id is not None and not transfer.must_end:
                self._orphan(transfer)
                self.recompute(request_id, outcomes)
