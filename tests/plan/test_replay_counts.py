"""What a replay comes to: counts that must not change, bounds, and what is told besides."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path as FilePath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import FullAttention, KVLayout
from forebay.config import Mode
from forebay.errors import ConfigError, PolicyError
from forebay.plan.curve import read_curves
from forebay.plan.replay import Setup, replay
from forebay.plan.request import TraceRequest
from forebay.plan.speed import Queue, Speeds
from forebay.plan.traces import open_trace
from forebay.policies import POLICIES
from tests.plan.paths import ListTrace, Path, path_lists
from tests.plan.test_replay import BLOCK, Both, layout

CHAT = FilePath(__file__).with_name("chat.jsonl")
CHAT_LAYOUT = KVLayout((FullAttention(128),), tokens_per_hash=128, bytes_per_block=128 * 1000)
SIZES = (100, 400, 1600)
CHAT_SETUP = Setup(CHAT_LAYOUT, device_blocks=200, slots=400, max_batched_tokens=2048)


# Loaded from the host with each of the sizes, in tokens. 317,952 more are found on the device.
GOLDEN = {
    (Mode.EAGER, "lru"): (512, 118_144, 318_592),
    (Mode.EAGER, "s3fifo"): (38_400, 124_544, 322_176),
    (Mode.EAGER, "arc"): (42_880, 123_904, 326_272),
    (Mode.LAZY, "lru"): (24_064, 147_072, 315_904),
    (Mode.LAZY, "s3fifo"): (32_128, 134_272, 328_704),
    (Mode.LAZY, "arc"): (43_264, 147_456, 332_160),
}


@pytest.mark.parametrize(("mode", "policy"), GOLDEN)
def test_golden_counts_of_the_bundled_trace(mode: Mode, policy: str) -> None:
    found = [
        replay(open_trace(CHAT), replace(CHAT_SETUP, slots=slots, mode=mode, policy=policy)) for slots in SIZES
    ]
    assert tuple(each.host_tokens for each in found) == GOLDEN[mode, policy]
    assert {each.device_tokens for each in found} == {317_952}
    assert {each.input_tokens for each in found} == {sum(each.input_tokens for each in open_trace(CHAT))}


def test_golden_curve_of_the_bundled_trace() -> None:
    curves = read_curves(open_trace(CHAT), SIZES)
    assert [round(curves.lru.share_at(size) * 7626) for size in SIZES] == [2046, 3509, 5181]
    assert [round(curves.best.share_at(size) * 7626) for size in SIZES] == [3551, 4875, 5249]
    assert curves.lru.distinct_blocks == 2377


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", POLICIES)
def test_bundled_trace_through_the_tiny_engine(mode: Mode, policy: str) -> None:
    """Its shape with blocks of a few tokens, so that every byte can be looked at."""
    both = Both(Setup(layout(), 120, 300, mode, policy, max_batched_tokens=64))
    for request in list(open_trace(CHAT))[:150]:
        both.serve(tuple(request.prefixes), request.input_tokens % BLOCK, request.output_tokens // 32)
    assert both.replaying.host_tokens > 100 * BLOCK
    assert both.replaying.device_tokens > 100 * BLOCK


@given(path_lists(max_requests=25, max_new=5), st.integers(20, 60), st.integers(1, 60), st.integers(0, 1))
@settings(max_examples=40)
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", POLICIES)
def test_best_possible_bounds_every_policy(
    policy: str, mode: Mode, paths: list[Path], device_blocks: int, slots: int, report_steps: int
) -> None:
    """Device and host together are no better than the best possible cache of that size."""
    trace, size = ListTrace.of(paths, BLOCK), device_blocks - 1 + slots
    found = replay(trace, Setup(layout(), device_blocks, slots, mode, policy, 64, report_steps))
    best = read_curves(trace, [size]).best
    most = best.hit_share[list(best.sizes).index(size)] * best.num_blocks
    if not found.refused:
        assert (found.device_tokens + found.host_tokens) / BLOCK <= most + 1e-6


@given(path_lists(max_requests=25, max_new=5), st.integers(30, 60))
@settings(max_examples=60)
def test_with_room_for_everything_nothing_is_computed_twice(paths: list[Path], device_blocks: int) -> None:
    """A bit more memory need not help a bit more behind a device: a load changes which blocks that has later on.
    But with room for everything, eager stores keep everything."""
    found = replay(ListTrace.of(paths, BLOCK), Setup(layout(), device_blocks, 5000, max_batched_tokens=64))
    seen: set[Path] = set()
    expected = 0
    for path in paths:
        heads = [path[: i + 1] for i in range(len(path))]
        hits = next((i for i, head in enumerate(heads) if head not in seen), len(path))
        expected += min(hits, len(path) - 1)  # the last token is computed, and its block with it
        seen.update(heads)
    assert found.device_tokens + found.host_tokens == expected * BLOCK
    assert found.evictions == 0


def test_without_host_memory_only_the_device_is_left() -> None:
    off = replay(open_trace(CHAT), replace(CHAT_SETUP, slots=0))
    assert off.mode == "off"
    assert off.device_tokens == 317_952
    assert off.host_tokens == off.host_bytes == off.bytes_stored == off.bytes_loaded == off.occupied_slots == 0


def test_counts_and_moments_agree() -> None:
    found = replay(open_trace(CHAT), CHAT_SETUP)
    assert found.requests == 400
    assert found.host_bytes == 400 * 128_000
    assert found.bytes_loaded == found.host_tokens * 1000
    assert found.bytes_stored == (found.evictions + found.occupied_slots) * 128_000
    assert found.occupied_slots == 400
    assert 40 <= len(found.moments) <= 96
    for total in ("input_tokens", "device_tokens", "host_tokens", "evictions"):
        assert sum(getattr(each, total) for each in found.moments) == getattr(found, total)
    assert found.moments[-1].occupied_slots == found.occupied_slots
    times = [each.time_s for each in found.moments]
    assert times == sorted(times)
    assert times[0] == 0


def test_a_request_that_does_not_fit_is_refused_and_counted() -> None:
    trace = ListTrace.of([(1, 2), tuple(range(10, 40)), (1, 2, 3)], BLOCK)
    found = replay(trace, Setup(layout(), device_blocks=10, slots=10))
    assert found.refused == 1
    assert found.requests == 3
    assert found.input_tokens == 5 * BLOCK
    assert found.device_tokens == 2 * BLOCK


def test_a_request_without_input_has_nothing_to_find_and_is_not_refused() -> None:
    found = replay(ListTrace([TraceRequest(0.0, 0, 5, ())], BLOCK), Setup(layout(), 10, 10))
    assert (found.requests, found.refused, found.input_tokens) == (1, 0, 0)
    assert found.hit_share == 0


def test_progress_is_told_and_ends_with_all() -> None:
    told: list[tuple[int, int]] = []
    trace = open_trace(CHAT)
    replay(trace, CHAT_SETUP, lambda *each: told.append(each))
    assert len(told) > 3
    assert told == sorted(told)
    assert told[-1] == (400, CHAT.stat().st_size)


@pytest.mark.parametrize(
    ("setting", "value", "line"),
    [
        ("device_blocks", 1, "device_blocks: expected a whole number of at least 2, got 1"),
        ("slots", -1, "slots: expected a whole number of at least 0, got -1"),
        ("max_batched_tokens", 0, "max_batched_tokens: expected a whole number of at least 1, got 0"),
        ("report_steps", 0.5, "report_steps: expected a whole number of at least 0, got 0.5"),
    ],
)
def test_wrong_settings_are_named(setting: str, value: object, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replace(CHAT_SETUP, **{setting: value})  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_a_wrong_policy_or_block_size_is_named_before_anything_is_read() -> None:
    with pytest.raises(PolicyError, match="eviction_policy: expected one of lru, s3fifo, arc"):
        replay(open_trace(CHAT), replace(CHAT_SETUP, policy="best"))
    odd = KVLayout((FullAttention(48),), tokens_per_hash=48, bytes_per_block=1)
    with pytest.raises(ConfigError) as caught:
        replay(open_trace(CHAT), replace(CHAT_SETUP, layout=odd))
    assert str(caught.value) == (
        "tokens_per_hash: expected a divisor or a multiple of the trace's 128 tokens to a block, got 48"
    )


# --- speeds ---------------------------------------------------------------------------------------------


def test_a_queue_of_three() -> None:
    """10 tokens a second, 4 bytes a second: the first computes from 0 to 3 s, the second waits for it and computes
    until 4 s, the third's bytes arrive at 7 s and it is done at 8 s."""
    queue = Queue(Speeds(10, 4))
    queue.add(0.0, 30, 0)
    queue.add(1.0, 10, 4)
    queue.add(2.0, 10, 20)
    assert queue.ttft_s(0.01) == pytest.approx(3.0, rel=0.01)
    assert queue.ttft_s(0.5) == pytest.approx(3.0, rel=0.01)
    assert queue.ttft_s(0.99) == pytest.approx(6.0, rel=0.01)


