"""One test for each thing the manager must get right; docs/proofs.md maps them to the promises."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from forebay import (
    BlockId,
    ChunkedLocal,
    Cleared,
    Direction,
    FullAttention,
    Hit,
    Key,
    KVLayout,
    Mode,
    NotYet,
    Outcome,
    Progress,
    Rank,
    Recurrent,
    Removed,
    Report,
    SlidingWindow,
    Stored,
    TransferId,
    host_slots,
)
from forebay.ids import RequestId
from forebay.testing import NULL, Faults, TinyRequest
from tests.builders import FULL, Desk, config, hold, lose_device, make_engine, prompt, release, served, tokens_of
from tests.watched import InPlaceEngine, WatchedEngine

# --- capacity -----------------------------------------------------------------------------------------


def test_slots_are_device_blocks_times_host_bytes_over_device_bytes() -> None:
    assert host_slots(device_blocks=4096, device_bytes=4096 * 100 + 7, host_bytes=60_000) == 599
    assert host_slots(device_blocks=10, device_bytes=1000, host_bytes=100) == 1


# --- match --------------------------------------------------------------------------------------------


def test_match_skips_what_the_device_has_and_recomputes_the_last_token() -> None:
    desk = Desk()
    desk.store(prompt(16))
    lose_device_of(desk)
    again = desk.request(prompt(16))
    assert desk.manager.match(again, 0) == Hit(12, needs_load=True)  # 15 tokens at most: 3 whole blocks
    assert desk.manager.match(again, 8) == Hit(4, needs_load=True)
    assert desk.manager.match(again, 12) == Hit(0, needs_load=False)
    desk.check()


def lose_device_of(desk: Desk) -> None:
    desk.device.reset()


def test_matching_again_after_a_failed_allocation_lets_go_of_the_old_pins() -> None:
    desk = Desk(slots=6)
    desk.store(prompt(24))
    lose_device_of(desk)
    waiting = desk.request(prompt(25))
    assert tokens_of(desk.manager.match(waiting, 0)) == 24
    assert desk.manager.pool.pinned == 6
    assert tokens_of(desk.manager.match(waiting, 8)) == 16  # the device found two blocks meanwhile
    assert desk.manager.pool.pinned == 4
    desk.manager.finish(waiting.id, 0)
    assert desk.manager.pool.pinned == 0


def test_slots_found_are_pinned_until_the_engine_has_allocated() -> None:
    desk = Desk(slots=4)
    desk.store(prompt(16))
    lose_device_of(desk)
    waiting = desk.request(prompt(17))
    assert tokens_of(desk.manager.match(waiting, 0)) == 16
    desk.store(prompt(16, family=1))  # would evict all four slots, if it could
    assert (desk.manager.pool.evictions, desk.manager.pool.cached) == (0, 4)
    table = desk.blocks_for(17)
    assert desk.manager.allocated(waiting, table, 0, 16)
    [load] = desk.step().loads
    assert load.slots == [0, 1, 2, 3]
    assert desk.report(load).loaded == [waiting.id]
    assert desk.manager.pool.pinned == 0


def test_engine_accepts_fewer_tokens_than_offered() -> None:
    desk = Desk()
    desk.store(prompt(24))
    lose_device_of(desk)
    request = desk.request(prompt(25))
    assert tokens_of(desk.manager.match(request, 0)) == 24
    table = desk.blocks_for(12)
    assert desk.manager.allocated(request, table, 0, 12)
    assert desk.manager.pool.pinned == 3
    [load] = desk.step().loads
    assert (load.blocks, load.slots) == (table[0], [0, 1, 2])


def test_engine_accepts_nothing_of_what_was_offered() -> None:
    desk = Desk()
    desk.store(prompt(16))
    lose_device_of(desk)
    request = desk.request(prompt(17))
    assert tokens_of(desk.manager.match(request, 0)) == 16
    assert not desk.manager.allocated(request, desk.blocks_for(17), 0, 0)
    assert desk.manager.pool.pinned == 0
    assert desk.step().loads == []


def test_accepting_a_length_that_a_recurrent_state_does_not_have_is_recomputed_not_garbled() -> None:
    layout = KVLayout((FullAttention(4), Recurrent(4)), 4, 16)
    desk = Desk(layout)
    whole = desk.request(prompt(24))
    table = desk.compute(whole)
    for block in table[1][:-1]:  # the engine keeps only the last state
        desk.device.uncache(block)
    desk.manager.allocated(whole, table, 0, 0)
    desk.report(*desk.step(Progress(whole.id, 24)).stores)
    desk.end(whole, table)
    lose_device_of(desk)
    request = desk.request(prompt(25))
    assert tokens_of(desk.manager.match(request, 0)) == 24
    assert desk.manager.allocated(request, desk.blocks_for(12), 0, 12)
    assert desk.step().loads == []
    assert desk.report().failed == [request.id]
    assert desk.manager.stats.loads_refused == 1
    assert desk.manager.match(request, 0) == Hit(0, needs_load=False)


# --- groups -------------------------------------------------------------------------------------------


def hybrid_hit(layout: KVLayout, tokens: int = 33) -> tuple[TinyRequest, int]:
    """Serve a prompt, lose it from the device, serve it again: blocks loaded, with all bytes checked."""
    engine = make_engine(layout, num_blocks=128, slots=128)
    served(engine, prompt(tokens))
    lose_device(engine)
    again = served(engine, prompt(tokens))
    return again, engine.manager.stats.loaded_blocks


def test_full_attention_needs_the_whole_prefix() -> None:
    again, loaded = hybrid_hit(FULL)
    assert (again.cached_tokens, loaded) == (32, 8)


def test_a_sliding_window_loads_only_what_it_still_sees() -> None:
    again, loaded = hybrid_hit(KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=9)), 4, 16))
    assert (again.cached_tokens, loaded) == (32, 8 + 2)


def test_a_recurrent_group_loads_only_its_last_state() -> None:
    again, loaded = hybrid_hit(KVLayout((FullAttention(4), Recurrent(4)), 4, 16))
    assert (again.cached_tokens, loaded) == (32, 8 + 1)


def test_chunked_local_attention_loads_only_its_current_chunk() -> None:
    again, loaded = hybrid_hit(KVLayout((FullAttention(4), ChunkedLocal(4, chunk_tokens=24)), 4, 16))
    assert (again.cached_tokens, loaded) == (32, 8 + 2)


def test_groups_with_different_block_sizes_end_their_hit_on_the_largest() -> None:
    layout = KVLayout((SlidingWindow(8, window_tokens=16), FullAttention(4)), 4, 16)
    again, loaded = hybrid_hit(layout, tokens=31)  # 28 would suit the full group, not the window's blocks of 8
    assert (again.cached_tokens, loaded) == (24, 2 + 6)


def test_no_group_has_to_be_full_attention() -> None:
    again, loaded = hybrid_hit(KVLayout((SlidingWindow(4, window_tokens=8), Recurrent(8)), 4, 16))
    assert (again.cached_tokens, loaded) == (32, 2 + 1)


def test_a_hit_that_needs_no_bytes_needs_no_load() -> None:
    desk = Desk(KVLayout((ChunkedLocal(4, chunk_tokens=8),), 4, 16))
    request = desk.request(prompt(20))
    assert desk.manager.match(request, 0) == Hit(16, needs_load=False)  # a new chunk begins at 16
    assert not desk.manager.allocated(request, desk.blocks_for(20), 0, 16)


def test_null_blocks_are_never_copied() -> None:
    layout = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=6)), 4, 16)
    engine = make_engine(layout, num_blocks=128)
    seen: list[int] = []
    for copier in engine.copiers:
        submit = copier.submit
        copier.submit = lambda order, submit=submit: (seen.extend((*order.blocks, *order.move_to)), submit(order))  # type: ignore[method-assign]
    served(engine, prompt(40))
    lose_device(engine)
    served(engine, prompt(41))
    assert seen
    assert NULL not in seen


def test_context_parallel_blocks_span_more_tokens() -> None:
    again, loaded = hybrid_hit(KVLayout((FullAttention(2, context_parallel=4),), 4, 16))
    assert (again.cached_tokens, loaded) == (32, 4)


def test_a_drafter_wants_one_block_more_than_the_hit() -> None:
    desk = Desk(KVLayout((FullAttention(4, drafter=True),), 4, 16))
    desk.store(prompt(16))
    lose_device_of(desk)
    assert tokens_of(desk.manager.match(desk.request(prompt(24)), 0)) == 12  # block 3 matches and is dropped
    assert tokens_of(desk.manager.match(desk.request(prompt(17)), 0)) == 12  # also where the hit could end there


# --- eager stores -------------------------------------------------------------------------------------


def test_eager_stores_confirmed_blocks_once_as_the_request_grows() -> None:
    desk = Desk()
    request = desk.request(prompt(32))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    assert desk.step(Progress(request.id, 0)).stores == []
    [first] = desk.step(Progress(request.id, 11)).stores  # two blocks and a part of the third
    assert first.blocks == table[0][:2]
    assert desk.step(Progress(request.id, 11)).stores == [], "on the way: not stored twice"
    [second] = desk.step(Progress(request.id, 32)).stores
    assert second.blocks == table[0][2:]
    desk.report(second)
    desk.report(first)
    assert desk.step(Progress(request.id, 32)).stores == [], "on the host: not stored twice"
    assert desk.manager.pool.cached == 8


def test_tokens_that_are_only_placeholders_are_not_stored() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [store] = desk.step(Progress(request.id, confirmed_tokens=16 - 1)).stores
    assert store.blocks == table[0][:3]


def test_every_group_keeps_its_own_progress() -> None:
    desk = Desk(KVLayout((FullAttention(4), FullAttention(8)), 4, 16))
    request = desk.request(prompt(24))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [first] = desk.step(Progress(request.id, 12)).stores
    assert first.blocks == [*table[0][:3], *table[1][:1]]
    [second] = desk.step(Progress(request.id, 16)).stores
    assert second.blocks == [table[0][3], table[1][1]]


def test_stores_are_bounded_by_free_slots_and_go_on_when_there_are_some() -> None:
    desk = Desk(slots=6, ready=3)
    request = desk.request(prompt(24))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    assert store.blocks == table[0][:3]
    assert desk.manager.stats.stores_without_room == 1
    desk.report(store)
    assert desk.step(Progress(request.id, 20)).stores == [], "its own head is not evicted for its tail"
    desk.manager.grow(6)
    [rest] = desk.step(Progress(request.id, 24)).stores
    assert rest.blocks == table[0][3:]


# --- lazy stores --------------------------------------------------------------------------------------


def test_lazy_target_is_twice_what_the_engine_may_take_in_a_step() -> None:
    layout = KVLayout((FullAttention(16), SlidingWindow(16, window_tokens=100), Recurrent(16)), 16, 1)
    assert layout.lazy_target_blocks(max_batched_tokens=1000) == 2 * (63 + (7 + 1) + 2)


def test_lazy_stores_only_what_the_device_is_about_to_evict() -> None:
    engine = make_engine(mode=Mode.LAZY, num_blocks=200, max_batched_tokens=8)
    served(engine, prompt(32))
    assert engine.manager.stats.stored_blocks == 0, "nothing is near eviction"
    for family in range(1, 25):
        served(engine, prompt(32, family))
    assert engine.manager.stats.stored_blocks > 0


def watch_losses(engine: WatchedEngine) -> list[Key]:
    """Keys that the device lost in a moment when the host did not have them."""
    lost: list[Key] = []
    take = engine.device.take

    def watched_take(count: int) -> list[BlockId] | None:
        before = len(engine.device.evicted)
        taken = take(count)
        lost.extend(key for key in engine.device.evicted[before:] if key not in engine.manager.pool)
        return taken

    engine.device.take = watched_take  # type: ignore[method-assign]
    return lost


def test_lazy_loses_nothing_while_there_is_room_and_time() -> None:
    engine = make_engine(mode=Mode.LAZY, num_blocks=60, slots=1000, max_batched_tokens=16, max_running=3)
    lost = watch_losses(engine)
    for family in range(40):
        engine.submit(prompt(24 + family % 9, family), 3)
    engine.run()
    assert len(engine.device.evicted) > 200
    assert lost == []


@pytest.mark.parametrize("max_batched_tokens", [16, 64, 96])
def test_lazy_loses_nothing_when_reports_come_a_step_later(max_batched_tokens: int) -> None:
    """In a real engine they always do: while one step's blocks are being copied, the next step takes others."""
    engine = make_engine(
        mode=Mode.LAZY, num_blocks=400, slots=20_000, max_batched_tokens=max_batched_tokens, max_running=6
    )
    for copier in engine.copiers:
        copier.faults = Faults(delay_polls=1)
    lost = watch_losses(engine)
    for family in range(100):
        engine.submit(prompt(24 + family % 90, family), 3)
    engine.run()
    assert len(engine.device.evicted) > 1000
    assert lost == []


