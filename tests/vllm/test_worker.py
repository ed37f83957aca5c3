"""A rank's half without an engine: real tensors, real copies, and what the engine is told of them."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.errors import ForebayError
from forebay.ids import BlockId, RequestId, Slot, TransferId
from forebay.ids import Rank as RankNumber
from forebay.transfers import CopyOrder, Direction, Outcome, Report
from tests.vllm.driving import full, kv_cache_config, mamba, vllm_config, window

BLOCKS, SLOTS = 16, 8


class Rank:
    def __init__(
        self, specs: list[Any] | None = None, *, caches: dict[str, Any] | None = None, **faults: Any
    ) -> None:
        import torch

        from forebay.copier.faults import InjectedFaults
        from forebay.vllm import SimpleCPUOffloadWorker

        config = kv_cache_config(specs or [full()], BLOCKS)
        self.cache = torch.arange(BLOCKS * 256, dtype=torch.float32).view(BLOCKS, 256)
        self.worker = SimpleCPUOffloadWorker(
            vllm_config(), config, SLOTS * 1024, faults=InjectedFaults(**faults) if faults else None
        )
        self.worker.register_kv_caches({"layer0": self.cache} if caches is None else caches)
        self.ended: dict[str, dict[int, int]] = {"stores": {}, "loads": {}, "failed": {}, "mismatched": {}}
        self.ready_said: list[dict[int, int]] = []

    def step(
        self, *loads: CopyOrder, stores: tuple[CopyOrder, ...] = (), verdicts: Any = ()
    ) -> tuple[set[str], set[str]]:
        """One step: what the engine hears of it, finished and failed."""
        from forebay.vllm import SimpleCPUOffloadMetadata

        waiting = [RequestId(f"of {order.id}") for order in loads]
        self.worker.bind_connector_metadata(
            SimpleCPUOffloadMetadata(list(loads), list(stores), waiting, list(verdicts), SLOTS)
        )
        results = self.worker.get_transfer_results(set())
        self.worker.clear_connector_metadata()
        meta = self.worker.build_connector_worker_meta()
        if meta is not None:
            self.ended["stores"] |= meta.completed_store_events
            self.ended["loads"] |= meta.completed_load_events
            self.ended["failed"] |= meta.failed_events
            self.ended["mismatched"] |= meta.mismatched_events
            self.ready_said += [meta.ready] if meta.ready else []
        return results.finished_recving, results.failed_recving

    def until(self, *transfers: int) -> tuple[set[str], set[str]]:
        """Step until these have been reported; everything the engine heard on the way."""
        finished, failed = set(), set()
        deadline = time.monotonic() + 20
        while not all(any(each in ended for ended in self.ended.values()) for each in transfers):
            assert time.monotonic() < deadline, "a transfer was never reported"
            more = self.step()
            finished |= more[0]
            failed |= more[1]
        return finished, failed


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.worker.shutdown()


def _order(number: int, direction: Direction, blocks: list[int], slots: list[int]) -> CopyOrder:
    return CopyOrder(TransferId(number), direction, list(map(BlockId, blocks)), list(map(Slot, slots)), [], [])


def _store(number: int, blocks: list[int], slots: list[int]) -> CopyOrder:
    return _order(number, Direction.STORE, blocks, slots)


def _load(number: int, blocks: list[int], slots: list[int]) -> CopyOrder:
    return _order(number, Direction.LOAD, blocks, slots)


def _verdict(number: int | None, *, failed: bool, request: str | None = None) -> Any:
    from forebay.vllm.metadata import Verdict

    transfer = None if number is None else TransferId(number)
    return Verdict(RequestId(request or f"of {number}"), transfer, failed, [BlockId(9)] if number is None else [])


def test_bytes_go_there_and_back(rank: Rank) -> None:
    before = rank.cache[[3, 5]].clone()
    rank.step(stores=(_store(1, [3, 5], [0, 7]),))
    rank.until(1)
    rank.cache.zero_()
    assert rank.step(_load(2, [6, 2], [0, 7])) in [(set(), set()), ({"of 2"}, set())]
    rank.until(2)
    assert rank.cache[[6, 2]].equal(before)
    assert rank.ended == {"stores": {1: 1}, "loads": {2: 1}, "failed": {}, "mismatched": {}}


@pytest.mark.parametrize("early", [True, False])
def test_only_loads_without_moves_are_submitted_before_the_forward_pass(rank: Rank, early: bool) -> None:
    """And only to copiers that wait for the engine's stream themselves."""
    from forebay.vllm import SimpleCPUOffloadMetadata

    submitted: list[int] = []
    worker = rank.worker
    worker._submits_early = early
    worker._copier.submit = lambda order: submitted.append(order.id)  # type: ignore[method-assign]
    loads = [_load(1, [1], [1]), _load(2, [2], [2])._replace(move_from=[BlockId(3)], move_to=[BlockId(4)])]
    waiting = [RequestId("one"), RequestId("two")]
    worker.bind_connector_metadata(SimpleCPUOffloadMetadata(loads, [_store(3, [5], [5])], waiting, [], SLOTS))
    assert submitted == ([1] if early else [])
    worker.get_transfer_results(set())
    assert submitted == [1, 2, 3]


