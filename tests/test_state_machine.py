"""Random traffic over random models with every fault there is; everything is checked after every step.

What must hold, whatever happens: the invariants of `check()`, the right bytes in every slot of the index and in
every block a request reads, the oracle's answer to every match, and at the end no request unfinished, no pin and
no transfer left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from forebay import ChunkedLocal, Direction, FullAttention, KVLayout, Mode, OffloadConfig, Recurrent, SlidingWindow
from forebay.testing import Faults, TinyRequest
from tests.one_queue import OneQueueEngine
from tests.watched import STEPS, InPlaceEngine, LateFreeingEngine, WatchedEngine

LAYOUTS = {
    "full": KVLayout((FullAttention(4),), 4, 16),
    "two full": KVLayout((FullAttention(4), FullAttention(4)), 4, 16),
    "drafter": KVLayout((FullAttention(4, drafter=True),), 4, 16),
    "full + drafter": KVLayout((FullAttention(4), FullAttention(4, drafter=True)), 4, 16),
    "window": KVLayout((SlidingWindow(4, window_tokens=10),), 4, 16),
    "full + window": KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=8)), 4, 16),
    "window drafter": KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=9, drafter=True)), 4, 16),
    "window of larger blocks": KVLayout((SlidingWindow(8, window_tokens=16), FullAttention(4)), 4, 16),
    "recurrent": KVLayout((Recurrent(8), FullAttention(8)), 4, 16),
    "recurrent alone": KVLayout((Recurrent(4),), 4, 16),
    "chunked": KVLayout((ChunkedLocal(4, chunk_tokens=12), FullAttention(4)), 4, 16),
    "chunked alone": KVLayout((ChunkedLocal(4, chunk_tokens=16),), 4, 16),
    "context parallel": KVLayout((FullAttention(2, context_parallel=4),), 4, 16),
    "everything": KVLayout(
        (
            FullAttention(4),
            SlidingWindow(4, window_tokens=6),
            Recurrent(8),
            ChunkedLocal(4, chunk_tokens=8),
            FullAttention(2, context_parallel=2),
        ),
        2,
        16,
    ),
}

ENGINES: dict[str, Callable[..., WatchedEngine]] = {
    "loaded first": WatchedEngine,
    "computes in place": InPlaceEngine,
    "frees late": LateFreeingEngine,
    "one queue": OneQueueEngine,
    "one queue, careless": partial(OneQueueEngine, careful=False),
    "one queue, newest first": partial(OneQueueEngine, newest_first=True),
    "one queue, newest first, careless": partial(OneQueueEngine, newest_first=True, careful=False),
}

FAULTS = st.builds(
    Faults,
    only=st.sampled_from([None, *Direction, Direction.LOAD]),
    hold=st.sampled_from([False, False, True]),
    delay_polls=st.integers(0, 4),
    fail_nth=st.sampled_from([set(), set(), {1, 2}, {5, 7, 9}]),
    fail_chance=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    mismatch_chance=st.sampled_from([0.0, 0.0, 0.3]),
    drop_chance=st.sampled_from([0.0, 0.0, 0.0, 0.3]),
    duplicate=st.booleans(),
    reorder=st.booleans(),
    stray=st.booleans(),
)


class Traffic(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        mode=st.sampled_from(Mode),
        policy=st.sampled_from(["lru", "s3fifo", "arc"]),
        ranks=st.integers(1, 3),
        blocks_for=st.floats(1.0, 4.0),
        slots=st.one_of(st.integers(1, 12), st.integers(12, 160)),
        budget=st.sampled_from([4, 8, 24, 64]),
        wait_deadline_s=st.sampled_from([0.0, 0.05, 2.0]),
        seed=st.integers(0, 2**16),
        ready=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
        engine=st.sampled_from(sorted(ENGINES)),
    )
    def start(
        self,
        layout: str,
        mode: Mode,
        policy: str,
        ranks: int,
        blocks_for: float,
        slots: int,
        budget: int,
        wait_deadline_s: float,
        seed: int,
        ready: float = 1.0,
        engine: str = "loaded first",
    ) -> None:
        self.layout = LAYOUTS[layout]
        # The longest request has 48 tokens; the device holds one to four of them.
        longest = sum(-(-56 // group.span_tokens) + 1 for group in self.layout.groups)
        self.engine = ENGINES[engine](
            self.layout,
            OffloadConfig(
                capacity_bytes=16 * slots,
                mode=mode,
                eviction_policy=policy,
                wait_deadline_s=wait_deadline_s,
                load_deadline_s=5.0,
                store_deadline_s=5.0,
            ),
            num_blocks=1 + int(longest * blocks_for),
            ranks=ranks,
            max_batched_tokens=budget,
            max_running=4,
            seed=seed,
            ready=int(slots * ready),
        )
        self.requests: list[TinyRequest] = []

    @rule(
        family=st.integers(0, 2),
        shared=st.sampled_from([0, 5, 8, 16, 24, 31, 32]),
        own=st.integers(1, 8),
        variant=st.integers(0, 2),
        max_new_tokens=st.integers(1, 8),
        copies=st.sampled_from([1, 1, 1, 2, 4]),
        salt=st.sampled_from([b"", b"", b"", b"salt"]),
        may_load=st.sampled_from([True] * 7 + [False]),
        may_store=st.sampled_from([True] * 7 + [False]),
        steps=st.integers(0, 3),
    )
    def submit(
        self,
        family: int,
        shared: int,
        own: int,
        variant: int,
        max_new_tokens: int,
        copies: int,
        salt: bytes,
        may_load: bool,
        may_store: bool,
        steps: int,
    ) -> None:
        prompt = [1000 * family + i for i in range(shared)] + [10_000 + 100 * variant + i for i in range(own)]
        for _ in range(copies):
            request = self.engine.submit(prompt, max_new_tokens, salt=salt, may_load=may_load, may_store=may_store)
            self.requests.append(request)
        self.step(steps)

    @rule(which=st.integers(0, 1000), more=st.integers(1, 8), steps=st.integers(0, 3))
    def next_turn(self, which: int, more: int, steps: int) -> None:
        """Somebody answers: the whole conversation so far comes back with a bit more."""
        done = [r for r in self.engine.finished.values() if r.num_tokens + more <= 40]
        if done:
            before = done[which % len(done)]
            self.requests.append(self.engine.submit([*before.tokens, *range(more)], 2, salt=before.salt))
        self.step(steps)

    @rule(which=st.integers(0, 1000), copies=st.sampled_from([1, 1, 2, 3]), steps=st.integers(1, 3))
    def come_back(self, which: int, copies: int, steps: int) -> None:
        """The same prompt again, when the device has lost it."""
        done = list(self.engine.finished.values())[-12:]
        if done:
            if not self.engine.running:
                self.engine.device.reset()
            before = done[which % len(done)]
            for _ in range(copies):
                self.requests.append(self.engine.submit(before.tokens[:48], 1, salt=before.salt))
        self.step(steps)

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        alive = [r for r in self.requests if r.id in self.engine._keys]
        if alive:
            self.engine.abort(alive[which % len(alive)])
        self.engine.check()

    @rule(which=st.integers(0, 1000))
    def preempt(self, which: int) -> None:
        if self.engine.running:
            self.engine._preempt(self.engine.running[which % len(self.engine.running)])
        self.engine.check()

    @rule(rank=st.integers(0, 2), faults=FAULTS)
    def break_something(self, rank: int, faults: Faults) -> None:
        self.engine.copiers[rank % len(self.engine.copiers)].faults = faults

    @rule(rank=st.integers(0, 2), share=st.sampled_from([0.05, 0.3, 1.0]))
    def more_memory(self, rank: int, share: float) -> None:
        """More slots are ready on one rank; what all ranks have can be used in the next step."""
        copier = self.engine.copiers[rank % len(self.engine.copiers)]
        copier.ready = min(copier.slots, copier.ready + 1 + int(copier.slots * share))

    @rule()
    def repair(self) -> None:
        for copier in self.engine.copiers:
            copier.faults = Faults()

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.engine.clock.advance(seconds)
        self.engine.step()

    @rule(yes=st.booleans())
    def accept_less(self, yes: bool) -> None:
        self.engine.accepts_less = yes

    @rule(sure=st.integers(0, 7), device_too=st.booleans())
    def reset(self, sure: int, device_too: bool) -> None:
        if sure:
            return  # rare, so that there is something to lose
        if device_too and not self.engine.running and not self.engine.loading:
            self.engine.reset_cache()
        else:
            self.engine.manager.reset()
        self.engine.check()
        assert self.engine.manager.pool.cached == 0, "one call is enough"

    @rule()
    def empty_the_device(self) -> None:
        """What only the device had is gone; what is asked for again has to come from the host."""
        if not self.engine.running:
            self.engine.device.reset()

    @rule()
    def late_reports(self) -> None:
        self.engine.deliver_lost_reports()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        self.repair()
        for _ in range(2000):
            if not engine.num_unfinished and not any(copier.busy for copier in engine.copiers):
                break
            engine.deliver_lost_reports()
            engine.step()
        engine.run()
        engine.deliver_lost_reports()
        assert engine.num_unfinished == 0, "a request waits for ever"
        assert not engine.manager.has_pending_work()
        assert engine.manager.pool.pinned == 0
        assert not engine.device.pins
        assert engine.manager.pool.filling == 0


_LONG = os.environ.get("FOREBAY_PROFILE") == "long"
_MIN_STEPS = 1_000_000 if _LONG else 20_000

Traffic.TestCase.settings = settings(max_examples=25_000 if _LONG else 600, stateful_step_count=60)


class TestTraffic(Traffic.TestCase):  # type: ignore[misc, name-defined]
    def runTest(self) -> None:  # noqa: N802  the name unittest gives it
        before = STEPS.total
        super().runTest()
        assert STEPS.total - before >= _MIN_STEPS, "too little was tried for a green result to mean anything"


def test_asking_twice_is_asking_once_also_for_a_bridged_hit_in_lazy_mode() -> None:
    """Found by the long run: every question for the same load counted as another demand on the device."""
    traffic = Traffic()
    traffic.start(
        layout="chunked",
        mode=Mode.LAZY,
        policy="lru",
        ranks=1,
        blocks_for=2.0,
        slots=29,
        budget=64,
        wait_deadline_s=0.05,
        seed=0,
    )

    def submit(
        copies: int, family: int, shared: int, own: int, new: int, steps: int, may_load: bool = True
    ) -> None:
        traffic.submit(
            family=family,
            shared=shared,
            own=own,
            variant=0,
            max_new_tokens=new,
            copies=copies,
            salt=b"",
            may_load=may_load,
            may_store=True,
            steps=steps,
        )

    traffic.step(count=2)
    submit(copies=1, family=0, shared=5, own=1, new=1, steps=0)
    submit(copies=4, family=1, shared=16, own=4, new=1, steps=0)
    submit(copies=2, family=1, shared=8, own=2, new=4, steps=1, may_load=False)
    submit(copies=2, family=0, shared=32, own=3, new=4, steps=0)
    traffic.come_back(which=1, copies=1, steps=1)
    traffic.teardown()
