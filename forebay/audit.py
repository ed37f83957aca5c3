"""The proof behind `OffloadManager.check()`: who holds what, by its owners, compared with the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from forebay.books import Books
from forebay.errors import ensure
from forebay.ids import BlockId, Key, RequestId, Slot
from forebay.loads import Loads
from forebay.requests import RequestState
from forebay.stores import Stores
from forebay.transfers import Direction


def check(books: Books, loads: Loads, stores: Stores, requests: Mapping[RequestId, RequestState]) -> None:
    books.ledger.check()
    stores.check()
    loading = [transfer for transfer in books.ledger if transfer.direction is Direction.LOAD]
    storing = [transfer for transfer in books.ledger if transfer.direction is Direction.STORE]
    held = [state.held for state in requests.values() if state.held is not None]
    pins: Counter[Slot] = Counter()
    for owner in chain((load.order.slots for load in loading), (match.slots for match in held)):
        pins.update(owner)
    filling: dict[Key, Slot] = {}
    for store in storing:
        if store.wanted:
            filling.update(zip(store.order.keys, store.order.slots, strict=True))
    books.pool.check(pins, [slot for store in storing for slot in store.order.slots], filling)
    ensure(
        set(loads.wanted) == {load.id for load in loading if load.wanted},
        "a load is waited for that nobody wants",
    )
    for load in loading:
        if load.request_id is not None:
            ensure(load.request_id in requests, "a load for a request that is gone")
            ensure(not load.orphaned, "a load counts as left behind while its request waits")
    ensure(loads.reserving <= requests.keys(), "room is reserved for a request that is gone")
    ensure(loads.in_the_way <= requests.keys(), "a request is passed over that is gone")
    ensure(not loads.in_the_way & loads.reserving, "a request is passed over that has blocks")


def device_pins(books: Books, requests: Mapping[RequestId, RequestState]) -> Counter[BlockId]:
    pins: Counter[BlockId] = Counter()
    for transfer in books.ledger:
        pins.update(transfer.pinned_blocks)
    for state in requests.values():
        if state.held is not None:
            pins.update(state.held.blocks)
    return pins
