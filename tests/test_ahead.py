"""Lazy mode where all that the device may evict is safe: nobody walks, and no load waits for a walk.

That it is safe when they say so, check() proves after every step of every test.
"""

from __future__ import annotations

import pytest

from forebay import Hit, Mode
from tests.builders import Desk, make_engine, prompt


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
    assert ahead.reach == reach + 14, "15 blocks, of which a step forgets a 64th"
    assert desk.manager.is_settled, "once"


def test_blocks_that_nobody_confirmed_are_not_safe() -> None:
    """A request that is aborted may have blocks with a key whose tokens the engine has not heard of yet."""
    desk = all_safe()
    request = desk.request(prompt(64, 7))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    desk.end(request, table, confirmed=60)
    assert not desk.manager._stores.ahead.is_all_safe
