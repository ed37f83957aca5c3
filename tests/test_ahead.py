"""Lazy mode where all that the device may evict is safe: nobody walks, and no load waits for a walk.

That it is safe when they say so, check() proves after every step of every test.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from forebay import BlockId, FullAttention, Hit, Key, KVLayout, Mode, NotYet, Progress, SlidingWindow
from forebay.testing import TinyRequest
from tests.builders import FULL, Desk, config, keys_of, make_engine, prompt
from tests.watched import LateFreeingEngine


def all_safe(num_blocks: int = 25) -> Desk:
    """A prompt was stored as it ran, for the device has few blocks to spare, and has ended."""
    desk = Desk(mode=Mode.LAZY, num_blocks=num_blocks, slots=100, max_batched_tokens=16)
    desk.store(prompt(64))
    assert desk.manager._stores.ahead.is_all_safe
    return desk


def sharing() -> tuple[Desk, TinyRequest, list[list[BlockId]]]:
    """A request and its blocks. The host has what goes into the last of them; the first four are what another one
    computed, which is gone, and nobody has stored them."""
    desk = all_safe(17)
    desk.device.reset()
    running, waiting = desk.request(prompt(16)), desk.request(prompt(33))
    keys, pool = keys_of(desk, running), desk.manager.pool
    pool.forget(keys, [pool.index()[key] for key in keys])
    table = desk.compute(running)
    desk.manager.allocated(running, table, 0, 0)
    assert desk.manager.match(waiting, 16) == NotYet(0.0)
    desk.step()
    assert desk.manager.match(waiting, 16) == Hit(16, needs_load=True)
    desk.device.use(table[0])
    desk.manager.preempt(running.id)
    desk.device.free(reversed(table[0]))
    return desk, waiting, [table[0] + desk.blocks_for(17)[0]]


def computed(desk: Desk, tokens: Sequence[int]) -> tuple[TinyRequest, list[list[BlockId]]]:
    """A request that has computed its prompt, and its table."""
    request = desk.request(tokens)
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    return request, table


def gap_in_the_middle() -> tuple[Desk, list[Key]]:
    """A walk has seen all of a prompt on the device. Since then, the device has lost its first four blocks, and
    the host the four behind them."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=32, wait_deadline_s=0.0)
    keys = keys_of(desk, desk.store(prompt(64)))
    desk.manager._stores.ahead.look_again()
    desk.manager.match(desk.request(prompt(64)), 0)  # so the walk looks far enough
    desk.step()
    for block in desk.device.find_run(keys, 0, 4):
        desk.device.uncache(block)
    pool = desk.manager.pool
    pool.forget(keys[4:8], [pool.index()[key] for key in keys[4:8]])
    return desk, keys


@pytest.mark.parametrize("delay_polls", [0, 1, 3])
def test_chats_that_the_host_has_wait_for_no_walk_but_the_first_ones(delay_polls: int) -> None:
    engine = make_engine(mode=Mode.LAZY, num_blocks=129, slots=2000, max_batched_tokens=64, max_running=8)
    for copier in engine.copiers:
        copier.faults.delay_polls = delay_polls
    chats = [prompt(44, family) for family in range(24)]
    waited = []
    for turn in range(4):
        for wave in range(0, 24, 8):
            before = engine.manager.stats.not_yet_answers
            for chat in chats[wave : wave + 8]:
                engine.submit(chat, 4)
            while engine.num_unfinished:
                engine.step()
            waited.append(engine.manager.stats.not_yet_answers > before)
        chats = [[*chat, *range(turn, turn + 4)] for chat in chats]
    assert engine.manager.stats.loaded_blocks > 800
    assert waited == [False] * 3 + [True] + [False] * 8


def test_what_loads_ask_for_counts_where_they_wait_for_nothing() -> None:
    """It says how far a walk looks, and whether the device has blocks to spare."""
    desk = all_safe()
    desk.device.reset()
    ahead = desk.manager._stores.ahead
    reach = ahead.reach
    assert desk.manager.match(desk.request(prompt(64)), 0) == Hit(60, needs_load=True)
    assert not desk.manager.is_settled, "the next step takes note"
    desk.step()
    assert ahead.reach == reach + 15
    assert desk.manager.is_settled, "once"