@pytest.mark.parametrize(
    "groups", [(SlidingWindow(4, window_tokens=5),), (FullAttention(4), Recurrent(4))], ids=str
)
def test_lazy_loses_nothing_of_groups_that_need_little_but_take_much(groups: tuple[Any, ...]) -> None:
    """A window needs few blocks, a state one; but a step takes blocks for all its tokens and all its requests."""
    layout = KVLayout(groups, tokens_per_hash=4, bytes_per_block=64)
    engine = make_engine(layout, mode=Mode.LAZY, num_blocks=150, slots=4000, max_batched_tokens=96, max_running=6)
    lost = watch_losses(engine)
    for family in range(60):
        engine.submit(prompt(16 + family % 9, family), 3)
    engine.run()
    assert len(engine.device.evicted) > 100
    assert lost == []


def many_loads(mode: Mode, num_blocks: int, max_batched_tokens: int) -> tuple[WatchedEngine, list[Key]]:
    """Chats that come back four times, and what the device lost."""
    engine = make_engine(
        mode=mode,
        num_blocks=num_blocks,
        slots=2000,
        max_batched_tokens=max_batched_tokens,
        wait_deadline_s=100.0,
        max_running=3,
    )
    lost = watch_losses(engine)
    sessions = [prompt(40, family) for family in range(12)]
    for turn in range(4):
        for number, tokens in enumerate(sessions):
            request = engine.submit(tokens, 3)
            sessions[number] = tokens if turn == 3 else request.tokens
        engine.run()
        sessions = [[*tokens, *range(turn, turn + 5)] for tokens in sessions]
    assert engine.manager.stats.loaded_blocks > 150
    return engine, lost