def test_nobody_waits_in_an_empty_queue() -> None:
    assert Queue(Speeds(10)).ttft_s(0.5) == 0


def test_host_memory_shortens_waiting_and_a_slow_bus_does_not_keep_up() -> None:
    fast = replay(open_trace(CHAT), replace(CHAT_SETUP, slots=1600, speeds=Speeds(2000, 1e9))).speed
    assert fast is not None
    assert fast.ttft_p50_s < fast.ttft_p50_without_s
    assert fast.ttft_p99_s < fast.ttft_p99_without_s
    assert fast.ttft_p50_s <= fast.ttft_p99_s
    slow = replay(open_trace(CHAT), replace(CHAT_SETUP, slots=1600, speeds=Speeds(2000, 1e5))).speed
    assert slow is not None
    assert fast.bus_busy_share < 0.1
    assert slow.bus_busy_share == pytest.approx(fast.bus_busy_share * 1e4)
    assert slow.ttft_p99_s > fast.ttft_p99_s
    assert slow.ttft_p50_without_s == fast.ttft_p50_without_s


def test_without_speeds_nothing_is_said_about_them() -> None:
    assert replay(ListTrace.of([(1,)]), Setup(layout(), 10, 10)).speed is None


@pytest.mark.parametrize("speeds", [(0, 1), (-1, 1), (1, 0)])
def test_speeds_are_above_nothing(speeds: tuple[float, float]) -> None:
    with pytest.raises(ConfigError, match="expected a number above 0"):
        Speeds(*speeds)
    assert Speeds(1).bus_bytes_per_s == inf
