"""The planner's replay and the tiny engine, which moves real bytes, are given the same requests: every count, and
the order in which the device's blocks will be taken, are the same after each of them."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import ChunkedLocal, FullAttention, Group, KVLayout, OffloadConfig, Recurrent, SlidingWindow
from forebay.config import Mode
from forebay.plan.replay import Replaying, Setup
from forebay.plan.request import TraceRequest
from forebay.plan.serial import PlannedRequest
from forebay.policies import POLICIES
from forebay.testing import Faults, TinyEngine
from tests.plan.paths import Path, path_lists

BLOCK = 4  # tokens, of the trace


def layout(*groups: Group, tokens_per_hash: int = BLOCK) -> KVLayout:
    return KVLayout(groups or (FullAttention(BLOCK),), tokens_per_hash=tokens_per_hash, bytes_per_block=16)


class Both:
    """A replay, and a tiny engine that is given the same."""

    def __init__(self, setup: Setup) -> None:
        self.replaying = Replaying(BLOCK, setup)
        self.tiny = TinyEngine(
            setup.layout,
            OffloadConfig(setup.slots * setup.layout.bytes_per_block, setup.mode, setup.policy),
            num_blocks=setup.device_blocks,
            slots=setup.slots,
            max_batched_tokens=setup.max_batched_tokens,
            max_running=1,
            events=False,
        )
        self.tiny.copiers[0].faults = Faults(delay_polls=setup.report_steps)
        self._answer_tokens = count(1)

    def serve(self, path: Path, tokens_off: int, output_tokens: int) -> None:
        """A prompt of these blocks, the last of them shorter by some tokens."""
        input_tokens = len(path) * BLOCK - tokens_off
        served = self.replaying.serve(TraceRequest(0.0, input_tokens, output_tokens, path))
        if served is None:
            return
        tiny, prompt = self.tiny, [1_000_000 + block for block in path for _ in range(BLOCK)][:input_tokens]
        preemptions = tiny.preemptions
        with mock.patch("forebay.testing.engine.crc32", side_effect=self._answer_tokens):
            request = tiny.submit(prompt, max(1, output_tokens))
            while tiny.num_unfinished:
                tiny.step()
            tiny.step()
            while tiny.manager.has_pending_work():
                tiny.step()
        if tiny.preemptions == preemptions:
            assert sum(served) == request.cached_tokens
        self.compare()

    def compare(self) -> None:
        manager, device = self.replaying.manager, self.replaying._engine._device
        assert manager is not None
        expected = self.tiny.manager
        ours, theirs = manager.stats.snapshot(), expected.stats.snapshot()
        for timing in ("store_latency_s", "load_latency_s"):
            del ours[timing], theirs[timing]
        assert ours == theirs
        assert manager.pool.evictions == expected.pool.evictions
        assert sorted(manager.pool.index().values()) == sorted(expected.pool.index().values())
        assert list(device._queue) == list(self.tiny.device._queue)
        manager.check()
        device.check()


outputs = st.sampled_from([1, 1, 2, 3, 4, 5, 9, 30])
requests = st.tuples(st.integers(0, 3), outputs)


def _run(setup: Setup, paths: Sequence[Path], rest: Sequence[tuple[int, int]]) -> Both:
    both = Both(setup)
    for path, (tokens_off, output_tokens) in zip(paths, rest, strict=False):
        both.serve(path, tokens_off, output_tokens)
    return both


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("policy", POLICIES)
@given(
    paths=path_lists(max_requests=25, max_new=5),
    rest=st.lists(requests, min_size=25, max_size=25),
    device_blocks=st.integers(8, 60),
    slots=st.integers(1, 80),
    batch=st.sampled_from([8, 12, 64]),
    report_steps=st.integers(0, 2),
)
@settings(max_examples=60)
def test_replay_is_what_the_tiny_engine_does(
    mode: Mode,
    policy: str,
    paths: list[Path],
    rest: list[tuple[int, int]],
    device_blocks: int,
    slots: int,
    batch: int,
    report_steps: int,
) -> None:
    _run(Setup(layout(), device_blocks, slots, mode, policy, batch, report_steps), paths, rest)


KINDS = {
    "small_hashes": layout(FullAttention(4), tokens_per_hash=2),
    "large_blocks": layout(FullAttention(8), tokens_per_hash=8),
    "small_blocks": layout(FullAttention(2), tokens_per_hash=2),
    "two_sizes": layout(FullAttention(8), FullAttention(4), tokens_per_hash=4),
    "window": layout(FullAttention(4), SlidingWindow(4, window_tokens=10)),
    "only_window": layout(SlidingWindow(4, window_tokens=9)),
    "chunk": layout(FullAttention(4), ChunkedLocal(4, chunk_tokens=8)),
    "state": layout(FullAttention(4), Recurrent(8)),
    "drafter": layout(FullAttention(4), FullAttention(4, drafter=True)),
}


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("kind", KINDS)
@given(
    paths=path_lists(max_requests=20, max_new=5),
    rest=st.lists(requests, min_size=20, max_size=20),
    device_blocks=st.integers(30, 90),
    slots=st.integers(1, 120),
    batch=st.sampled_from([8, 12, 64]),
)
@settings(max_examples=25)
def test_replay_of_every_kind_of_group(
    mode: Mode,
    kind: str,
    paths: list[Path],
    rest: list[tuple[int, int]],
    device_blocks: int,
    slots: int,
    batch: int,
) -> None:
    _run(Setup(KINDS[kind], device_blocks, slots, mode, "lru", batch), paths, rest)


STEPPED = (
    layout(),
    layout(FullAttention(4), SlidingWindow(4, window_tokens=8)),
    layout(FullAttention(8), Recurrent(8)),
)


def _served(seed: int, *, skips: bool) -> list[object]:
    """Random requests, one after the other: after each, what was found and what is on the host."""
    rng = Random(seed)
    kv, device_blocks, slots = rng.choice(STEPPED), rng.choice([80, 160, 300]), rng.choice([60, 200, 900])
    batch, late = rng.choice([16, 64, 128]), rng.choice([0, 1, 3])
    engine, manager = Setup(
        kv, device_blocks, slots, Mode.LAZY, max_batched_tokens=batch, report_steps=late
    ).engine()
    assert manager is not None
    if not skips:
        engine._skip = lambda _: None  # type: ignore[method-assign]
    seen: list[object] = []
    for number in range(120):
        family, length, answer = rng.randrange(8), rng.randrange(3, 120), rng.randrange(1, 60)
        hashes = [sha256(f"{family}/{i}".encode()).digest()[:8] for i in range(length // 4)]

        def answered(block: int, number: int = number) -> bytes:
            return sha256(f"answer {number}/{block}".encode()).digest()[:8]

        request = PlannedRequest(str(number), length, answer, hashes, answered)
        if engine.fits(request):
            seen.append((tuple(engine.serve(request)), manager.stats.stored_blocks, manager.pool.index()))
    return seen


@pytest.mark.parametrize("seed", range(30, 60))
def test_steps_that_are_passed_over_would_have_changed_nothing(seed: int) -> None:
    assert _served(seed, skips=True) == _served(seed, skips=False)
