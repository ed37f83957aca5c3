"""What the ghost predicts, against pools that have that size."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path as FilePath
from random import Random
from statistics import mean
from typing import cast
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import FullAttention, Key, KVLayout, Mode, SlidingWindow
from forebay.errors import InvariantError
from forebay.ghost import MULTIPLES, Ghost
from forebay.plan.replay import Replaying, Setup
from forebay.plan.traces import open_trace
from tests.builders import FULL, hold, lose_device, make_engine, prompt, served
from tests.plan.paths import Path, path_lists, random_paths

CHAT = FilePath(__file__).parent / "plan" / "chat.jsonl"


def _keys(path: Path) -> list[list[Key]]:
    return [[Key(repr(path[: i + 1]).encode()) for i in range(len(path))]]


def _ask(ghost: Ghost, path: Path, device_tokens: int = 0) -> None:
    """A request that ends with a full block and is answered with a token."""
    keys = _keys(path)
    ghost.ended(keys, ghost.asked(keys, len(path) * 4 + 1, device_tokens))
    ghost.catch_up()


def _lru_hits(paths: list[Path], size: int) -> int:
    """Of a pool in which, of what was used together, the tail goes first."""
    cache: OrderedDict[Path, None] = OrderedDict()
    hits = 0
    for path in paths:
        heads = [path[: i + 1] for i in range(len(path))]
        hits += next((i for i, head in enumerate(heads) if head not in cache), len(heads))
        for head in reversed(heads):
            cache[head] = None
            cache.move_to_end(head)
        while len(cache) > size:
            cache.popitem(last=False)
    return hits


@given(path_lists(max_requests=40, max_new=4).map(lambda paths: [path[:8] for path in paths]), st.integers(1, 20))
@settings(max_examples=100)
def test_short_prompts_are_predicted_exactly(paths: list[Path], half: int) -> None:
    ghost = Ghost(FULL, 2 * half, 0)
    for path in paths:
        _ask(ghost, path)
        ghost.check()
    blocks = max(1, sum(map(len, paths)))
    for multiple, share in zip(MULTIPLES, ghost.predicted, strict=True):
        assert share == pytest.approx(_lru_hits(paths, int(2 * half * multiple)) / blocks, abs=0.0001), multiple


@pytest.mark.parametrize("mode", Mode)
def test_prediction_is_what_a_replay_with_that_memory_measures(mode: Mode) -> None:
    """In blocks: with the memory there is, with half, and with more. Within what a sample can tell: two points."""
    trace = open_trace(CHAT)
    layout = KVLayout((FullAttention(128),), tokens_per_hash=128, bytes_per_block=1)
    asked = sum(request.input_tokens // 128 for request in trace)

    def replayed(slots: int) -> tuple[float, Replaying]:
        running = Replaying(128, Setup(layout, 200, slots, mode, max_batched_tokens=2048, predicts=True))
        for request in trace:
            running.serve(request)
        return (running.device_tokens + running.host_tokens) / 128 / asked, running

    same, running = replayed(800)
    assert running.manager is not None
    running.manager.check()
    predicted = running.manager.predicted
    assert predicted is not None
    assert predicted.same == pytest.approx(same, abs=0.02)
    assert predicted.half == pytest.approx(replayed(400)[0], abs=0.02)
    assert predicted.twice == pytest.approx(replayed(1600)[0], abs=0.02)
    assert predicted.four_times == pytest.approx(replayed(3200)[0], abs=0.02)
    assert predicted.twice > predicted.same + 0.05, "the trace says nothing about memory"


def test_long_prompts_are_predicted_from_a_few_of_their_blocks() -> None:
    """Chats of up to 700 blocks, with a pool for a part of them: what a pool of each size really has."""
    paths = random_paths(seed=3, requests=400, max_new=300, reach=8)
    ghost = Ghost(FULL, 4000, 0)
    for path in paths:
        _ask(ghost, path)
    ghost.check()
    blocks = sum(map(len, paths))
    for multiple, share in zip(MULTIPLES, ghost.predicted, strict=True):
        assert share == pytest.approx(_lru_hits(paths, int(4000 * multiple)) / blocks, abs=0.02), multiple


def test_a_sample_predicts_what_all_blocks_would() -> None:
    """Chats that grow long, and come back soon or late. A sample knows a block or two of each, and what those
    stand for is not cut to what the prompt has: then it would predict too little."""
    rng = Random(7)
    with mock.patch("forebay.ghost._MAX_KNOWN", 2048):
        samples = [Ghost(FULL, 4000, 0) for _ in range(16)]
    everything = Ghost(FULL, 4000, 0)
    chats: list[list[int]] = [[] for _ in range(400)]
    for _ in range(6000):
        number = int(400 * rng.random() ** 3)
        chat = chats[number]
        if len(chat) > 300:
            chat = chats[number] = []
        chat += [rng.getrandbits(60) for _ in range(rng.randrange(1, 40))]
        for shift, ghost in enumerate((everything, *samples)):
            # Numbers are their own hashes, the same in every run; each ghost has other low bits of them.
            keys = cast("list[list[Key]]", [[key >> shift for key in chat]])
            ghost.ended(keys, ghost.asked(keys, len(chat) * 4 + 1, 0))
    assert everything._recency.rate == 1
    assert everything.predicted.twice > everything.predicted.half + 0.1, "the chats say nothing about memory"
    for ghost in samples:
        ghost.check()
        assert ghost._recency.rate < 0.2
    for number, share in enumerate(everything.predicted):
        assert mean(ghost.predicted[number] for ghost in samples) == pytest.approx(share, abs=0.015)


@pytest.mark.parametrize("blocks", [18, 36, 61])
def test_a_sample_counts_the_end_of_a_prompt_as_it_is(blocks: int) -> None:
    """Prompts that are all as long: the last block looked at always has fewer neighbours than it could, or more.
    And no token lies behind the last block, which is always computed."""
    rng = Random(3)
    with mock.patch("forebay.ghost._MAX_KNOWN", 2048):
        samples = [Ghost(FULL, 10**6, 0) for _ in range(24)]
    prompts = [[rng.getrandbits(60) for _ in range(blocks)] for _ in range(400)]
    for chain in 3 * prompts:
        for shift, ghost in enumerate(samples):
            keys = cast("list[list[Key]]", [[key >> shift for key in chain]])
            ghost.ended(keys, ghost.asked(keys, blocks * 4, 0))
    for ghost in samples:
        ghost.catch_up()
        ghost.check()
        assert ghost._recency.rate < 0.5
    expected = 2 / 3 * (blocks - 1) / blocks
    assert mean(ghost.predicted.same for ghost in samples) == pytest.approx(expected, abs=0.02)


def test_memory_is_bounded_and_what_lies_too_deep_is_forgotten() -> None:
    ghost = Ghost(FULL, 20, 0)
    for i in range(3000):
        _ask(ghost, tuple(range(10 * i, 10 * i + 10)))
    assert ghost._recency.num_known < 4_000
    _ask(ghost, tuple(range(10)))
    ghost.check()
    assert ghost.predicted.eight_times == 0
    large = Ghost(FULL, 10**7, 0)
    for i in range(20_000):
        _ask(large, (i, i, i, i, i))
    assert large._recency.num_known < 66_000
    assert large._recency.rate < 1
    large.check()


def test_blocks_on_the_device_are_found_with_any_memory() -> None:
    ghost = Ghost(FULL, 1, 0)
    _ask(ghost, (1, 2, 3, 4), device_tokens=8)
    assert ghost.predicted == (0.5,) * len(MULTIPLES)


def test_blocks_on_the_device_count_once_if_a_sample_knows_them_too() -> None:
    with mock.patch("forebay.ghost._MAX_KNOWN", 1024):
        ghost = Ghost(FULL, 100_000, 0)
    prompts = [_keys(tuple(range(100 * i, 100 * i + 16))) for i in range(500)]
    for device_tokens in (0, 64):
        for keys in prompts:
            ghost.ended(keys, ghost.asked(keys, 65, device_tokens))
    ghost.catch_up()
    ghost.check()
    assert ghost._recency.rate < 1
    assert ghost.predicted == (0.5,) * len(MULTIPLES)


def test_the_last_token_is_always_computed() -> None:
    ghost = Ghost(FULL, 100, 0)
    for _ in range(2):
        keys = _keys((1, 2))
        ghost.ended(keys, ghost.asked(keys, 8, 0))
    ghost.catch_up()
    assert ghost.predicted.same == 0.25


def test_the_answer_is_there_for_the_next_turn() -> None:
    ghost = Ghost(FULL, 100, 0)
    answered = _keys((1, 2, 3, 4))
    asked = [answered[0][:2]]
    count = ghost.asked(asked, 9, 0)
    ghost.ended(answered, count)
    _ask(ghost, (1, 2, 3, 4))
    assert ghost.predicted.same == pytest.approx(4 / 6, abs=0.001)


def test_equal_prompts_at_the_same_time_are_counted_in_the_order_they_came() -> None:
    """The second is admitted before the first has ended, and finds what that has stored by then."""
    ghost = Ghost(FULL, 100, 0)
    keys = _keys((1, 2, 3, 4))
    counts = [ghost.asked(keys, 17, 0) for _ in range(2)]
    for count in counts:
        ghost.ended(keys, count)
    ghost.catch_up()
    assert ghost.predicted.same == 0.5


def test_what_was_asked_for_long_ago_counts_less() -> None:
    ghost = Ghost(FULL, 10, 0)
    for _ in range(200):
        _ask(ghost, (1, 2, 3, 4))
    assert ghost.predicted.same > 0.99
    for i in range(2000):
        _ask(ghost, (i + 10,))
    assert ghost.predicted.same < 0.2


def test_other_groups_take_slots_as_well() -> None:
    layout = KVLayout((SlidingWindow(4, window_tokens=4), FullAttention(4)), tokens_per_hash=4, bytes_per_block=16)
    ghost = Ghost(layout, 8, 0)
    for _ in range(2):
        for start in (0, 10):
            path = tuple(range(start, start + 4))
            keys = [_keys(path)[0], _keys(path)[0]]
            ghost.ended(keys, ghost.asked(keys, 17, 0))
    ghost.catch_up()
    assert ghost.predicted.same == 0
    assert ghost.predicted.twice == 0.5


def test_it_catches_up_when_nobody_waits_or_with_many_at_once() -> None:
    engine = make_engine(slots=64)
    ghost = engine.manager._ghost
    assert ghost is not None
    engine.submit(prompt(40))
    engine.submit(prompt(40))
    engine.step()
    assert len(ghost._noted) == 2
    engine.run()
    assert not ghost._noted
    assert engine.manager.predicted is not None
    assert engine.manager.predicted.same > 0
    for i in range(100):
        keys = _keys((i, 1, 2))
        ghost.ended(keys, ghost.asked(keys, 13, 0))
        assert len(ghost._noted) < 32
    assert ghost._asked > 64 * 3


def test_it_catches_up_also_if_the_last_one_leaves_while_it_waits() -> None:
    engine = make_engine(slots=64)
    served(engine, prompt(40))
    lose_device(engine)
    hold(engine)
    waiting = engine.submit(prompt(40))
    engine.step()
    ghost = engine.manager._ghost
    assert ghost is not None
    assert ghost._noted
    engine.abort(waiting)
    assert not ghost._noted


def test_reset_empties_the_ghost_too() -> None:
    engine = make_engine(slots=64)
    for _ in range(2):
        engine.submit(prompt(40))
        engine.run()
        engine.reset_cache()
    assert engine.manager.predicted is not None
    assert set(engine.manager.predicted) == {0.0}
    engine.submit(prompt(40))
    engine.run()
    engine.submit(prompt(40))
    engine.run()
    assert engine.manager.predicted.same > 0.2


def test_check_covers_the_ghost() -> None:
    engine = make_engine()
    engine.submit(prompt(40))
    engine.run()
    assert engine.manager._ghost is not None
    engine.manager._ghost._found[-1] = -1.0
    with pytest.raises(InvariantError, match="more memory finds less"):
        engine.manager.check()


def test_a_manager_may_do_without() -> None:
    running = Replaying(4, Setup(FULL, 20, 20))
    assert running.manager is not None
    assert running.manager.predicted is None
    assert replace(running.setup, predicts=True).engine()[1].predicted is not None  # type: ignore[union-attr]
