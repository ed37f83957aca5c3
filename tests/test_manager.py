"""Corners of the manager that were wrong once, or that nothing else would notice if they broke."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any
from unittest import mock

import pytest

from forebay import ChunkedLocal, FullAttention, Hit, Key, KVLayout, Mode, NotYet, Outcome, Progress, SlidingWindow
from forebay.ahead import Ahead
from forebay.ids import BlockId, RequestId
from forebay.manager import OffloadManager
from forebay.testing import TinyRequest
from tests.builders import FULL, Desk, keys_of, lose_device, make_engine, prompt, served, tokens_of
from tests.watched import WatchedEngine

HYBRID = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=8)), 4, 16)
WINDOW = KVLayout((SlidingWindow(4, window_tokens=10),), 4, 16)


def on_host_only(tokens: int, **settings: object) -> Desk:
    desk = Desk(**settings)  # type: ignore[arg-type]
    desk.store(prompt(tokens))
    desk.device.reset()
    return desk


# --- asking again -----------------------------------------------------------------------------------------


def test_an_answer_changes_when_one_of_its_keys_is_forgotten() -> None:
    desk = on_host_only(32)
    request = desk.request(prompt(33))
    assert tokens_of(desk.manager.match(request, 0)) == 32
    key = keys_of(desk, request)[5]
    desk.manager.pool.forget([key], [desk.manager.pool.index()[key]])
    assert tokens_of(desk.manager.match(request, 0)) == 20


def test_an_answer_changes_when_somebody_else_begins_to_load_the_same() -> None:
    desk = on_host_only(32)
    first, second = desk.request(prompt(33)), desk.request(prompt(33))
    for request in (first, second):
        assert tokens_of(desk.manager.match(request, 0)) == 32
    desk.manager.allocated(first, desk.blocks_for(33), 0, 32)
    assert isinstance(desk.manager.match(second, 0), NotYet)
    desk.check()


def test_an_answer_changes_when_what_it_ended_at_is_on_its_way() -> None:
    desk = on_host_only(16)
    waiting = desk.request(prompt(33))
    assert tokens_of(desk.manager.match(waiting, 0)) == 16
    longer = desk.request(prompt(32))
    table = desk.compute(longer)
    desk.manager.allocated(longer, table, 16, 0)
    [store] = desk.step(Progress(longer.id, 32)).stores
    desk.end(longer, table)
    desk.device.reset()
    assert isinstance(desk.manager.match(waiting, 0), NotYet)
    desk.report(store)
    assert tokens_of(desk.manager.match(waiting, 0)) == 32


def test_an_answer_changes_when_the_block_a_drafter_needs_after_it_is_gone() -> None:
    desk = on_host_only(16, layout=KVLayout((FullAttention(4, drafter=True),), 4, 16), slots=4)
    request = desk.request(prompt(24))
    assert tokens_of(desk.manager.match(request, 0)) == 12
    other = desk.request(prompt(4, 1))
    table = desk.compute(other)
    desk.manager.allocated(other, table, 0, 0)
    desk.report(*desk.step(Progress(other.id, 4)).stores)  # takes the slot of the one block that is not pinned
    assert tokens_of(desk.manager.match(request, 0)) == 8


def test_not_yet_costs_no_search_while_its_reason_lasts() -> None:
    desk = on_host_only(400, slots=100, num_blocks=400)
    first, second = desk.request(prompt(401)), desk.request(prompt(401))
    desk.manager.match(first, 0)
    desk.manager.allocated(first, desk.blocks_for(401), 0, 400)
    [load] = desk.step().loads
    assert isinstance(desk.manager.match(second, 0), NotYet)
    searches: list[int] = []
    find_run = desk.manager.pool.find_run
    desk.manager.pool.find_run = lambda *args: (searches.append(1), find_run(*args))[1]  # type: ignore[method-assign]
    for _ in range(100):
        assert isinstance(desk.manager.match(second, 0), NotYet)
    assert searches == []
    desk.report(load)
    assert tokens_of(desk.manager.match(second, 0)) == 400


def test_waiting_begins_anew_after_an_admission() -> None:
    desk = on_host_only(32, wait_deadline_s=1.0)
    first, second = desk.request(prompt(33)), desk.request(prompt(33))
    desk.manager.match(first, 0)
    desk.manager.allocated(first, desk.blocks_for(33), 0, 32)
    desk.step()
    assert isinstance(desk.manager.match(second, 0), NotYet)
    desk.clock.advance(1.0)
    assert tokens_of(desk.manager.match(second, 0)) == 32
    desk.manager.allocated(second, desk.blocks_for(33), 0, 0)
    desk.manager.preempt(second.id)
    assert isinstance(desk.manager.match(second, 0), NotYet)


# --- bridging ---------------------------------------------------------------------------------------------


def test_a_request_is_not_starved_by_blocks_that_a_bridge_holds_for_it() -> None:
    engine = make_engine(num_blocks=11, slots=64)
    served(engine, prompt(36))
    request = engine.submit(prompt(37), 1)
    keys: list[list[Key]] = [[]]
    engine.layout.extend_keys(keys, request.hashes)
    pool, chain = engine.manager.pool, keys[0]
    engine.device.uncache(engine.device.find_run(chain, 5, 6)[0])  # the device has 0-4 and 6-8
    others = [chain[i] for i in (0, 1, 2, 3, 4, 6, 7, 8)]
    pool.forget(others, [pool.index()[key] for key in others])  # the host has only 5
    engine.run(max_steps=50)
    assert request.generated == 1


def gap_in_the_middle() -> tuple[Desk, TinyRequest]:
    desk = Desk()
    whole = desk.store(prompt(32))
    chain = keys_of(desk, whole)
    pool = desk.manager.pool
    pool.forget(chain[4:], [pool.index()[key] for key in chain[4:]])
    for block in desk.device.find_run(chain, 0, 4):
        desk.device.uncache(block)
    return desk, desk.request(prompt(33))  # blocks 0-3 on the host, 4-7 on the device


def test_a_match_that_was_not_followed_by_an_allocation_gives_device_blocks_back() -> None:
    desk, request = gap_in_the_middle()
    assert tokens_of(desk.manager.match(request, 0)) == 32
    assert len(desk.device.pins) == 4
    desk.step()
    assert not desk.device.pins
    assert tokens_of(desk.manager.match(request, 0)) == 16, "and does without the next time"


def test_no_bridge_is_offered_that_would_leave_too_few_blocks_for_the_request() -> None:
    desk, request = gap_in_the_middle()
    assert desk.device.take(desk.device.num_free - 17)  # it needs 9, and as many for the bridge at most
    assert tokens_of(desk.manager.match(request, 0)) == 16
    assert not desk.device.pins


def test_a_part_of_a_bridged_offer_can_be_accepted() -> None:
    desk, request = gap_in_the_middle()
    assert tokens_of(desk.manager.match(request, 0)) == 32
    taken = desk.device.take(desk.device.num_free - 8)  # the engine is short of blocks by now
    table = desk.blocks_for(24)
    assert taken
    desk.manager.allocated(request, table, 0, 24)
    [load] = desk.step().loads
    assert (len(load.blocks), len(load.move_to)) == (4, 2)
    desk.report(load)
    assert not desk.device.pins


# --- promises and refusals --------------------------------------------------------------------------------


def test_who_was_told_to_wait_gets_an_outcome_also_if_nothing_has_to_be_copied() -> None:
    desk = Desk(KVLayout((ChunkedLocal(4, chunk_tokens=8),), 4, 16))
    desk.store(prompt(20))
    desk.device.reset()
    request = desk.request(prompt(21))
    assert desk.manager.match(request, 0) == Hit(20, needs_load=True)
    assert desk.manager.allocated(request, desk.blocks_for(21), 0, 16), "a chunk ends at 16"
    assert desk.manager.has_pending_work()
    assert desk.step().loads == []
    assert desk.report().loaded == [request.id]


def test_a_hit_that_needs_no_bytes_survives_a_reset() -> None:
    desk = Desk(KVLayout((ChunkedLocal(4, chunk_tokens=8),), 4, 16))
    request = desk.request(prompt(20))
    assert desk.manager.match(request, 0) == Hit(16, needs_load=False)
    desk.manager.reset()
    assert not desk.manager.allocated(request, desk.blocks_for(20), 0, 16)
    assert desk.report().failed == []


def test_a_refused_request_is_failed_once_and_stores_nothing_of_what_it_did_not_get() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    table = desk.blocks_for(16)
    for _ in range(2):
        assert desk.manager.allocated(request, table, 0, 12), "it was not offered anything"
    assert desk.manager.allocated(request, table, 12, 0)
    assert desk.step(Progress(request.id, 12)).stores == []
    assert desk.report().failed == [request.id]
    assert desk.report().failed == []


def test_a_refused_request_that_ends_before_it_is_told_leaves_nothing() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    table = desk.blocks_for(16)
    desk.manager.allocated(request, table, 0, 12)
    assert desk.manager.finish(request.id, 12, table), "it was waiting"
    assert desk.step().stores == []
    assert desk.report() == ([], [])


def test_finish_says_whether_the_request_was_waiting() -> None:
    desk = on_host_only(16)
    request = desk.request(prompt(17))
    desk.manager.match(request, 0)
    desk.manager.allocated(request, desk.blocks_for(17), 0, 16)
    [load] = desk.step().loads
    assert desk.manager.finish(request.id, 16)
    assert desk.report(load) == ([], [])
    running = desk.request(prompt(16))
    desk.manager.allocated(running, desk.compute(running), 0, 0)
    assert not desk.manager.finish(running.id, 16)
    assert not desk.manager.finish(running.id, 16), "nobody there any more"


def test_a_request_that_was_never_admitted_has_nothing_to_store() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    desk.manager.match(request, 0)
    table = desk.blocks_for(16)
    assert desk.step(Progress(request.id, 16, table)).stores == []
    desk.manager.finish(request.id, 16, table)
    assert desk.step().stores == []


def test_a_miss_given_for_want_of_room_is_not_kept_when_there_is_room() -> None:
    desk = Desk(num_blocks=21, wait_deadline_s=1.0, max_batched_tokens=16)
    for family in range(2):
        desk.store(prompt(32, family))
    desk.device.reset()
    first, second = (desk.request([*prompt(32, family), *prompt(20, 5)]) for family in range(2))
    assert tokens_of(desk.manager.match(first, 0)) == 32
    table = desk.blocks_for(32)
    desk.manager.allocated(first, table, 0, 32)
    [load] = desk.step().loads
    assert isinstance(desk.manager.match(second, 0), NotYet)
    desk.clock.advance(1.0)
    assert tokens_of(desk.manager.match(second, 0)) == 0, "it may compute rather than wait longer"
    desk.report(load)
    desk.end(first, table)
    assert tokens_of(desk.manager.match(second, 0)) == 32


def test_where_the_engine_reserves_room_itself_nobody_waits_for_it() -> None:
    desk = Desk(num_blocks=21, max_batched_tokens=16, engine_reserves=True)
    for family in range(2):
        desk.store(prompt(32, family))
    desk.device.reset()
    first, second = (desk.request([*prompt(32, family), *prompt(20, 5)]) for family in range(2))
    assert tokens_of(desk.manager.match(first, 0)) == 32
    desk.manager.allocated(first, desk.blocks_for(32), 0, 32)
    desk.step()
    assert tokens_of(desk.manager.match(second, 0)) == 32


def test_a_load_that_the_device_has_no_room_for_does_not_make_the_engine_ask_for_the_next() -> None:
    """vLLM goes on to the next request where one is told to wait, and stops where it finds no room."""
    desk, second = _first_loads(engine_reserves=True)
    others = desk.blocks_for(24)  # which leaves 6 of 20 blocks where 8 are to be loaded
    for _ in range(3):
        assert tokens_of(desk.manager.match(second, 0)) == 32
        desk.step()
    assert desk.manager.stats.not_yet_answers == 0
    desk.device.free(others[0])
    assert isinstance(desk.manager.match(second, 0), NotYet), "with room, it waits for the load that runs"


def test_an_engine_that_does_not_reserve_room_is_told_to_wait_for_it() -> None:
    """Up to 0.30 vLLM would stop at it, and never get to the first, which waits behind it with its blocks."""
    desk, second = _first_loads(engine_reserves=False)
    desk.blocks_for(24)
    assert isinstance(desk.manager.match(second, 0), NotYet)


def test_where_the_engine_stopped_while_nothing_ran_it_is_told_to_go_on() -> None:
    """Behind that request may stand one that was loaded, and holds the blocks that it lacks."""
    desk, _ = _first_loads(engine_reserves=False)
    others = desk.blocks_for(16)
    new = desk.request(prompt(60, 8))
    assert tokens_of(desk.manager.match(new, 0)) == 0
    desk.step(Progress(RequestId("another"), 1))
    assert tokens_of(desk.manager.match(new, 0)) == 0, "others run: the engine keeps its order"
    desk.step()
    for _ in range(3):
        desk.clock.advance(100.0)
        assert isinstance(desk.manager.match(new, 0), NotYet)
        desk.step()
    desk.device.free(others[0])
    assert tokens_of(desk.manager.match(new, 0)) == 0, "it may have room now"
    desk.step()
    assert isinstance(desk.manager.match(new, 0), NotYet)
    desk.manager.finish(RequestId("d2"), 0)  # the first, which loads
    assert tokens_of(desk.manager.match(new, 0)) == 0, "nobody waits behind it"


def test_where_the_engine_reserves_room_it_is_not_told_to_go_on() -> None:
    desk, second = _first_loads(engine_reserves=True)
    desk.blocks_for(24)
    for _ in range(3):
        assert tokens_of(desk.manager.match(second, 0)) == 32
        desk.step()


def test_one_that_waited_long_enough_is_passed_over_also_while_others_run() -> None:
    """It stands before what was loaded meanwhile."""
    desk, second = _first_loads(engine_reserves=False)
    assert isinstance(desk.manager.match(second, 0), NotYet)
    desk.clock.advance(100.0)
    assert tokens_of(desk.manager.match(second, 0)) == 0, "it may compute rather than wait longer"
    desk.step(Progress(RequestId("another"), 1))
    assert isinstance(desk.manager.match(second, 0), NotYet), "the engine had no room for it"


@pytest.mark.parametrize("passed_over", [True, False])
def test_no_load_begins_while_one_is_passed_over(passed_over: bool) -> None:
    """Or there would always be one more to wait for."""
    desk = Desk(num_blocks=61, max_batched_tokens=16)
    for family in range(2):
        desk.store(prompt(32, family))
    desk.device.reset()
    first, second = (desk.request([*prompt(32, family), *prompt(4, 5)]) for family in range(2))
    desk.manager.match(first, 0)
    desk.manager.allocated(first, desk.blocks_for(32), 0, 32)
    large = desk.request(prompt(500, 8))
    if passed_over:
        desk.manager.match(large, 0)
    desk.step()
    assert isinstance(desk.manager.match(second, 0), NotYet if passed_over else Hit)


def test_a_load_that_was_refused_holds_blocks_until_the_engine_asks_again() -> None:
    desk = Desk(num_blocks=21)
    refused, large = desk.request(prompt(20)), desk.request(prompt(70, 8))
    desk.manager.allocated(refused, desk.blocks_for(16), 0, 16)
    desk.manager.match(large, 0)
    desk.step()
    assert desk.report().failed == [refused.id]
    assert isinstance(desk.manager.match(large, 0), NotYet)
    assert tokens_of(desk.manager.match(refused, 0)) == 0
    assert tokens_of(desk.manager.match(large, 0)) == 0


def _first_loads(*, engine_reserves: bool) -> tuple[Desk, TinyRequest]:
    """One request loads; another has the same beginning."""
    desk = Desk(num_blocks=21, max_batched_tokens=16, engine_reserves=engine_reserves)
    desk.store(prompt(32))
    desk.device.reset()
    first, second = (desk.request([*prompt(32), *prompt(20, family)]) for family in (5, 6))
    assert tokens_of(desk.manager.match(first, 0)) == 32
    desk.manager.allocated(first, desk.blocks_for(32), 0, 32)
    desk.step()
    return desk, second


def test_a_load_that_finds_room_at_last_takes_no_block_that_lazy_mode_has_not_stored() -> None:
    """What it was told when there was no room does not count any more."""
    desk = Desk(num_blocks=61, max_batched_tokens=16, mode=Mode.LAZY, slots=200, engine_reserves=True)
    kept = desk.request(prompt(120))
    table = desk.compute(kept)
    desk.manager.allocated(kept, table, 0, 0)
    desk.step(Progress(kept.id, 120))
    others = desk.blocks_for(4 * desk.device.num_free)
    desk.end(kept, table)
    desk.report(*desk.step().stores)  # next to be evicted, all of it
    desk.device.free(others[0])
    desk.device.reset()
    runs = desk.request(prompt(160, 3))
    table = desk.compute(runs)
    desk.manager.allocated(runs, table, 0, 0)
    for _ in range(2):
        desk.report(*desk.step(Progress(runs.id, 160)).stores)
    waits = desk.request([*prompt(120), *prompt(4, 9)])
    assert tokens_of(desk.manager.match(waits, 0)) == 120
    desk.report(*desk.step(Progress(runs.id, 160)).stores)
    desk.end(runs, table)
    for _ in range(10):
        if isinstance(desk.manager.match(waits, 0), Hit) and desk.device.num_free >= 30:
            break
        desk.report(*desk.step().stores)
    desk.manager.allocated(waits, desk.blocks_for(120), 0, 120)
    step = desk.step()
    desk.report(*step.loads, *step.stores)
    keys: list[list[Key]] = [[]]
    desk.layout.extend_keys(keys, runs.hashes)
    assert all(key in desk.manager.pool or desk.device.find_run([key], 0, 1) for key in keys[0])


# --- what comes late ----------------------------------------------------------------------------------------


def test_a_store_that_is_overdue_is_not_waited_for_and_can_be_made_again() -> None:
    desk = Desk(store_deadline_s=1.0, wait_deadline_s=100.0)
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [lost] = desk.step(Progress(request.id, 16)).stores
    desk.end(request, table)
    desk.device.reset()
    again = desk.request(prompt(17))
    assert isinstance(desk.manager.match(again, 0), NotYet)
    desk.clock.advance(1.5)
    desk.report()
    assert tokens_of(desk.manager.match(again, 0)) == 0
    assert not desk.manager.has_pending_work(), "an engine need not go on stepping for it"
    assert desk.manager.drain()
    desk.manager._draining = False
    desk.store(prompt(16))
    assert desk.manager.pool.cached == 4
    assert desk.manager.pool.filling == 4, "its memory stays its own"
    desk.report(lost)
    assert desk.manager.pool.filling == 0


def test_an_abandoned_load_that_fails_still_forgets_its_keys() -> None:
    desk = on_host_only(16)
    request = desk.request(prompt(17))
    desk.manager.match(request, 0)
    desk.manager.allocated(request, desk.blocks_for(17), 0, 16)
    [load] = desk.step().loads
    desk.manager.finish(request.id, 0)
    desk.report(load, failed=True)
    assert desk.manager.pool.cached == 0


# --- stores -------------------------------------------------------------------------------------------------


def test_running_requests_that_do_not_fit_on_the_host_do_not_push_each_other_out_in_turns() -> None:
    desk = Desk(slots=60, num_blocks=600)
    requests = [desk.request(prompt(200, family)) for family in range(4)]  # 50 blocks each, 60 slots
    for request in requests:
        desk.manager.allocated(request, desk.compute(request), 0, 0)
    for confirmed in range(0, 204, 4):
        desk.report(*desk.step(*(Progress(request.id, confirmed) for request in requests)).stores)
    assert desk.manager.stats.stored_blocks <= 4 * 50, "no block is stored twice while its request runs"


def test_a_request_that_starts_over_is_looked_at_from_its_beginning() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    first = desk.compute(request)
    desk.manager.allocated(request, first, 0, 0)
    desk.report(*desk.step(Progress(request.id, 16)).stores, failed=True)
    desk.manager.preempt(request.id)
    desk.device.free(reversed(first[0]))
    desk.device.reset()
    second = desk.compute(request)
    desk.manager.allocated(request, second, 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    assert store.blocks == second[0]


def test_after_a_reset_a_request_that_starts_over_on_old_blocks_stores_nothing() -> None:
    engine = make_engine()
    running = engine.submit(prompt(24), 12)
    for _ in range(4):
        engine.step()
    engine.manager.reset()
    engine._preempt(running)
    engine.run()
    assert running.cached_tokens > 0, "the device still had its blocks"
    assert engine.manager.pool.cached == 0
    fresh = make_engine()
    running = fresh.submit(prompt(24), 12)
    for _ in range(4):
        fresh.step()
    fresh.manager.reset()
    fresh._preempt(running)
    lose_device(fresh)
    fresh.run()
    assert fresh.manager.pool.cached > 0, "computed anew, it may be kept"


def test_a_block_that_a_window_dropped_is_stored_from_where_the_device_still_has_it() -> None:
    layout = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=6)), 4, 16)
    desk = Desk(layout)
    request = desk.request(prompt(16))
    table = desk.compute(request)
    dropped = table[1][0]
    desk.manager.allocated(request, [table[0], [desk.device.null_block, *table[1][1:]]], 0, 0)
    desk.device.free([dropped])
    [store] = desk.step(Progress(request.id, 16)).stores
    assert dropped in store.blocks


@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_lazy_stores_come_to_an_end_where_the_host_is_small(slots: int) -> None:
    """With fewer slots than blocks near eviction these used to push each other out, in every step, for ever."""
    engine = make_engine(mode=Mode.LAZY, slots=slots, num_blocks=40)
    for family in range(12):
        engine.submit(prompt(21, family))
        engine.run(max_steps=100)
    assert engine.manager.pool.cached == slots
    assert not any(engine.manager.step([]).stores for _ in range(5))
    _, keys = engine.device.next_evictions(40)
    first_to_go = [key for key in keys if key is not None][:slots]
    assert first_to_go[0] in engine.manager.pool
    # One may be a head that is no longer among them, but whose tail is.
    assert len(set(first_to_go) - set(engine.manager.pool.index())) <= 1


@pytest.mark.parametrize("count", [1, 3, 70, 1000])
def test_skipped_steps_are_steps_without_news(count: int) -> None:
    """Two engines go the same way; one takes its idle steps, the other skips them. Both go on alike."""
    engines = [make_engine(mode=Mode.LAZY, num_blocks=30, slots=100, max_batched_tokens=8) for _ in range(2)]
    for engine in engines:
        for family in range(4):
            engine.submit(prompt(60, family))
            engine.run()
        engine.submit(prompt(64, 0))
        engine.run()
        assert engine.manager.stats.loaded_blocks
        engine.step()
        assert engine.manager.is_settled
    stepping, skipping = engines
    for _ in range(count):
        stepping.step()
    skipping.manager.skip_steps(count)
    for family in (9, 10, 0, 1):
        for engine in engines:
            engine.submit(prompt(40, family))
            engine.run()
        assert stepping.manager.stats.not_yet_answers == skipping.manager.stats.not_yet_answers
        assert stepping.manager.stats.stored_blocks == skipping.manager.stats.stored_blocks
        assert stepping.device._queue == skipping.device._queue


def settled(**settings: int) -> Desk:
    """A lazy desk whose device holds cached blocks only, of which those near eviction are on the host."""
    desk = Desk(mode=Mode.LAZY, num_blocks=41, max_batched_tokens=16, **settings)
    evictable(desk, families=range(desk.device.num_free // 4))
    settle(desk)
    return desk


def evictable(desk: Desk, families: range) -> None:
    for family in families:
        for blocks in desk.compute(desk.request(prompt(16, family))):
            desk.device.free(reversed(blocks))


def settle(desk: Desk) -> None:
    while stores := desk.step().stores:
        desk.report(*stores)
    desk.step()
    with mock.patch.object(desk.device, "next_evictions") as walk:
        desk.step()
    walk.assert_not_called()


def stored_next(desk: Desk) -> int:
    return sum(len(store.blocks) for store in desk.step().stores)


def test_the_order_is_looked_at_when_blocks_were_taken_that_nobody_told_of() -> None:
    desk = settled()
    assert desk.device.take(2)
    assert stored_next(desk) == 2


def test_the_order_is_looked_at_when_the_host_has_evicted() -> None:
    desk = settled()
    pool = desk.manager.pool
    pool.make_room(pool.free + 1)
    assert stored_next(desk) == 1


def test_the_order_is_looked_at_when_the_host_has_forgotten() -> None:
    desk = settled()
    pool = desk.manager.pool
    key, slot = next(iter(pool.index().items()))
    pool.forget([key], [slot])
    assert stored_next(desk) >= 1


def test_the_order_is_looked_at_when_the_host_has_grown() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=41, max_batched_tokens=16, ready=3)
    evictable(desk, families=range(10))
    for _ in range(3):
        desk.report(*desk.step().stores)
    assert desk.manager.pool.cached == 3
    desk.manager.grow(64)
    assert stored_next(desk) == 6


def test_the_order_is_looked_at_when_something_in_it_may_be_kept_after_all() -> None:
    """Because somebody who may be kept has the same content, in blocks that are not in the order."""
    desk = Desk(mode=Mode.LAZY, num_blocks=61, slots=200, max_batched_tokens=16)
    same, elsewhere = desk.request(prompt(16)), desk.blocks_for(16)
    secret = desk.request(prompt(16), may_store=False)
    table = desk.compute(secret)
    desk.manager.allocated(secret, table, 0, 0)
    desk.manager.finish(secret.id, 16)
    desk.device.free(table[0])
    evictable(desk, families=range(1, 14))  # in the blocks before those
    desk.manager.allocated(same, elsewhere, 0, 0)
    settle(desk)
    assert not any(key in desk.manager.pool for key in keys_of(desk, secret))
    desk.manager.finish(same.id, 16)
    assert stored_next(desk) == 4


def test_the_order_is_looked_at_when_what_is_on_its_way_will_not_come_back() -> None:
    """While it is stored, a request finds it on the device and goes on using it."""
    desk = Desk(mode=Mode.LAZY, num_blocks=41, max_batched_tokens=16)
    evictable(desk, families=range(10))
    [store] = desk.step().stores
    running = []
    for family in range(3):
        request = desk.request([*prompt(16, family), 9])
        found = desk.device.find_run(keys_of(desk, request), 0, 4)
        desk.device.use(found)
        desk.manager.allocated(request, [found], 16, 0)
        running.append(Progress(request.id, 16))
    desk.report(store, *desk.step(*running).stores)
    for _ in range(3):
        desk.report(*desk.step(*running).stores)
    _, keys = desk.device.next_evictions(9)
    assert [key for key in keys if key is not None and key not in desk.manager.pool] == []


def test_the_order_is_looked_at_when_a_request_that_was_loaded_is_given_more() -> None:
    """As many blocks as it takes may have come into the order meanwhile, and nobody tells of new ones."""
    desk = settled(slots=200)
    request = desk.request(prompt(16, 50))
    table = desk.blocks_for(16)
    desk.manager.allocated(request, table, 0, 0)
    settle(desk)
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        desk.manager.allocated(request, table, 16, 0)
        desk.step(Progress(request.id, 16))
    walk.assert_called_once()


def test_what_must_not_be_kept_is_not_forgotten_before_it_is_computed() -> None:
    """The set of such keys is thinned out if there are many: to those that the device has."""
    desk = Desk(mode=Mode.LAZY, num_blocks=41, max_batched_tokens=16)
    request = desk.request(prompt(80, 7), may_store=False)
    table = desk.compute(request, tokens=16)
    desk.manager.allocated(request, table, 0, 0)
    desk.step(Progress(request.id, 0))
    for family in range(20, 24):
        other = desk.request(prompt(80, family), may_store=False)
        begun = desk.compute(other, tokens=4)
        desk.manager.allocated(other, begun, 0, 0)
        desk.step(Progress(request.id, 16), Progress(other.id, 0))
        desk.end(other, begun, 0)
    more = desk.blocks_for(64)
    keys = keys_of(desk, request)
    for block, key in zip(more[0], keys[4:], strict=True):
        desk.device.cache(block, key)
    desk.step(Progress(request.id, 80, more))
    desk.end(request, [table[0] + more[0]])
    while desk.device.take(2):
        desk.report(*desk.step().stores)
    assert [key for key in keys if key in desk.manager.pool] == []


def test_many_keys_that_must_not_be_kept_are_not_looked_through_in_every_step() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=41, max_batched_tokens=16)
    running = []
    for family in range(6):
        request = desk.request(prompt(80, family), may_store=False)  # 20 keys, which the device does not have yet
        desk.manager.allocated(request, desk.blocks_for(4), 0, 0)
        running.append(Progress(request.id, 0))
    desk.step(*running)
    known = desk.manager._stores._refused
    assert len(known) == 120
    for _ in range(3):
        desk.step(*running)
    assert desk.manager._stores._refused is known, "not made anew"


def _takes_part(engine: WatchedEngine, rng: Random) -> None:
    """One turn of traffic in which everything happens that may change what a walk finds."""
    if rng.random() < 0.3:
        engine.submit(prompt(rng.randrange(5, 60), rng.randrange(6)), rng.randrange(1, 30))
    if rng.random() < 0.02 and engine.running:
        engine.abort(rng.choice(engine.running))
    if rng.random() < 0.01:
        engine.manager.reset()
    for copier in engine.copiers:
        copier.faults.fail_chance = 0.3 if rng.random() < 0.1 else 0.0
        copier.faults.delay_polls = rng.randrange(3)
    engine.step()


@pytest.mark.parametrize("slots", [12, 40, 200])
@pytest.mark.parametrize("layout", [FULL, HYBRID, WINDOW], ids=["full", "hybrid", "window"])
def test_walks_that_are_left_out_would_have_found_nothing(
    layout: KVLayout, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two engines go the same way; one looks at the eviction order in every step, the other only if it may have
    changed. Neither stores, waits or evicts otherwise than the other, if none may be late. Where all is safe that
    the device may evict, check() looks at all of it; and loads wait for nothing then, so that is left out here."""
    monkeypatch.setattr("forebay.ahead._SLACK", 10**9)
    monkeypatch.setattr(Ahead, "is_all_safe", False)
    left_out = 0
    for seed in range(12):
        always, if_need_be = (
            make_engine(layout, mode=Mode.LAZY, slots=slots, num_blocks=60, max_batched_tokens=16, seed=seed)
            for _ in range(2)
        )
        walk = mock.Mock(side_effect=always.device.next_evictions)
        seldom = mock.Mock(side_effect=if_need_be.device.next_evictions)
        always.device.next_evictions = walk  # type: ignore[method-assign]
        if_need_be.device.next_evictions = seldom  # type: ignore[method-assign]
        one, other = Random(seed), Random(seed)
        for _ in range(150):
            always.manager._stores.ahead.look_again()
            _takes_part(always, one)
            _takes_part(if_need_be, other)
            assert always.device._queue == if_need_be.device._queue
            assert always.manager.pool.index() == if_need_be.manager.pool.index()
            one_s, others = always.manager.stats, if_need_be.manager.stats
            assert (one_s.stored_blocks, one_s.not_yet_answers) == (others.stored_blocks, others.not_yet_answers)
            assert always.manager._stores.ahead._safe == if_need_be.manager._stores.ahead._safe
        left_out += walk.call_count - seldom.call_count
    assert left_out > 30