@pytest.mark.parametrize(("num_blocks", "max_batched_tokens"), [(80, 8), (84, 64), (96, 64)])
def test_lazy_loses_nothing_when_loads_take_more_than_a_step_computes(
    num_blocks: int, max_batched_tokens: int
) -> None:
    engine, lost = many_loads(Mode.LAZY, num_blocks, max_batched_tokens)
    assert (engine.preemptions, lost) == (0, [])


@pytest.mark.parametrize("mode", Mode)
def test_what_a_preempted_request_computed_last_is_lost(mode: Mode) -> None:
    """The engine tells of it when others have its blocks."""
    engine, lost = many_loads(mode, num_blocks=80, max_batched_tokens=64)
    assert (engine.preemptions, len(lost)) == (1, 2)


@pytest.mark.parametrize("mode", Mode)
def test_what_must_not_be_kept_is_never_stored_also_when_only_its_blocks_are_left(mode: Mode) -> None:
    engine = make_engine(mode=mode, num_blocks=30, slots=500, max_batched_tokens=16)
    secret = engine.submit(prompt(32, 99), 4, may_store=False)
    for family in range(20):
        engine.submit(prompt(24, family), 2)
    engine.run()
    keys: list[list[Key]] = [[]]
    engine.layout.extend_keys(keys, secret.hashes)
    computed = keys[0][:8]
    assert all(key in engine.device.evicted for key in computed)
    assert not any(key in engine.manager.pool for key in computed)
    public = engine.submit(prompt(32, 99), 4)
    for family in range(20, 40):
        engine.submit(prompt(24, family), 2)
    engine.run()
    assert public.tokens == secret.tokens
    assert all(key in engine.manager.pool for key in computed), "somebody who may be kept computed the same"