class Scripted:
    """A copier that ends what the test says, when it says so."""

    slots = ready = SLOTS

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self._ended: list[Report] = []

    def submit(self, order: CopyOrder) -> None:
        self.submitted.append(order.id)

    def end(self, number: int, outcome: Outcome = Outcome.DONE) -> None:
        self._ended.append(Report(TransferId(number), RankNumber(0), outcome))

    def poll(self) -> list[Report]:
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        pass


@pytest.fixture
def scripted(rank: Rank) -> Scripted:
    copier = Scripted()
    rank.worker._copier = copier
    return copier


def test_who_asks_hears_of_a_load_before_the_next_step_does(rank: Rank, scripted: Scripted) -> None:
    assert rank.step(_load(1, [1], [0]), _load(2, [2], [1]), _load(3, [3], [2])) == (set(), set())
    scripted.end(1)
    assert rank.step() == ({"of 1"}, set()), "as long as nobody asks"
    scripted.end(2)
    meta, finished = rank.worker.ended_meanwhile()
    assert (meta.completed_load_events, finished) == ({2: 1}, {"of 2"})
    assert rank.worker.ended_meanwhile().finished == set()
    scripted.end(3)
    assert rank.step() == (set(), set()), "the output of this step may be read after that of another"
    assert rank.worker.ended_meanwhile().finished == {"of 3"}
    assert rank.ended["loads"] == {1: 1}


def test_what_was_not_told_can_be_asked_for_when_nothing_is_on_its_way(rank: Rank, scripted: Scripted) -> None:
    from forebay.vllm import SimpleCPUOffloadMetadata

    worker = rank.worker
    worker.ended_meanwhile()
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata([_load(1, [1], [0])], [], [RequestId("of 1")], [_verdict(1, failed=True)], SLOTS)
    )
    scripted.end(1)
    assert worker.get_transfer_results(set()).finished_recving == {"of 1"}, "as the scheduler had decided"
    said = worker.build_connector_worker_meta()
    assert said is not None
    assert said.meanwhile is not None
    meta, finished = said.meanwhile()
    assert (meta.completed_load_events, finished) == ({1: 1}, set())


def test_a_rank_can_be_asked_as_long_as_something_is_on_its_way(rank: Rank, scripted: Scripted) -> None:
    from forebay.vllm import SimpleCPUOffloadMetadata

    metadata = SimpleCPUOffloadMetadata([_load(1, [1], [0])], [], [RequestId("one")], [], SLOTS)
    rank.worker.bind_connector_metadata(metadata)
    rank.worker.get_transfer_results(set())
    said = rank.worker.build_connector_worker_meta()
    assert said is not None
    assert said.meanwhile is not None
    assert pickle.loads(pickle.dumps(said)).meanwhile is None, "not from another process"
    scripted.end(1)
    said.meanwhile()
    rank.step()
    assert rank.worker.build_connector_worker_meta() is None


def test_one_of_several_ranks_cannot_be_asked(rank: Rank, scripted: Scripted) -> None:
    rank.worker._alone = False
    rank.step(_load(1, [1], [0]))
    assert rank.worker.build_connector_worker_meta() is None