def test_blocks_that_nobody_confirmed_are_not_safe() -> None:
    """A request that is aborted may have blocks with a key whose tokens the engine has not heard of yet."""
    desk = all_safe()
    request, table = computed(desk, prompt(64, 7))
    desk.end(request, table, confirmed=60)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_of_a_store_that_is_not_wanted_any_more_are_not_safe() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=16)
    request, table = computed(desk, prompt(64))
    [store] = desk.step(Progress(request.id, 64)).stores
    desk.end(request, table)
    desk.manager.reset()
    desk.step()
    desk.report(store)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_waiting_request_shares_are_not_safe() -> None:
    """It lets go of them last if it is aborted, and nobody stores them."""
    desk, waiting, table = sharing()
    desk.manager.allocated(waiting, table, 16, 16)
    [load] = desk.step().loads
    desk.end(waiting, table)
    desk.report(load)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_of_a_load_that_was_refused_are_not_safe() -> None:
    """Some engines free them only when they ask again."""
    desk, refused, table = sharing()
    assert desk.manager.allocated(refused, table, 16, 20), "more than it was offered: it waits for the outcome"
    desk.step()
    assert desk.report().failed == [refused.id]
    desk.manager.allocated(desk.request(prompt(4, 7)), desk.blocks_for(4), 0, 0)
    desk.step()  # walks, for blocks were taken
    desk.device.free(reversed(table[0]))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_of_a_load_that_failed_are_not_safe() -> None:
    """Some engines free them only when they ask again."""
    desk, unlucky, table = sharing()
    desk.manager.allocated(unlucky, table, 16, 16)
    assert desk.report(*desk.step().loads, failed=True).failed == [unlucky.id]
    desk.step()
    desk.device.free(reversed(table[0]))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_load_copies_from_are_not_safe() -> None:
    """No walk sees them until it has ended."""
    desk, keys = gap_in_the_middle()
    request = desk.request(prompt(33))
    assert desk.manager.match(request, 0) == Hit(32, needs_load=True), "half of it on the device"
    desk.manager.allocated(request, desk.blocks_for(33), 0, 32)
    step = desk.step()
    assert not step.stores
    desk.report(*step.loads)
    assert not desk.manager._stores.ahead.is_all_safe
    [store] = desk.step().stores
    assert set(store.keys) == set(keys[4:8])


def test_blocks_of_a_request_that_is_preempted_are_not_safe() -> None:
    desk = all_safe()
    request, table = computed(desk, prompt(64, 7))
    desk.manager.preempt(request.id)
    desk.device.free(reversed(table[0]))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_window_drops_are_not_safe() -> None:
    """Nobody tells of them."""
    layout = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=8)), 4, 16)
    desk = Desk(layout, mode=Mode.LAZY, num_blocks=17, slots=100, max_batched_tokens=16)
    _, table = computed(desk, prompt(16))
    desk.step()
    desk.device.free(table[1][:2])
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_somebody_else_has_now_do_not_keep_the_rest_from_being_safe() -> None:
    desk = all_safe()
    aborted, running = desk.request(prompt(64, 7)), desk.request(prompt(65, 7))
    table = desk.compute(aborted)
    desk.manager.allocated(aborted, table, 0, 0)
    desk.end(aborted, table, confirmed=0)
    assert not desk.manager._stores.ahead.is_all_safe
    desk.device.use(table[0])
    desk.manager.allocated(running, [table[0] + desk.blocks_for(1)[0]], 64, 0)
    desk.step()
    assert desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_match_held_in_this_pass_are_not_safe() -> None:
    """A walk that does not see them must not say that it saw all."""
    desk, keys = gap_in_the_middle()
    assert desk.manager.match(desk.request(prompt(33)), 0) == Hit(32, needs_load=True), "half of it on the device"
    assert len(desk.device.pins) == 4
    assert not desk.step().stores
    [store] = desk.step().stores
    assert set(store.keys) == set(keys[4:8])


def test_blocks_that_are_freed_late_are_not_safe() -> None:
    """An engine that schedules ahead frees what an ended request held when the step in flight has ended."""
    desk = all_safe()
    request, table = computed(desk, prompt(64, 7))
    desk.manager.finish(request.id, 60)
    desk.step()
    desk.step()
    desk.device.free(reversed(table[0]))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe
    desk.report(*desk.step().stores)
    assert keys_of(desk, request)[-1] in desk.manager.pool


def test_what_a_draining_manager_does_not_store_is_not_safe() -> None:
    desk = all_safe()
    request, table = computed(desk, prompt(64, 7))
    desk.manager.drain()
    desk.end(request, table)
    assert not desk.manager._stores.ahead.is_all_safe