def full_of_evictable_blocks(**settings: int) -> Desk:
    """A lazy desk whose device holds nothing but cached blocks that nobody uses."""
    desk = Desk(mode=Mode.LAZY, **settings)
    for family in range(desk.device.num_free // 4):
        request = desk.request(prompt(16, family))
        for blocks in desk.compute(request):
            desk.device.free(reversed(blocks))
    return desk


def test_a_lazy_store_leaves_the_blocks_place_in_the_eviction_order_alone() -> None:
    desk = full_of_evictable_blocks(num_blocks=41, max_batched_tokens=16)
    before = desk.device.next_evictions(100)[0]
    [store] = desk.step().stores
    assert set(store.blocks) == set(before[:9])  # two steps of 16 tokens, and a request that begins a block
    assert desk.device.next_evictions(100)[0] == before[9:]
    desk.report(store)
    assert desk.device.next_evictions(100)[0] == before
    assert desk.step().stores == [], "the head of the queue is safe"


def test_blocks_stored_from_between_others_go_back_between_them() -> None:
    desk = full_of_evictable_blocks(num_blocks=41, max_batched_tokens=16)
    desk.store(prompt(16, 0))  # the same content as the first four blocks: those need no store any more
    before = desk.device.next_evictions(100)[0]
    while stores := desk.step().stores:
        desk.report(*stores)
    assert desk.manager.pool.cached > 4
    assert desk.device.next_evictions(100)[0] == before


def test_a_block_used_while_it_is_stored_does_not_go_back_to_the_head() -> None:
    desk = full_of_evictable_blocks(num_blocks=41, max_batched_tokens=16)
    before = desk.device.next_evictions(100)[0]
    [store] = desk.step().stores
    desk.device.use([before[2]])
    desk.report(store)
    desk.device.free([before[2]])
    assert desk.device.next_evictions(100)[0] == [*before[:2], *before[3:], before[2]]


def test_a_slow_bus_leaves_the_engine_half_of_its_free_blocks() -> None:
    desk = full_of_evictable_blocks(num_blocks=21, max_batched_tokens=64, slots=200)
    running = desk.device.take(8)
    assert running is not None
    [first] = desk.step().stores
    assert (len(first.blocks), desk.device.num_free) == (12, 0), "the first time everything near eviction goes"
    request = desk.request(prompt(32, 77))
    desk.manager.allocated(request, [running], 0, 0)
    keys: list[list[Key]] = [[]]
    desk.layout.extend_keys(keys, request.hashes)
    for block, key in zip(running, keys[0], strict=True):
        desk.device.cache(block, key)
    desk.manager.preempt(request.id)
    desk.device.free(reversed(running))
    [second] = desk.step().stores
    assert (len(second.blocks), desk.device.num_free) == (4, 4), "while copies are behind, half is left alone"


def test_where_the_device_has_blocks_to_spare_lazy_stores_nothing_of_a_request_that_runs() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=26, slots=104, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    assert desk.device.num_free == 9, "as many as lazy stores have to keep safe"
    assert desk.step(Progress(request.id, 64)).stores == []
    desk.end(request, table)
    assert desk.manager.stats.stored_blocks == 0


def test_where_the_device_is_nearly_full_lazy_stores_while_a_request_runs_and_not_when_it_ends() -> None:
    """Stored at its end, its blocks would be pinned just when the next request needs them."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    step = desk.step(Progress(request.id, 64))
    [store] = step.stores
    assert (store.blocks, step.stored_for) == (table[0], [request.id])
    desk.report(store)
    desk.end(request, table)
    assert (desk.device.num_free, desk.step().stores) == (24, []), "all of its blocks can be taken at once"


def test_blocks_that_are_being_stored_do_not_make_the_device_full() -> None:
    desk = full_of_evictable_blocks(num_blocks=29, slots=116, max_batched_tokens=16)
    running = desk.device.take(16)
    assert running is not None
    request = desk.request(prompt(64, 77))
    desk.manager.allocated(request, [running], 0, 0)
    [store] = desk.step(Progress(request.id, 64)).stores
    assert desk.device.num_free == 12 - len(store.blocks) < 9
    assert desk.step(Progress(request.id, 64)).stores == [], "they come back"


@pytest.mark.parametrize("num_blocks", [25, 41])
def test_lazy_keeps_nothing_of_a_request_that_ran_when_the_host_was_reset(num_blocks: int) -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=num_blocks, slots=4 * num_blocks, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    desk.report(*desk.step(Progress(request.id, 64)).stores)
    desk.manager.reset()
    desk.end(request, table)
    while desk.device.take(4):
        desk.report(*desk.step().stores)
    assert desk.manager.pool.cached == 0


def test_what_is_asked_for_in_a_step_counts_in_that_step() -> None:
    """Or the step after it would find something to do although nothing has happened."""
    desk = Desk(mode=Mode.LAZY, num_blocks=41, slots=164, max_batched_tokens=16)
    request = desk.request(prompt(64))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    desk.manager._stores.ahead.can_take(request.id, 30)
    [store] = desk.step(Progress(request.id, 64)).stores
    desk.report(store)
    assert desk.manager.is_settled
    assert desk.step(Progress(request.id, 64)).stores == []


@pytest.mark.parametrize(("free", "asks_again", "is_stored"), [(15, False, True), (21, True, False)])
def test_what_loads_asked_for_of_late_counts_once(free: int, asks_again: bool, is_stored: bool) -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=17 + free, slots=200, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager._stores.ahead.can_take(RequestId("another"), 10)
    assert desk.step().stores == []
    desk.manager.allocated(request, table, 0, 0)
    if asks_again:
        desk.manager._stores.ahead.can_take(RequestId("another"), 10)
    assert bool(desk.step(Progress(request.id, 64)).stores) is is_stored


def test_where_the_host_is_small_lazy_stores_nothing_of_a_request_that_runs() -> None:
    """What is stored early would make way for what is stored next."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=99, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    assert desk.step(Progress(request.id, 64)).stores == []
    desk.end(request, table)
    [store] = desk.step().stores
    assert sorted(store.blocks) == sorted(table[0])


def test_what_admissions_put_off_is_done_in_a_step_without_any() -> None:
    """An engine that schedules ahead plans that step while the device computes the first tokens."""
    desk = Desk()
    with mock.patch.object(desk.manager.pool, "settle") as settle:
        for _ in range(2):
            request = desk.request(prompt(16))
            desk.manager.allocated(request, desk.compute(request), 0, 0)
            desk.manager.step()
            desk.manager.report([])
            assert mock.call() not in settle.call_args_list  # the first token waits for that
        desk.manager.step()
        settle.assert_called_with()


def test_a_request_that_was_loaded_is_admitted_too() -> None:
    desk = Desk()
    desk.store(prompt(16))
    loaded, other = desk.request(prompt(16)), desk.request(prompt(16, 1))
    desk.manager.match(loaded, 0)
    table = desk.blocks_for(16)
    desk.manager.allocated(loaded, table, 0, 12)
    [load] = desk.step().loads
    desk.manager.allocated(other, desk.compute(other), 0, 0)
    desk.step(Progress(other.id, 0))
    desk.report(load)
    with mock.patch.object(desk.manager.pool, "settle") as settle:
        desk.manager.allocated(loaded, table, 12, 0)
        desk.step(Progress(loaded.id, 12))
        assert mock.call() not in settle.call_args_list


def test_where_every_step_admits_somebody_no_first_token_waits_for_the_hits_of_many() -> None:
    desk = Desk(slots=200)
    first = desk.request(prompt(64))
    table = desk.compute(first)
    desk.manager.allocated(first, table, 0, 0)
    desk.report(*desk.step(Progress(first.id, 64)).stores)
    with mock.patch.object(desk.manager.pool._policy, "touch") as touch:
        for _ in range(300):
            request = desk.request(prompt(64))
            told = touch.call_count
            desk.manager.allocated(request, table, 60, 0)
            desk.manager.step([Progress(request.id, 64)])
            assert touch.call_count == told
            desk.manager.report([])
            assert touch.call_count <= told + 1
    assert touch.call_count > 200


def test_a_prompt_that_the_device_has_is_not_looked_up_key_by_key() -> None:
    desk = Desk(slots=200)
    first, second = desk.request(prompt(64)), desk.request(prompt(64))
    table = desk.compute(first)
    desk.manager.allocated(first, table, 0, 0)
    desk.report(*desk.step(Progress(first.id, 64)).stores)
    with mock.patch.object(desk.manager.pool, "missing") as missing:
        assert desk.manager.match(second, 60) == Hit(0, needs_load=False)
        desk.manager.allocated(second, table, 60, 0)
        assert not desk.step(Progress(second.id, 64)).stores
        desk.manager.finish(second.id, 64)
        missing.assert_not_called()
    assert not desk.step().stores


def test_a_request_that_the_device_can_serve_by_now_waits_for_nobody() -> None:
    desk = Desk()
    desk.store(prompt(16))
    loads, waits = desk.request(prompt(16)), desk.request(prompt(16))
    desk.manager.match(loads, 0)
    table = desk.blocks_for(16)
    desk.manager.allocated(loads, table, 0, 12)
    assert isinstance(desk.manager.match(waits, 0), NotYet)
    desk.clock.advance(1.0)
    assert desk.manager.match(waits, 12) == Hit(0, needs_load=False)
    assert desk.manager.match(waits, 0) == NotYet(waited_s=0.0), "what it waited before is over"


# --- transfers ----------------------------------------------------------------------------------------


def test_a_transfer_is_done_when_every_rank_said_so_in_any_order_over_many_steps() -> None:
    desk = Desk(ranks=3)
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [first] = desk.step(Progress(request.id, 8)).stores
    [second] = desk.step(Progress(request.id, 16)).stores
    desk.report(second, ranks=[2])
    desk.report(first, ranks=[1, 0])
    desk.step()
    assert desk.manager.pool.cached == 0
    desk.report(second, ranks=[0, 1])
    assert desk.manager.pool.cached == 2
    desk.report(first, ranks=[2])
    assert desk.manager.pool.cached == 4


def test_one_failed_rank_frees_nothing_that_another_still_copies() -> None:
    desk = Desk(ranks=2)
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    desk.report(store, ranks=[0], failed=True)
    assert desk.manager.pool.filling == 4
    desk.report(store, ranks=[1])
    assert (desk.manager.pool.filling, desk.manager.pool.cached) == (0, 0)
    assert desk.manager.stats.store_failures == 1


# --- preemption, finish, abort, reset --------------------------------------------------------------------


def test_preempted_request_comes_back_with_a_new_table_and_loads_what_it_had() -> None:
    engine = make_engine(num_blocks=14, max_batched_tokens=64)
    first = engine.submit(prompt(20), 16)
    second = engine.submit(prompt(20, 1), 16)
    engine.run()
    assert engine.preemptions > 0
    assert first.generated == second.generated == 16
    assert engine.manager.stats.loaded_blocks > 0
    assert engine.manager.pool.pinned == 0


@pytest.mark.parametrize("when", ["matched", "planned", "copying"])
def test_abort_at_any_moment_of_a_load_leaks_nothing_and_frees_nothing_too_early(when: str) -> None:
    desk = Desk(ranks=2)
    desk.store(prompt(16))
    lose_device_of(desk)
    request = desk.request(prompt(17))
    desk.manager.match(request, 0)
    table = desk.blocks_for(17)
    if when != "matched":
        desk.manager.allocated(request, table, 0, 16)
    loads = desk.step().loads if when == "copying" else []
    desk.end(request, table, confirmed=0)
    if when == "copying":
        assert desk.manager.pool.pinned == 4, "the ranks still read the slots"
        assert desk.device.take(desk.device.num_free) is not None
        assert not set(table[0][:4]) & set(desk.device._queue), "and still write the blocks"
        desk.report(loads[0], ranks=[0])
        assert desk.manager.pool.pinned == 4
        outcomes = desk.report(loads[0], ranks=[1])
        assert (outcomes.loaded, outcomes.failed) == ([], []), "a late report of an abandoned load is dropped"
    assert desk.manager.pool.pinned == 0
    assert not desk.device.pins
    assert not desk.manager.has_pending_work()


def test_reset_is_one_call_and_safe_with_copies_in_flight() -> None:
    engine = make_engine(ranks=2)
    served(engine, prompt(32))
    lose_device(engine)
    hold(engine)
    loading = engine.submit(prompt(33), 4)
    storing = engine.submit(prompt(33, 1), 4)
    for _ in range(3):
        engine.step()
    assert loading.id in engine.loading
    engine.manager.reset()
    engine.check()
    assert engine.manager.pool.cached == 0
    assert engine.manager.pool.filling > 0, "memory under a running copy stays reserved"
    other = engine.submit(prompt(32, 2), 1)
    engine.step()
    release(engine)
    engine.run()
    assert loading.generated == storing.generated == 4
    assert other.generated == 1
    assert engine.manager.stats.recomputes == 1, "what was loaded across a reset is not used"
    assert engine.manager.pool.pinned == 0
    assert engine.manager.pool.filling == 0


@pytest.mark.parametrize("mode", Mode)
def test_after_a_reset_a_running_request_stores_nothing_that_rests_on_the_past(mode: Mode) -> None:
    engine = make_engine(mode=mode, num_blocks=24, slots=500, max_batched_tokens=16)
    running = engine.submit(prompt(16), 40)
    for _ in range(4):
        engine.step()
    engine.manager.reset()
    engine.run()
    assert running.generated == 40
    for family in range(1, 12):
        served(engine, prompt(24, family))
    keys: list[list[Key]] = [[]]
    engine.layout.extend_keys(keys, running.hashes)
    assert not any(key in engine.manager.pool for key in keys[0])


def test_finish_never_delays_the_engines_own_free() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    desk.end(request, table)  # frees the table while the store runs
    assert not set(table[0]) & set(desk.device._queue)
    desk.report(store)
    assert set(table[0]) <= set(desk.device._queue)


# --- events -------------------------------------------------------------------------------------------


def test_events_name_parent_tokens_medium_and_group() -> None:
    desk = Desk(slots=4)
    request = desk.store(prompt(16))
    [stored] = desk.manager.take_events()
    assert isinstance(stored, Stored)
    assert stored.parent is None
    assert list(stored.token_ids) == prompt(16)
    assert (stored.medium, stored.group, stored.tokens_per_block) == ("CPU", 0, 4)
    longer = desk.request([*prompt(8), 7, 7, 7, 7])
    table = desk.compute(longer)
    desk.manager.allocated(longer, table, 8, 0)
    desk.report(*desk.step(Progress(longer.id, 12)).stores)
    removed, branch = desk.manager.take_events()
    assert removed == Removed(stored.keys[3:], medium="CPU"), "the tail goes"
    assert isinstance(branch, Stored)
    assert (branch.parent, list(branch.token_ids)) == (stored.keys[1], [7, 7, 7, 7])
    desk.manager.reset()
    assert desk.manager.take_events() == [Cleared("CPU")]
    assert request.num_tokens == 16


def test_a_failed_store_is_never_announced() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    desk.report(*desk.step(Progress(request.id, 16)).stores, failed=True)
    assert desk.manager.take_events() == []


# --- what others leave open -------------------------------------------------------------------------------


def test_flush_on_finish_stores_the_last_full_block_also_with_one_token() -> None:
    engine = make_engine()
    served(engine, prompt(16), max_new_tokens=1)
    assert engine.manager.pool.cached == 4


def test_a_slot_evicted_under_a_living_request_is_stored_again() -> None:
    engine = make_engine(slots=10)
    living = engine.submit(prompt(16), 20)
    for _ in range(4):
        engine.step()
    head = list(engine.manager.pool.index())
    assert len(head) == 4
    engine.submit(prompt(32, 1), 1)
    while not engine.finished or engine.manager.has_pending_work():
        engine.step()
    assert not all(key in engine.manager.pool for key in head), "the other one took their slots"
    stored = engine.manager.stats.stored_blocks
    while living in engine.running:
        engine.step()
    assert engine.manager.stats.stored_blocks == stored, "two that run do not push each other out in turns"
    engine.run()
    lose_device(engine)
    assert served(engine, living.tokens).cached_tokens == 32


def test_a_store_that_failed_is_made_again_when_the_request_ends() -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    desk.report(*desk.step(Progress(request.id, 16)).stores, failed=True)
    desk.end(request, table)
    [again] = desk.step().stores
    desk.report(again)
    assert desk.manager.pool.cached == 4


def test_one_pass_over_both_pools_bridges_gaps_in_both_directions() -> None:
    desk = Desk()
    whole = desk.store(prompt(84))  # 21 blocks, on both sides
    keys: list[list[Key]] = [[]]
    desk.layout.extend_keys(keys, whole.hashes)
    pool = desk.manager.pool
    # Blocks 0-5 on the device only, 6-9 on the host only, 10-20 on the device only.
    for i in [*range(6), *range(10, 21)]:
        pool.forget([keys[0][i]], [pool.index()[keys[0][i]]])
    for i in range(6, 10):
        desk.device.uncache(desk.device.find_run(keys[0], i, i + 1)[0])
    request = desk.request(prompt(85))
    assert tokens_of(desk.manager.match(request, 24)) == 60, "21 blocks in all, 6 of them the engine's own"
    sources = desk.device.find_run(keys[0], 10, 21)
    table = desk.blocks_for(85)
    assert desk.manager.allocated(request, table, 24, 60)
    [load] = desk.step().loads
    assert load.blocks == table[0][6:10]
    assert (load.move_from, load.move_to) == (sources, table[0][10:21])
    desk.report(load)
    assert not desk.device.pins
    # The other way round: the host has head and tail, the device the middle, and the engine itself nothing.
    other = desk.store(prompt(24, 1))
    keys = [[]]
    desk.layout.extend_keys(keys, other.hashes)
    desk.device.reset()
    middle = desk.blocks_for(8)[0]
    for i, block in zip((2, 3), middle, strict=True):
        desk.device.cache(block, keys[0][i])
        pool.forget([keys[0][i]], [pool.index()[keys[0][i]]])
    request = desk.request(prompt(25, 1))
    assert tokens_of(desk.manager.match(request, 0)) == 24
    assert desk.manager.allocated(request, desk.blocks_for(25), 0, 24)
    [load] = desk.step().loads
    assert load.keys == [*keys[0][:2], *keys[0][4:6]]
    assert load.slots == [pool.index()[key] for key in load.keys]


def test_bridging_never_takes_the_blocks_that_the_request_itself_needs() -> None:
    """Pins held on behalf of a request that waits for those very blocks would keep it waiting for ever."""
    engine = make_engine(num_blocks=14)
    served(engine, prompt(40))
    keys: list[list[Key]] = [[]]
    first = engine.submit(prompt(48))
    engine.layout.extend_keys(keys, first.hashes)
    pool = engine.manager.pool
    for i in range(2, 8):
        if keys[0][i] in pool:
            pool.forget([keys[0][i]], [pool.index()[keys[0][i]]])
    engine.device.uncache(engine.device.find_run(keys[0], 0, 1)[0])
    engine.run(max_steps=100)
    assert first.generated == 1


def test_a_hit_on_the_device_refreshes_the_host_copy() -> None:
    engine = make_engine(slots=16, num_blocks=64)
    served(engine, prompt(16))
    hot = list(engine.manager.pool.index())
    served(engine, prompt(16, 1))
    served(engine, [*prompt(16), 5])  # a hit on the device alone
    for family in range(2, 4):
        served(engine, prompt(20, family))
    assert engine.manager.pool.evictions > 0
    assert all(key in engine.manager.pool for key in hot)


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "arc"])
def test_tails_go_before_heads_also_when_heads_were_stored_long_before(policy: str) -> None:
    engine = make_engine(slots=20, num_blocks=200, eviction_policy=policy, max_batched_tokens=8)
    conversation = served(engine, prompt(32))
    served(engine, prompt(16, 1))
    conversation = served(engine, [*conversation.tokens, *range(12)])  # turn 2: a tail, much later
    keys: list[list[Key]] = [[]]
    engine.layout.extend_keys(keys, conversation.hashes)
    for family in range(2, 8):
        served(engine, prompt(8, family))
        there = [key in engine.manager.pool for key in keys[0]]
        assert there == sorted(there, reverse=True), "a block is kept whose parent is gone"