def test_failures_and_stores_are_for_the_next_output(rank: Rank, scripted: Scripted) -> None:
    """The engine looks for failures before the scheduler can ask. And a router wants to hear of a block after
    those that it builds on: what is in an output that nobody has read yet comes first."""
    rank.step(_load(1, [1], [0]), _load(2, [2], [1]), stores=(_store(3, [3], [3]),))
    scripted.end(1, Outcome.FAILED)
    scripted.end(3)
    scripted.end(2)
    meta, finished = rank.worker.ended_meanwhile()
    assert finished == {"of 2"}
    assert (meta.completed_load_events, meta.completed_store_events, meta.failed_events) == ({2: 1}, {}, {})
    assert rank.step() == ({"of 1"}, {"of 1"})
    assert rank.ended == {"stores": {3: 1}, "loads": {}, "failed": {1: 1}, "mismatched": {}}


@pytest.mark.parametrize("drafts", [False, True])
def test_a_load_that_ends_within_its_step_is_not_submitted_again(
    rank: Rank, scripted: Scripted, drafts: bool
) -> None:
    """vLLM reads the output of the step before in the middle of a step if sampling has to wait for that."""
    from forebay.vllm import SimpleCPUOffloadMetadata

    worker = rank.worker
    worker._submits_early, worker._waits_for_drafter = True, drafts
    worker.bind_connector_metadata(
        SimpleCPUOffloadMetadata([_load(1, [1], [0])], [], [RequestId("one")], [], SLOTS)
    )
    scripted.end(1)
    assert worker.ended_meanwhile().finished == {"one"}
    assert worker.get_transfer_results(set()).finished_recving == set()
    worker.clear_connector_metadata()
    assert rank.step() == (set(), set())
    assert scripted.submitted == [1]


def test_with_speculation_stores_wait_for_the_drafter(rank: Rank) -> None:
    """It may run after get_finished(), and writes KV too."""
    from forebay.vllm import SimpleCPUOffloadMetadata

    submitted: list[int] = []
    worker = rank.worker
    worker._waits_for_drafter = True
    worker._copier.submit = lambda order: submitted.append(order.id)  # type: ignore[method-assign]
    worker.bind_connector_metadata(SimpleCPUOffloadMetadata([], [_store(1, [5], [5])], [], [], SLOTS))
    worker.get_transfer_results(set())
    assert submitted == []
    worker.clear_connector_metadata()
    assert submitted == [1]
    worker.bind_connector_metadata(SimpleCPUOffloadMetadata([], [_store(2, [6], [6])], [], [], SLOTS))
    worker.get_transfer_results(set())
    # A rank that is not told when the drafter has ended: at the latest it has when the next step begins.
    worker.bind_connector_metadata(SimpleCPUOffloadMetadata([], [], [], [], SLOTS))
    assert submitted == [1, 2]


def test_a_verdict_on_an_open_load_is_told_once_and_the_load_is_still_reported() -> None:
    rank = Rank(delay_polls=3, only="load")
    assert rank.step(_load(1, [1], [0])) == (set(), set())
    assert rank.step(verdicts=[_verdict(1, failed=True)]) == ({"of 1"}, {"of 1"})
    assert rank.step(verdicts=[_verdict(1, failed=True)]) == (set(), set())
    assert rank.until(1) == (set(), set())
    assert rank.ended["loads"] == {1: 1}
    rank.worker.shutdown()


def test_a_verdict_on_a_load_that_was_told_is_dropped(rank: Rank) -> None:
    first = rank.step(_load(1, [1], [0]))
    told = first[0] | rank.until(1)[0]
    assert told == {"of 1"}
    assert rank.step(verdicts=[_verdict(1, failed=True)]) == (set(), set())


def test_a_verdict_without_a_load_is_told(rank: Rank) -> None:
    assert rank.step(verdicts=[_verdict(None, failed=False, request="a")]) == ({"a"}, set())
    assert rank.step(verdicts=[_verdict(None, failed=True, request="b")]) == ({"b"}, {"b"})