def _unsafe(engine: WatchedEngine) -> tuple[list[int], int]:
    """Where in the eviction order blocks stand that would be lost, and how far the order was to be looked at: as
    far as the target, but for what is being copied and will come back."""
    pool, ahead = engine.manager.pool, engine.manager._stores.ahead
    reach = ahead._target - ahead.on_the_way()
    _, keys = engine.device.next_evictions(reach)
    lost = [i for i, key in enumerate(keys) if key and key not in pool and not pool.on_the_way(key)]
    return lost, reach if len(keys) == reach else 0


@pytest.mark.parametrize("layout", [FULL, HYBRID, WINDOW], ids=["full", "hybrid", "window"])
def test_what_the_next_steps_may_take_is_safe_though_walks_are_left_out(
    layout: KVLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the target is what the engine takes in a step at most. A walk comes when an eighth is used up."""
    seen: list[tuple[list[int], int]] = []
    plan = OffloadManager.step

    def planned(manager: OffloadManager, *progress: Any) -> Any:
        step = plan(manager, *progress)
        seen.append(_unsafe(engine))
        return step

    monkeypatch.setattr(OffloadManager, "step", planned)
    late = 0
    for seed in range(12):
        engine = make_engine(layout, mode=Mode.LAZY, slots=400, num_blocks=240, max_batched_tokens=64, seed=seed)
        rng, slack = Random(seed), engine.manager._stores.ahead._slack
        for _ in range(150):
            if rng.random() < 0.3:
                engine.submit(prompt(rng.randrange(5, 60), rng.randrange(40)), rng.randrange(1, 30))
            for copier in engine.copiers:
                copier.faults.delay_polls = rng.randrange(3)
            engine.step()
        for lost, reach in seen:
            assert all(i >= reach - slack for i in lost)
            late += bool(lost)
        seen.clear()
    assert late > 20, "nothing was ever left for later"


def test_a_step_that_only_decodes_does_not_look_at_the_eviction_order() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=80, max_batched_tokens=64)  # two steps take 40 blocks, an eighth is 5
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    desk.step(Progress(request.id, 16))
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        for _ in range(3):
            desk.step(Progress(request.id, 16))
        desk.step(Progress(request.id, 16, desk.blocks_for(16)))
        walk.assert_not_called()
        desk.step(Progress(request.id, 16, desk.blocks_for(8)))
        walk.assert_called_once()


@pytest.mark.parametrize("tells", [True, False])
def test_a_step_that_admits_requests_does_not_look_while_enough_is_safe(tells: bool) -> None:
    """Their first tokens would wait for it. But somebody who takes from the head of the order, even if he does not
    tell, as another connector may, is noticed before much is lost."""
    desk = Desk(mode=Mode.LAZY, num_blocks=160, slots=200, max_batched_tokens=64)  # the first 4 of 33
    known = desk.request(prompt(64))
    table = desk.compute(known)
    desk.manager.allocated(known, table, 0, 0)
    desk.step(Progress(known.id, 64))
    desk.end(known, table)
    desk.step()

    def steps(foreign: int) -> list[tuple[bool, bool]]:
        """Of the step that admits a request, when so many blocks were taken, and of the one after it: whether it
        looks, and whether all is settled then."""
        taken = desk.blocks_for(4 * foreign)
        again = desk.request(prompt(64))
        desk.device.use(table[0])  # a hit
        desk.manager.allocated(again, table, 60, 0)
        if tells:
            desk.manager._stores.ahead.taken(taken[0])
        found = []
        for _ in range(2):
            with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
                desk.step(Progress(again.id, 64))
            looked = any(call.args != (16,) for call in walk.call_args_list)
            found.append((looked, desk.manager.is_settled))
        desk.end(again, table)
        return found

    put_off, not_put_off = [(False, False), (True, True)], [(True, True), (False, True)]
    assert steps(0) == put_off
    assert steps(3) == put_off
    assert steps(5) == not_put_off


def test_a_walk_that_was_put_off_comes_though_as_many_blocks_are_free_again() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=160, slots=200, max_batched_tokens=64)
    ended, new = desk.request(prompt(64)), desk.request(prompt(3, 1))
    table = desk.compute(ended)
    desk.manager.allocated(ended, table, 0, 0)
    desk.step(Progress(ended.id, 64))
    desk.step(Progress(ended.id, 64))
    desk.end(ended, table)  # 16 blocks come back
    desk.manager.allocated(new, desk.blocks_for(3), 0, 0)
    desk.step(Progress(new.id, 0))
    assert desk.device.take(16)  # by somebody who does not tell
    assert not desk.manager.is_settled
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        desk.step(Progress(new.id, 3))
    assert walk.call_args.args > (16,)


def test_if_the_host_has_lost_something_a_step_looks_though_it_admits_requests() -> None:
    """What was safe near eviction may not be any more."""
    desk = Desk(mode=Mode.LAZY, num_blocks=160, slots=200, max_batched_tokens=64)
    desk.step()
    desk.manager.reset()
    new = desk.request(prompt(3))
    desk.manager.allocated(new, desk.blocks_for(3), 0, 0)
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        desk.step(Progress(new.id, 0))
    assert walk.call_args.args > (16,)


def test_a_step_that_would_look_is_not_to_be_passed_over() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=160, slots=200, max_batched_tokens=64)
    desk.step()
    assert desk.manager.is_settled
    assert desk.device.take(1)  # by somebody who does not tell
    assert not desk.manager.is_settled
    desk.step()
    assert desk.manager.is_settled


def test_blocks_that_have_nothing_to_lose_are_no_reason_to_look() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=160, slots=200, max_batched_tokens=64)
    short = [desk.request(prompt(3, family)) for family in range(5)]
    tables = [desk.compute(request) for request in short]
    for request, table in zip(short, tables, strict=True):
        desk.manager.allocated(request, table, 0, 0)
    desk.step()
    desk.step()
    for request, table in zip(short, tables, strict=True):
        desk.end(request, table)
    new = desk.request(prompt(3, 9))
    desk.manager.allocated(new, desk.blocks_for(3), 0, 0)
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        desk.step(Progress(new.id, 0))
    walk.assert_called_once_with(16)


def test_nobody_looks_again_while_what_was_found_is_being_copied() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=80, max_batched_tokens=64)
    for family in range(4):
        request = desk.request(prompt(64, family))
        desk.end(request, desk.compute(request))
    assert desk.manager.step().stores
    with mock.patch.object(desk.device, "next_evictions", wraps=desk.device.next_evictions) as walk:
        stores = desk.step().stores + desk.step().stores
        walk.assert_not_called()
    assert not stores


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_lazy_stores_keep_heads_longer_than_tails_too(policy: str) -> None:
    engine = make_engine(mode=Mode.LAZY, slots=40, num_blocks=24, max_batched_tokens=8, eviction_policy=policy)
    conversation = served(engine, prompt(32))
    for family in range(1, 5):
        served(engine, prompt(12, family))
    conversation = served(engine, [*conversation.tokens, *range(12)])  # its head is on the host, its tail is new
    keys: list[list[Key]] = [[]]
    engine.layout.extend_keys(keys, conversation.hashes)
    chain, was_there = keys[0], set[Key]()
    for family in range(5, 40):
        served(engine, prompt(12, family))
        pool = engine.manager.pool
        for head, tail in pairwise(chain):
            assert not (tail in pool and head in was_there and head not in pool), (
                "a tail is kept whose head is gone"
            )
        was_there |= {key for key in chain if key in pool}
    assert len(was_there) >= 10, "head and tail have been on the host"


# --- memory that becomes usable bit by bit ----------------------------------------------------------------


def _running(desk: Desk, tokens: int, family: int = 0) -> tuple[TinyRequest, list[list[BlockId]]]:
    request = desk.request(prompt(tokens, family))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    return request, table


def test_growth_wakes_a_request_that_found_no_room() -> None:
    desk = Desk(ready=3)
    request, table = _running(desk, 100)
    [store] = desk.step(Progress(request.id, 80)).stores
    assert store.slots == [0, 1, 2]
    desk.report(store)
    assert desk.step(Progress(request.id, 80)).stores == []
    desk.manager.grow(64)
    [rest] = desk.step(Progress(request.id, 80)).stores
    assert rest.blocks == table[0][3:20]
    desk.report(rest)
    assert desk.step(Progress(request.id, 80)).stores == []


def test_growth_ends_the_pools_exhaustion() -> None:
    desk = Desk(slots=5, ready=3)
    first, _ = _running(desk, 12)
    [held] = desk.step(Progress(first.id, 12)).stores
    second, table = _running(desk, 12, 1)
    assert desk.step(Progress(second.id, 12)).stores == [], "all slots are being filled"
    desk.manager.grow(5)
    [store] = desk.step(Progress(second.id, 12)).stores
    assert store.blocks == table[0][:2]
    desk.report(held, store)


def _losing_its_head(ready: int) -> tuple[Desk, TinyRequest, TinyRequest]:
    """The first of two requests has lost blocks to the other, and waits with storing until it ends."""
    desk = Desk(ready=ready)
    first, _ = _running(desk, 44)
    second, _ = _running(desk, 40, 1)
    desk.report(*desk.step(Progress(first.id, 32)).stores)
    desk.report(*desk.step(Progress(second.id, 40)).stores)
    assert desk.step(Progress(first.id, 40)).stores == []
    assert desk.step(Progress(first.id, 44)).stores == []
    return desk, first, second


def test_growth_lets_a_request_store_again_what_had_to_make_way() -> None:
    desk, first, second = _losing_its_head(ready=10)
    desk.manager.grow(64)
    step = desk.step(Progress(first.id, 44), Progress(second.id, 40))
    desk.report(*step.stores)
    assert all(key in desk.manager.pool for each in (first, second) for key in keys_of(desk, each))


def test_growth_by_too_little_pushes_nobody_out_again() -> None:
    desk, first, second = _losing_its_head(ready=10)
    before = desk.manager.pool.index()
    desk.manager.grow(12)
    assert desk.step(Progress(first.id, 44), Progress(second.id, 40)).stores == []
    assert desk.manager.pool.index() == before


def test_growth_by_nothing_wakes_nobody() -> None:
    desk = Desk(ready=3)
    request, _ = _running(desk, 100)
    desk.report(*desk.step(Progress(request.id, 80)).stores)
    tried = desk.manager.stats.stores_without_room
    desk.manager.grow(3)
    desk.step(Progress(request.id, 80))
    assert desk.manager.stats.stores_without_room == tried


@pytest.mark.parametrize("mode", Mode)
def test_a_host_of_which_nothing_is_ready_is_in_nobodys_way(mode: Mode) -> None:
    engine = make_engine(num_blocks=24, ready=0, mode=mode, max_batched_tokens=16)
    for _ in range(3):
        for family in range(3):
            served(engine, prompt(40, family), 4)
    assert engine.manager.stats.stored_blocks == engine.manager.stats.hit_tokens == 0
    for copier in engine.copiers:
        copier.ready = copier.slots
    for _ in range(3):
        for family in range(3):
            served(engine, prompt(40, family), 4)
    assert engine.manager.stats.hit_tokens > 0


def test_the_least_that_the_ranks_have_ready_is_used() -> None:
    engine = make_engine(ready=0, ranks=2)
    engine.copiers[0].ready = 5
    engine.copiers[1].ready = 3
    served(engine, prompt(40))
    assert sorted(engine.manager.pool.index().values()) == [0, 1, 2]


# --- what orders say --------------------------------------------------------------------------------------


def test_orders_name_the_keys_of_their_slots() -> None:
    layout = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=8)), 4, 16)
    desk = Desk(layout)
    first = desk.request(prompt(32))
    table = desk.compute(first)
    desk.manager.allocated(first, table, 0, 0)
    [store] = desk.step(Progress(first.id, 32)).stores
    desk.report(store)
    assert dict(zip(store.keys, store.slots, strict=True)) == desk.manager.pool.index()
    desk.end(first, table)
    desk.device.reset()
    again = desk.request(prompt(33))
    assert tokens_of(desk.manager.match(again, 0)) == 32
    desk.manager.allocated(again, desk.blocks_for(33), 0, 32)
    [load] = desk.step().loads
    index = desk.manager.pool.index()
    assert len(load.keys) == 8 + 2
    assert [index[key] for key in load.keys] == load.slots


def test_an_order_that_was_handed_out_does_not_change() -> None:
    desk = Desk(slots=8)
    first, table = _running(desk, 16)
    [store] = desk.step(Progress(first.id, 16)).stores
    as_it_was = store.detached()
    second, _ = _running(desk, 16, 1)
    [other] = desk.step(Progress(second.id, 16)).stores
    desk.report(store)
    desk.end(first, table)
    desk.report(other)
    for family in range(2, 5):
        desk.store(prompt(16, family))  # evicts what the first order stored
    desk.manager.reset()
    assert store == as_it_was


@pytest.mark.parametrize("bad", [Outcome.FAILED, Outcome.MISMATCH])
def test_a_mismatch_is_a_failed_load_in_every_respect_and_counted(bad: Outcome) -> None:
    desk = on_host_only(32, ranks=3)
    request = desk.request(prompt(33))
    desk.manager.match(request, 0)
    desk.manager.allocated(request, desk.blocks_for(33), 0, 32)
    [load] = desk.step().loads
    assert desk.report(load, ranks=[0, 1], outcome=bad) == ([], [])
    assert desk.report(load, ranks=[2]) == ([], [request.id])
    stats, counted = desk.manager.stats, 2 if bad is Outcome.MISMATCH else 0
    assert (stats.load_failures, stats.recomputes, stats.loaded_blocks) == (1, 1, 0)
    assert stats.checksum_mismatches == counted
    assert desk.manager.pool.index() == {}, "the bad keys are forgotten"
    assert tokens_of(desk.manager.match(desk.request(prompt(33)), 0)) == 0
    desk.report(load, ranks=[0], outcome=bad)
    assert (stats.checksum_mismatches, stats.late_reports) == (counted, 1), "said twice, counted once"


def test_a_mismatch_of_a_load_that_nobody_waits_for_is_counted_and_its_keys_are_forgotten() -> None:
    desk = on_host_only(32)
    request = desk.request(prompt(33))
    desk.manager.match(request, 0)
    table = desk.blocks_for(33)
    desk.manager.allocated(request, table, 0, 32)
    [load] = desk.step().loads
    desk.end(request, table, 0)
    assert desk.report(load, outcome=Outcome.MISMATCH) == ([], [])
    assert desk.manager.stats.checksum_mismatches == 1
    assert desk.manager.pool.index() == {}