def test_what_may_be_kept_after_all_is_not_safe() -> None:
    """A request that must not be kept has told of its keys; then one that may be has the same, and is aborted
    before it has computed them."""
    desk = all_safe()
    secret, public = desk.request(prompt(64, 7), may_store=False), desk.request(prompt(64, 7))
    table, public_table = desk.compute(secret), desk.blocks_for(16)
    desk.manager.allocated(secret, table, 0, 0)
    desk.step(Progress(secret.id, 64))
    desk.manager.allocated(public, public_table, 0, 0)
    desk.end(public, public_table, confirmed=0)
    desk.step()
    assert desk.manager._stores.ahead.is_all_safe, "as long as it runs"
    desk.end(secret, table)
    assert not desk.manager._stores.ahead.is_all_safe


@pytest.mark.parametrize(
    ("stored", "others_are_safe", "is_stored_at_its_end"),
    [(48, True, True), (44, True, False), (48, False, False)],
)
def test_what_is_left_of_a_request_is_stored_at_its_end_if_it_is_little_and_all_else_is_safe(
    stored: int, others_are_safe: bool, is_stored_at_its_end: bool
) -> None:
    """Else the walk comes to it in time: the device has blocks to spare by now."""
    desk = Desk(mode=Mode.LAZY, num_blocks=41, slots=200, max_batched_tokens=16)
    request, aborted = desk.request(prompt(64)), desk.request(prompt(72, 7))
    table, other_table = desk.compute(request), desk.blocks_for(72) if others_are_safe else desk.compute(aborted)
    desk.manager.allocated(request, table, 0, 0)
    desk.manager.allocated(aborted, other_table, 0, 0)
    desk.report(*desk.step(Progress(request.id, stored)).stores)
    assert len(desk.manager.pool.index()) == stored // 4
    desk.end(aborted, other_table, confirmed=0)
    desk.end(request, table)
    assert desk.manager.has_pending_stores() is is_stored_at_its_end
    assert desk.manager._stores.ahead.is_all_safe is is_stored_at_its_end


def test_blocks_that_the_host_loses_before_they_are_freed_are_not_safe() -> None:
    """Two requests end in one pass. What the first one found on the device is on the host; the second one's blocks
    push some of it out there, before the engine has freed either's."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=20, max_batched_tokens=16)
    before = desk.request(prompt(64))
    known = desk.compute(before)
    desk.manager.allocated(before, known, 0, 0)
    desk.step()
    desk.end(before, known)
    desk.report(*desk.step().stores)
    other, first = desk.request(prompt(28, 3)), desk.request(prompt(65))
    others = desk.compute(other)
    desk.manager.allocated(other, others, 0, 0)
    desk.device.use(known[0])
    firsts = [known[0] + desk.blocks_for(1)[0]]
    desk.manager.allocated(first, firsts, 64, 0)
    desk.step()
    desk.manager.finish(first.id, 64)
    desk.manager.finish(other.id, 28)
    assert desk.manager.pool.evictions == 3
    desk.report(*desk.step().stores)
    for blocks in (firsts[0], others[0]):
        desk.device.free(reversed(blocks))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe


def test_who_never_had_blocks_changes_nothing() -> None:
    desk = all_safe()
    request = desk.request(prompt(16, 7), may_store=False)
    desk.manager.match(request, 0)
    desk.manager.finish(request.id, 0)
    assert desk.manager._stores.ahead.is_all_safe


def test_nothing_is_called_safe_that_is_not_in_an_engine_that_frees_late() -> None:
    safe = preemptions = 0
    for seed in range(10):
        rng = Random(seed)
        slots = rng.choice([20, 60, 400])
        engine = LateFreeingEngine(
            FULL,
            config(slots, mode=Mode.LAZY),
            num_blocks=rng.choice([30, 60]),
            slots=slots,
            max_batched_tokens=rng.choice([16, 64]),
            max_running=8,
        )
        for _ in range(150):
            if rng.random() < 0.3:
                engine.submit(prompt(rng.randrange(5, 60), rng.randrange(8)), rng.randrange(1, 20))
            if rng.random() < 0.03 and engine.running:
                engine.abort(rng.choice(engine.running))
            engine.step()
            safe += engine.manager._stores.ahead.is_all_safe
        engine.run()
        preemptions += engine.preemptions
    assert safe > 300
    assert preemptions > 100