def test_a_failed_load_is_told_as_finished_and_failed_at_once() -> None:
    rank = Rank(fail_chance=1.0)
    finished, failed = rank.step(_load(1, [1], [0]))
    more = rank.until(1)
    assert (finished | more[0], failed | more[1]) == ({"of 1"}, {"of 1"})
    assert rank.ended["failed"] == {1: 1}
    assert rank.worker.get_block_ids_with_load_errors() == set()
    rank.worker.shutdown()


class Spoiled:
    """A copier whose loads find other bytes than were stored, and whose slots become ready bit by bit."""

    slots, ready = SLOTS, 2

    def __init__(self) -> None:
        self.orders: list[CopyOrder] = []

    def submit(self, order: CopyOrder) -> None:
        self.orders.append(order)

    def poll(self) -> list[Report]:
        ended, self.orders = self.orders, []
        return [Report(order.id, 0, Outcome.MISMATCH) for order in ended]  # type: ignore[arg-type]

    def close(self) -> None:
        pass


def test_a_load_of_other_bytes_is_told_as_failed_and_reported_as_a_mismatch(rank: Rank) -> None:
    rank.worker._copier = Spoiled()
    assert rank.step(_load(1, [1], [0])) == ({"of 1"}, {"of 1"})
    assert rank.ended == {"stores": {}, "loads": {}, "failed": {}, "mismatched": {1: 1}}


def test_a_rank_says_how_many_slots_are_ready_once_they_have_become_more(rank: Rank) -> None:
    said = rank.worker.handshake()
    assert (said.slots, said.ready, said.rank) == (SLOTS, SLOTS, 0)
    rank.step()
    rank.worker._copier = copier = Spoiled()
    assert rank.worker.handshake().ready == 2
    rank.step()
    assert rank.ready_said == []
    for copier.ready in (4, 4, 8):
        rank.step()
    rank.step()
    assert rank.ready_said == [{0: 4}, {0: 8}]


def test_a_rank_that_was_not_asked_at_the_start_says_nothing_of_slots(rank: Rank) -> None:
    rank.worker._copier = Spoiled()
    rank.step()
    assert rank.ready_said == []