def test_a_prompt_larger_than_the_host_keeps_its_head() -> None:
    engine = make_engine(slots=5)
    served(engine, prompt(64))
    lose_device(engine)
    assert served(engine, prompt(65)).cached_tokens == 20


def test_n_identical_prompts_at_once_cost_one_load() -> None:
    engine = make_engine(num_blocks=200, max_running=16, wait_deadline_s=100.0)
    served(engine, prompt(32))
    lose_device(engine)
    for copier in engine.copiers:
        copier.faults = Faults(delay_polls=3)
    same = [engine.submit(prompt(33), 2) for _ in range(16)]
    engine.run()
    assert engine.manager.stats.loaded_blocks == 8
    assert all(request.cached_tokens == 32 for request in same)


def test_a_late_load_is_waited_for_by_a_request_that_would_compute_into_the_same_blocks(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It was given up, its blocks were computed, and then its bytes arrived, and were wrong."""
    engine = InPlaceEngine(FULL, config(load_deadline_s=3.0), num_blocks=64)
    served(engine, prompt(32))
    lose_device(engine)
    served(engine, prompt(17))  # so the device has a part of it
    hold(engine, only=Direction.LOAD)
    request = engine.submit(prompt(40), 8)
    for _ in range(3):
        engine.step()
        engine.clock.advance(3.1)
    assert not engine.running
    assert engine.manager.stats.overdue_transfers == 1
    assert "passed its deadline" in caplog.text
    release(engine, fail_chance=1.0, only=Direction.LOAD)
    engine.run()
    assert request.generated == 8
    assert engine.manager.stats.recomputes == 1


def test_waiting_for_anothers_load_has_a_deadline() -> None:
    engine = make_engine(num_blocks=200, wait_deadline_s=1.0)
    served(engine, prompt(32))
    lose_device(engine)
    hold(engine)
    first, second = engine.submit(prompt(33)), engine.submit(prompt(33))
    engine.step()
    assert first.id in engine.loading
    assert second in engine.waiting
    engine.clock.advance(1.0)
    engine.step()
    assert second.id in engine.loading, "it does not wait for ever: it loads on its own"
    assert engine.manager.stats.waits_given_up == 1
    release(engine)
    engine.run()


def test_a_request_waits_for_a_store_on_the_way_rather_than_computing() -> None:
    desk = Desk(wait_deadline_s=1.0)
    request = desk.request(prompt(16))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    desk.end(request, table)
    desk.device.reset()  # only the copy on its way still has the content
    again = desk.request(prompt(17))
    assert isinstance(desk.manager.match(again, 0), NotYet)
    desk.report(store)
    assert tokens_of(desk.manager.match(again, 0)) == 16


def test_each_request_is_ready_when_its_own_bytes_have_arrived() -> None:
    desk = Desk(ranks=2)
    for family in (0, 1):
        desk.store(prompt(16, family))
    lose_device_of(desk)
    requests = [desk.request(prompt(17, family)) for family in (0, 1)]
    for request in requests:
        desk.manager.match(request, 0)
        desk.manager.allocated(request, desk.blocks_for(17), 0, 16)
    first, second = desk.step().loads
    assert desk.report(second).loaded == [requests[1].id]
    assert desk.report(first).loaded == [requests[0].id]


def test_with_no_request_left_copies_finish_and_pins_go() -> None:
    engine = make_engine()
    hold(engine)
    engine.submit(prompt(16), 1)
    while engine.num_unfinished:
        engine.step()
    assert engine.manager.has_pending_work()
    assert engine.device.pins
    release(engine)
    engine.step()
    engine.step()
    assert not engine.manager.has_pending_work()
    assert not engine.device.pins
    assert engine.manager.pool.cached == 4


def test_drain_plans_nothing_new_and_says_when_all_has_ended() -> None:
    engine = make_engine()
    running = engine.submit(prompt(16), 20)
    hold(engine)
    for _ in range(4):
        engine.step()
    assert not engine.manager.drain()
    release(engine)
    engine.run()
    assert running.generated == 20
    assert engine.manager.drain()
    assert engine.manager.pool.cached == 4, "what was on the way when the drain began; nothing after"
    assert engine._ask(engine.submit(prompt(17)), 0) == Hit(0, needs_load=False)


def test_a_failed_load_is_a_recompute_and_its_keys_are_forgotten_before_the_next_lookup() -> None:
    engine = make_engine(ranks=2)
    served(engine, prompt(32))
    lose_device(engine)
    engine.copiers[1].faults = Faults(fail_chance=1.0)
    request = engine.submit(prompt(33), 3)
    engine.step()
    assert engine.manager.stats.load_failures == 1
    assert engine.manager.pool.cached == 0
    release(engine)
    engine.run()
    assert (request.generated, request.cached_tokens) == (3, 0)
    assert engine.manager.stats.load_failures == 1
    assert engine.manager.stats.recomputes == 1


def test_reports_for_an_unknown_transfer_or_rank_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk()
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    for _ in range(3):
        desk.manager.report(
            [Report(TransferId(99), Rank(0), Outcome.DONE), Report(store.id, Rank(7), Outcome.FAILED)]
        )
    desk.check()
    assert desk.manager.stats.unknown_reports == 6
    assert len(caplog.records) == 2
    desk.report(store)
    desk.report(store)
    assert desk.manager.stats.late_reports == 1
    assert desk.manager.pool.cached == 4
