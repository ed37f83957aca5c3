"""Several ranks: nothing is stored, and nothing is loaded, before every one of them has done its part.

A class has one engine for all its tests: starting the processes of its ranks takes most of the time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from tests.vllm.families import GEMMA2, LLAMA, Family
from tests.vllm.harness import Engine, Tokens, prompts
from tests.vllm.proof import EAGER, comes_back, nothing_is_left
from tests.vllm.ranks import RankedEngine, Traffic, said_by_one, watched

BLOCK = 32
LAYER_BYTES = BLOCK * 2 * 4 * 32 * 4  # of a block of the small Llama: tokens, K and V, heads, dim, float32
SMALL_HOST = {"cpu_bytes_to_use": 2 * 40 * 3 * LAYER_BYTES}  # two ranks, of which one has three layers
ASKED = prompts(4)
WHOLE_BLOCKS = 400 // BLOCK


class Ranks:
    family: Family
    tensor = pipeline = 1
    layers: tuple[int, ...] = ()
    """Of each rank of the pipeline, where they differ."""
    slots: tuple[int, ...]
    """How many blocks the memory given to each rank holds."""
    offload: dict[str, Any] = EAGER

    @pytest.fixture(scope="class")
    def running(self) -> Iterator[RankedEngine]:
        ranks = {"tensor": self.tensor, "pipeline": self.pipeline, "layers": self.layers}
        with RankedEngine(self.family, self.offload, **ranks) as engine:
            yield engine

    @pytest.fixture
    def engine(self, running: RankedEngine) -> RankedEngine:
        running.forget_all()
        return running

    @pytest.fixture
    def expected(self) -> list[Tokens]:
        """From one rank. Sums that are split among ranks differ in their last bits; no tokens are so close that it
        could matter."""
        return said_by_one(self.family, ASKED).cold

    def check_slots(self, engine: RankedEngine) -> None:
        assert tuple(engine.slots_of_ranks) == self.slots
        assert engine.connector.scheduler_manager.num_cpu_blocks == min(self.slots)
        assert engine.manager.pool.capacity == min(self.slots)


class RoundTrip(Ranks):
    def test_what_all_ranks_stored_comes_back(self, engine: RankedEngine, expected: list[Tokens]) -> None:
        self.check_slots(engine)
        before = engine.manager.stats.loaded_blocks
        with engine.faulty(), watched(engine) as traffic:
            assert engine.generate(ASKED) == expected
            assert engine.cached_tokens == [0] * len(ASKED)
            engine.forget_device()
            assert engine.generate(ASKED) == expected
            assert engine.cached_tokens == [WHOLE_BLOCKS * BLOCK] * len(ASKED)
            loaded = engine.manager.stats.loaded_blocks - before
            assert loaded == traffic.blocks_done(traffic.loads) >= WHOLE_BLOCKS * len(ASKED)
            comes_back(engine, ASKED, expected)
        assert not traffic.failed


class OneOfThem(Ranks):
    """One rank is late, or fails, and the other is not and does not."""

    @pytest.mark.parametrize("late", [0, 1])
    def test_nothing_counts_before_the_last_rank_has_reported_it(
        self, engine: RankedEngine, expected: list[Tokens], late: int
    ) -> None:
        with engine.faulty(delay_polls=100, ranks=(late,)):
            for times in range(2):
                with watched(engine) as traffic:
                    assert _ask_step_by_step(engine, traffic) == expected
                    assert traffic.blocks_done(traffic.loads) == times * WHOLE_BLOCKS * len(ASKED)
                    assert engine.manager.pool.cached == WHOLE_BLOCKS * len(ASKED)
                engine.forget_device()
        nothing_is_left(engine)

    def test_abort_while_one_rank_still_loads(self, engine: RankedEngine, expected: list[Tokens]) -> None:
        assert engine.generate(ASKED) == expected
        engine.forget_device()
        with engine.faulty(delay_polls=200, only="load", ranks=(1,)), watched(engine) as traffic:
            ids = [engine.submit(prompt) for prompt in ASKED]
            engine.run_until(lambda: len(traffic.partly_reported()) == len(ASKED))
            engine.abort(ids[0])
            engine.abort(ids[2])
            assert engine.manager.device_pins(), "blocks that a rank is still writing are not protected"
            engine.run()
            assert [engine.tokens(ids[i]) for i in (1, 3)] == [expected[i] for i in (1, 3)]
        nothing_is_left(engine)
        comes_back(engine, ASKED, expected)

    def test_reset_between_the_reports_of_a_store(self, engine: RankedEngine, expected: list[Tokens]) -> None:
        with engine.faulty(delay_polls=200, only="store", ranks=(0,)), watched(engine) as traffic:
            engine.generate(ASKED)
            engine.run_until(lambda: len(traffic.partly_reported()) == len(traffic.stores))
            assert engine.connector.reset_cache() is True
            engine.settle()
        assert engine.manager.pool.cached == 0, "what was forgotten came back"
        engine.forget_device()
        assert engine.generate(ASKED) == expected
        assert engine.cached_tokens == [0] * len(ASKED)
        comes_back(engine, ASKED, expected)

    @pytest.mark.parametrize("only", ["load", "store"])
    def test_copies_that_fail_on_one_rank(self, engine: RankedEngine, expected: list[Tokens], only: str) -> None:
        before = engine.manager.stats.recomputes
        with engine.faulty(fail_chance=0.5, only=only, ranks=(1,)):
            traffic = _rounds(engine, expected, at_once=1)  # each has a store of its own, so that some fail
        _only_one_rank_failed(traffic, traffic.loads if only == "load" else traffic.stores)
        assert (engine.manager.stats.recomputes > before) == (only == "load")

    def test_bytes_that_changed_on_the_host_of_one_rank(
        self, engine: RankedEngine, expected: list[Tokens]
    ) -> None:
        assert engine.generate(ASKED) == expected
        engine.forget_device()
        engine.spoil_slots(engine.manager.pool.index().values(), rank=1)
        with watched(engine) as traffic:
            assert engine.generate(ASKED) == expected
        assert len(traffic.loads) == len(ASKED)
        assert all(traffic.failed[number] == traffic.done[number] == 1 for number in traffic.loads)
        engine.mismatches += len(ASKED)
        comes_back(engine, ASKED, expected)

    def test_a_copier_thread_that_is_killed_on_one_rank(
        self, engine: RankedEngine, expected: list[Tokens]
    ) -> None:
        with engine.faulty(kill_nth=(2, 7, 11), ranks=(1,)):
            traffic = _rounds(engine, expected, rounds=6)
        assert traffic.failed
        assert traffic.blocks_done(traffic.loads), "nothing was loaded after the thread had died"


class TestTensorParallelLlama(OneOfThem, RoundTrip):
    family = LLAMA
    tensor = 2
    slots = (512, 512)

    def test_a_rank_with_other_blocks_is_refused(self, engine: RankedEngine) -> None:
        from forebay.errors import LayoutError
        from forebay.vllm.metadata import RankSlots

        said = {(0, 0): RankSlots(8, 128, 8, 0, 64), (0, 1): RankSlots(8, 127, 8, 1, 64)}
        with pytest.raises(LayoutError, match=r"^device blocks of a rank: expected 128, as .* has, got 127$"):
            engine.connector.set_xfer_handshake_metadata_pp_aware(said)
        self.check_slots(engine)


class TestTensorParallelGemma2(RoundTrip):
    family = GEMMA2
    tensor = 2
    slots = (2048, 2048)
    offload = EAGER | {"inject_faults": {"fail_chance": 0.5, "only": "load", "ranks": [1]}}

    def test_loads_fail_on_one_rank_as_configured(self, engine: RankedEngine, expected: list[Tokens]) -> None:
        before = engine.manager.stats.recomputes
        traffic = _rounds(engine, expected)
        _only_one_rank_failed(traffic, traffic.loads)
        assert engine.manager.stats.recomputes > before


class TestPipelineParallelLlama(OneOfThem, RoundTrip):
    family = LLAMA
    pipeline = 2
    slots = (512, 512)


class TestPipelineParallelGemma2(RoundTrip):
    """The first rank has one layer, with a sliding window, and nothing of the other group."""

    family = GEMMA2
    pipeline = 2
    layers = (1, 3)
    slots = (2048, 1024)


class TestUnevenPipeline(Ranks):
    """The scheduler knows the layers of the first rank only, and would count on its slots."""

    family = LLAMA
    pipeline = 2
    layers = (1, 3)
    slots = (120, 40)
    offload = SMALL_HOST

    def test_a_full_host_has_no_slot_that_a_rank_lacks(self, engine: RankedEngine, expected: list[Tokens]) -> None:
        self.check_slots(engine)
        with watched(engine) as traffic:
            for _ in range(3):
                assert engine.generate(ASKED) == expected
                engine.forget_device()
            assert engine.manager.pool.cached == min(self.slots), "the host was never full"
            engine.generate(ASKED[-1:])  # alone, so that all of it is kept
            comes_back(engine, ASKED[-1:], expected[-1:])
        assert not traffic.failed, "a rank refused an order"
        for orders in (traffic.stores, traffic.loads):
            assert max(slot for order in orders.values() for slot in order.slots) == min(self.slots) - 1

    def test_bytes_are_those_of_all_ranks(self, engine: RankedEngine) -> None:
        from forebay.vllm.stats import ForebayStats

        total, take = ForebayStats(), engine.connector.get_kv_connector_stats

        def take_and_add() -> Any:
            total.aggregate(stats := take())
            return stats

        with mock.patch.object(engine.connector, "get_kv_connector_stats", take_and_add):
            engine.generate(ASKED)
            engine.settle()
        layers = sum(self.layers)
        assert total.data["stored_bytes"] == total.data["stored_blocks"] * layers * LAYER_BYTES > 0
        assert total.data["host_capacity_bytes"] == min(self.slots) * layers * LAYER_BYTES
        assert total.data["ranks"] == len(self.slots) == 2


def test_an_engine_does_not_start_with_a_rank_that_has_other_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.errors import LayoutError
    from forebay.vllm import SimpleCPUOffloadWorker
    from forebay.vllm.metadata import RankSlots

    monkeypatch.setattr(SimpleCPUOffloadWorker, "handshake", lambda _: RankSlots(8, 129, 8, 0, 64))
    with pytest.raises(LayoutError, match=r"^device blocks of a rank: expected 128, as .* has, got 129$"):
        Engine(LLAMA, EAGER)


def _ask_step_by_step(engine: RankedEngine, traffic: Traffic) -> list[Tokens]:
    """After every step: what the scheduler counts is what all ranks have reported, no more and no less."""
    pool, stats = engine.manager.pool, engine.manager.stats
    cached, loaded = pool.cached, stats.loaded_blocks
    ids = [engine.submit(prompt) for prompt in ASKED]
    requests = dict(engine.scheduler.requests)
    partly: set[int] = set()
    while engine.scheduler.has_requests():
        engine.step()
        assert pool.cached == cached + traffic.blocks_done(traffic.stores)
        assert stats.loaded_blocks == loaded + traffic.blocks_done(traffic.loads)
        for number, request_id in traffic.waiting.items():
            if traffic.reports[number] < engine.ranks:
                assert requests[request_id].status.name == "WAITING_FOR_REMOTE_KVS"
        partly |= traffic.partly_reported()
    assert partly == {*traffic.stores, *traffic.loads}, "ranks reported at the same time"
    return [engine.tokens(each) for each in ids]


def _rounds(engine: RankedEngine, expected: list[Tokens], rounds: int = 4, at_once: int = len(ASKED)) -> Traffic:
    """The same prompts again and again, with the device forgotten in between. Every answer is right."""
    with watched(engine) as traffic:
        for _ in range(rounds):
            for i in range(0, len(ASKED), at_once):
                assert engine.generate(ASKED[i : i + at_once]) == expected[i : i + at_once]
            nothing_is_left(engine)
            engine.forget_device()
    return traffic


def _only_one_rank_failed(traffic: Traffic, orders: dict[int, Any]) -> None:
    failed = set(traffic.failed)
    assert set() < failed < set(orders), "none failed, or all, or others"
    assert all(traffic.failed[number] == traffic.done[number] == 1 for number in failed)
