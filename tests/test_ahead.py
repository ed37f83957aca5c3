"""Lazy mode where all that the device may evict is safe: nobody walks, and no load waits for a walk.

That it is safe when they say so, check() proves after every step of every test, and test_state_machine.py with
engines that free blocks late.
"""

from __future__ import annotations

import pytest

from forebay import Hit, Mode, NotYet, Progress
from tests.builders import Desk, keys_of, make_engine, prompt


def all_safe() -> Desk:
    """A prompt was stored as it ran, for the device has few blocks to spare, and has ended."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=16)
    desk.store(prompt(64))
    assert desk.manager._stores.ahead.is_all_safe
    return desk


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
    request = desk.request(prompt(64, 7))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    desk.end(request, table, confirmed=60)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_of_a_store_that_is_not_wanted_any_more_are_not_safe() -> None:
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=16)
    request = desk.request(prompt(64))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    [store] = desk.step(Progress(request.id, 64)).stores
    desk.end(request, table)
    desk.manager.reset()
    desk.step()
    desk.report(store)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_waiting_request_shares_are_not_safe() -> None:
    """It lets go of them last if it is aborted, and nobody stores them."""
    desk = all_safe()
    desk.device.reset()
    unlucky = desk.request(prompt(17))
    assert desk.manager.match(unlucky, 0) == Hit(16, needs_load=True)
    unlucky_table = desk.blocks_for(17)
    desk.manager.allocated(unlucky, unlucky_table, 0, 16)
    desk.report(*desk.step().loads, failed=True)  # the host has forgotten the first four blocks
    desk.end(unlucky, unlucky_table, confirmed=0)
    running = desk.request(prompt(16))
    table = desk.compute(running)
    desk.manager.allocated(running, table, 0, 0)
    waiting = desk.request(prompt(33))
    assert desk.manager.match(waiting, 16) == NotYet(0.0)
    desk.step()
    assert desk.manager.match(waiting, 16) == Hit(16, needs_load=True)
    desk.device.use(table[0])
    shared = [table[0] + desk.blocks_for(17)[0]]
    desk.manager.allocated(waiting, shared, 16, 16)
    desk.manager.preempt(running.id)
    desk.device.free(reversed(table[0]))
    [load] = desk.step().loads
    desk.end(waiting, shared)
    desk.report(load)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_that_a_match_held_in_this_pass_are_not_safe() -> None:
    """A walk that does not see them must not say that it saw all."""
    desk = Desk(mode=Mode.LAZY, num_blocks=25, slots=100, max_batched_tokens=32, wait_deadline_s=0.0)
    whole = desk.store(prompt(64))
    keys = keys_of(desk, whole)
    for block in desk.device.find_run(keys, 0, 4):
        desk.device.uncache(block)
    pool = desk.manager.pool
    pool.forget(keys[4:], [pool.index()[key] for key in keys[4:]])
    assert desk.manager.match(desk.request(prompt(33)), 0) == Hit(32, needs_load=True), "half of it on the device"
    assert len(desk.device.pins) == 4
    [store] = desk.step().stores
    [rest] = desk.step().stores
    assert {*store.keys, *rest.keys} == set(keys[4:]), "the first walk did not see what the match held"


def test_blocks_that_are_freed_late_are_not_safe() -> None:
    """An engine that schedules ahead frees what an ended request held when the step in flight has ended."""
    desk = all_safe()
    request = desk.request(prompt(64, 7))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
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
    request = desk.request(prompt(64, 7))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    desk.manager.drain()
    desk.end(request, table)
    assert not desk.manager._stores.ahead.is_all_safe


def test_what_may_be_kept_after_all_is_not_safe() -> None:
    """A request that must not be kept has told of its keys; then one that may be has the same, and ends first."""
    desk = all_safe()
    secret, public = desk.request(prompt(32, 7), may_store=False), desk.request(prompt(32, 7))
    table = desk.compute(secret)
    desk.manager.allocated(secret, table, 0, 0)
    desk.step(Progress(secret.id, 32))
    desk.device.use(table[0])
    desk.manager.allocated(public, table, 32, 0)
    desk.end(public, table, confirmed=0)
    desk.step()
    desk.end(secret, table)
    assert not desk.manager._stores.ahead.is_all_safe


def test_blocks_of_a_load_that_was_refused_are_not_safe() -> None:
    desk = all_safe()
    running = desk.request(prompt(16, 7))
    table = desk.compute(running)
    desk.manager.allocated(running, table, 0, 0)
    refused = desk.request(prompt(33, 7))
    desk.device.use(table[0])
    shared = [table[0] + desk.blocks_for(17)[0]]
    assert desk.manager.allocated(refused, shared, 16, 16), "what it was not offered: it waits for the outcome"
    desk.manager.preempt(running.id)
    desk.device.free(reversed(table[0]))
    desk.step()
    assert desk.report().failed == [refused.id]
    desk.device.free(reversed(shared[0]))
    desk.check()
    assert not desk.manager._stores.ahead.is_all_safe