@pytest.mark.parametrize("by", ["a handshake", "the first step"])
def test_on_a_gpu_copiers_wait_until_the_engine_has_started(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """Pinning memory slows down the capture of graphs, and vLLM captures after it has registered its caches."""
    from types import SimpleNamespace

    from forebay.vllm import SimpleCPUOffloadMetadata, worker

    calls: list[object] = []
    steps: list[str] = []

    class Waiting(Spoiled):
        bytes_per_block = 1024

        def go_on(self) -> None:
            calls.append("go on")

        def rest(self) -> None:
            steps.append("rest")

        def resume(self) -> None:
            steps.append("resume")

        def hurry(self) -> None:
            steps.append("hurry")

    def build(*_: object, waits: bool, **__: object) -> Waiting:
        calls.append(waits)
        return Waiting()

    monkeypatch.setattr(worker, "cuda_copier", build)
    monkeypatch.setattr(worker, "block_regions", lambda *_: [])
    made = Rank(caches={"layer0": [SimpleNamespace(device=SimpleNamespace(type="cuda"))]}).worker
    made.build_connector_worker_meta()
    assert calls == [True]
    for _ in range(2):
        made.handshake() if by == "a handshake" else made.bind_connector_metadata(SimpleCPUOffloadMetadata())
    assert calls == [True, "go on"]
    steps.clear()
    made.bind_connector_metadata(SimpleCPUOffloadMetadata())
    assert steps == ["rest"], "while the step is launched"
    made.get_finished(set())
    assert steps == ["rest", "resume"]
    made.bind_connector_metadata(SimpleCPUOffloadMetadata(idle=True))
    made.get_finished(set())
    assert steps[2:] == ["rest", "hurry", "resume"], "there is nothing that it would disturb"
    steps.clear()
    made.ended_meanwhile()
    assert steps == []
    made._meanwhile.finished.add("one")
    made.ended_meanwhile()
    assert steps == ["rest"], "the engine is about to schedule a step with it"


def test_before_030_failures_are_told_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    rank = Rank(fail_chance=1.0)
    rank.step(_load(1, [4, 6], [0, 1]))
    rank.until(1)
    assert rank.worker.get_block_ids_with_load_errors() == {4, 6}
    assert rank.worker.get_block_ids_with_load_errors() == set()
    rank.step(verdicts=[_verdict(None, failed=True, request="b")])
    assert rank.worker.get_block_ids_with_load_errors() == {9}
    rank.worker.shutdown()


def test_where_vllm_cannot_take_a_load_back_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    rank = Rank([full(), window(32)], kill_nth=(1,))
    first = rank.step(_load(1, [1], [0]))
    told = first[0] | rank.until(1)[0]
    assert told == {"of 1"}
    assert rank.ended == {"stores": {}, "loads": {1: 1}, "failed": {}, "mismatched": {}}
    rank.worker.shutdown()


@pytest.mark.parametrize("kind", [window, mamba])
def test_nor_where_the_bad_blocks_are_all_that_was_loaded(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    """Before 0.30 vLLM computes from the first bad block on. What a window needs before that was never loaded."""
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    rank = Rank([kind(32)], kill_nth=(1,))
    first = rank.step(_load(1, [1], [0]))
    told = first[0] | rank.until(1)[0]
    assert told == {"of 1"}
    assert rank.worker.get_block_ids_with_load_errors() == set()
    assert rank.ended == {"stores": {}, "loads": {1: 1}, "failed": {}, "mismatched": {}}
    rank.worker.shutdown()


def test_and_stops_the_engine_rather_than_give_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.errors import LostLoadError
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    rank = Rank([full(), window(32)], fail_chance=1.0)
    rank.step(_load(1, [1], [0]))
    with pytest.raises(LostLoadError, match="the load of request of 1 failed 5 times"):
        rank.until(1)
    rank.worker.shutdown()


def test_a_verdict_that_the_engine_could_not_obey_stops_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.errors import LostLoadError
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    rank = Rank([full(), window(32)])
    with pytest.raises(LostLoadError, match="was given up"):
        rank.step(verdicts=[_verdict(None, failed=True, request="b")])
    rank.worker.shutdown()


def test_a_rank_without_caches_has_nothing_to_add_and_says_so() -> None:
    rank = Rank(caches={})
    assert rank.worker.handshake() is None
    assert rank.step(_load(1, [1], [0]), stores=(_store(2, [3], [7]),)) == ({"of 1"}, set())
    assert rank.ended == {"stores": {2: 1}, "loads": {1: 1}, "failed": {}, "mismatched": {}}
    assert rank.step(verdicts=[_verdict(None, failed=True, request="b")]) == ({"b"}, {"b"})
    rank.worker.shutdown()


def test_a_scheduler_that_counts_on_more_slots_is_stopped(rank: Rank) -> None:
    from forebay.errors import ForebayError
    from forebay.vllm import SimpleCPUOffloadMetadata

    with pytest.raises(ForebayError, match="at most 8 slots, as rank 0 has, got 9"):
        rank.worker.bind_connector_metadata(SimpleCPUOffloadMetadata(slots=9))


def test_caches_on_another_kind_of_device_are_refused_in_one_line() -> None:
    import torch

    from forebay.vllm import SimpleCPUOffloadWorker

    worker = SimpleCPUOffloadWorker(vllm_config(), kv_cache_config([full()], 16), 1 << 20)
    with pytest.raises(ForebayError, match=r"^forebay: expected KV caches on a CPU or a CUDA device, got meta$"):
        worker.register_kv_caches({"layer0": torch.empty(16, 256, device="meta")})


def test_caches_that_are_registered_again_are_refused(rank: Rank) -> None:
    from forebay.errors import ForebayError

    with pytest.raises(ForebayError, match="registered once, got them a second time"):
        rank.worker.register_kv_caches({"layer0": rank.cache})


def test_shutdown_may_come_twice_or_before_any_cache(rank: Rank) -> None:
    rank.worker.shutdown()
    rank.worker.shutdown()
    from forebay.vllm import SimpleCPUOffloadWorker

    SimpleCPUOffloadWorker(vllm_config(), None, 1024).shutdown()
