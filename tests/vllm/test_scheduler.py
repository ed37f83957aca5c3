"""The scheduler's half without an engine. What both classes can do is asked of both, by the same code."""

from __future__ import annotations

import random
import tracemalloc
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.driving import (
    BLOCK,
    Hand,
    chunked,
    full,
    kv_cache_config,
    mamba,
    reference_window,
    scheduler_class,
    vllm_config,
    window,
)

BOTH = pytest.mark.parametrize("name", ["forebay", "vllm"])


@BOTH
def test_a_prompt_is_stored_found_again_and_loaded(name: str) -> None:
    hand = Hand(name, [full()])
    scheduler = hand.scheduler
    assert (scheduler.block_size, scheduler.num_cpu_blocks) == (BLOCK, 64)
    assert scheduler.cpu_kv_cache_config.num_blocks == 64
    first = hand.request("first", range(8 * BLOCK))
    assert scheduler.get_num_new_matched_tokens(first, 0) == (0, False)
    hand.admit(first)
    store = hand.step(first)
    assert store.load_event == -1
    assert store.load_gpu_blocks == store.load_cpu_blocks == []
    assert len(store.store_gpu_blocks) == len(set(store.store_cpu_blocks)) == 8
    assert not store.need_flush
    assert scheduler.has_pending_stores()
    before = scheduler.cpu_block_pool.get_num_free_blocks()
    hand.stored(store)
    assert scheduler.cpu_block_pool.get_num_free_blocks() == before + 8
    assert not scheduler.has_pending_stores()
    hand.finish(first)

    second = hand.request("second", range(8 * BLOCK))
    assert scheduler.get_num_new_matched_tokens(second, 0) == (7 * BLOCK, True)  # the last token is computed
    hand.admit(second, 7 * BLOCK)
    load = hand.step()
    blocks = [block.block_id for block in hand.requests["second"][1][0]]
    assert load.load_gpu_blocks == blocks[:7]
    assert load.load_cpu_blocks == store.store_cpu_blocks[:7]
    assert ["second"] in load.load_event_to_reqs.values()
    hand.loaded(second)
    hand.finish(second)
    hand.step()
    assert all(block.ref_cnt == 0 for block in hand.pool.blocks[1:])


def test_an_engine_that_only_waits_for_copies_leaves_the_interpreter_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`LLM` in one process steps as fast as it can while a request waits for its load. A load of 35 blocks took a
    thousand steps, most of the time without the thread that copies."""
    slept: list[float] = []
    monkeypatch.setattr("forebay.vllm.scheduler.time.sleep", slept.append)
    hand = Hand("forebay", [full()])
    hand.keep(hand.request("first", range(8 * BLOCK)))
    other = hand.request("other", range(1000, 1010))
    hand.admit(other)
    second = hand.request("second", range(8 * BLOCK))
    assert hand.scheduler.get_num_new_matched_tokens(second, 0) == (7 * BLOCK, True)
    hand.admit(second, 7 * BLOCK)
    slept.clear()
    hand.step()
    assert slept == [], "there is an order to be given"
    hand.step(other)
    assert slept == [], "there is something to compute"
    hand.step()
    assert len(slept) == 1
    hand.loaded(second)
    hand.step()
    assert len(slept) == 1, "nothing is on its way"


@BOTH
def test_a_request_that_ends_with_its_last_block_is_stored_whole(name: str) -> None:
    hand = Hand(name, [full()])
    request = hand.request("one", range(4 * BLOCK))
    hand.admit(request)
    assert hand.step(request, confirmed=False).store_event == -1
    request.num_computed_tokens = request.num_tokens
    hand.finish(request)  # max_tokens=1: no step after the one that computed it
    hand.stored(hand.step())
    assert hand.scheduler.get_num_new_matched_tokens(hand.request("again", range(5 * BLOCK)), 0) == (
        4 * BLOCK,
        True,
    )


@BOTH
def test_fewer_tokens_than_offered_may_be_taken_or_none(name: str) -> None:
    hand = Hand(name, [full()])
    hand.keep(hand.request("first", range(8 * BLOCK)))
    for taken in (3, 0):
        request = hand.request(f"takes {taken}", range(9 * BLOCK))
        assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (8 * BLOCK, True)
        hand.admit(request, taken * BLOCK)
        assert len(hand.step().load_gpu_blocks) == taken
        if taken:
            hand.loaded(request)
        hand.finish(request)
    metadata = hand.step()
    if metadata.store_event >= 0:
        hand.stored(metadata)
    assert all(block.ref_cnt == 0 for block in hand.pool.blocks[1:])


@BOTH
def test_what_must_not_be_read_is_not_offered(name: str) -> None:
    hand = Hand(name, [full()])
    hand.keep(hand.request("first", range(8 * BLOCK)))
    request = hand.request("prompt_logprobs", range(8 * BLOCK))
    request.skip_reading_prefix_cache = True
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


@BOTH
def test_reset_forgets_in_one_call(name: str) -> None:
    hand = Hand(name, [full()])
    hand.keep(hand.request("first", range(8 * BLOCK)))
    hand.forget_device()
    assert hand.scheduler.reset() is True
    assert hand.scheduler.get_num_new_matched_tokens(hand.request("second", range(8 * BLOCK)), 0) == (0, False)


@pytest.mark.parametrize("kind", [window, reference_window])
def test_blocks_that_the_engine_dropped_from_a_running_request_are_not_stored_as_its_own(kind: Any) -> None:
    """Sliding windows drop blocks from the head. Reference windows are full attention to vLLM, and drop what was
    generated, behind the prompt and before the window."""
    hand = Hand("forebay", [kind(BLOCK)])
    request = hand.request("one", range(6 * BLOCK))
    hand.admit(request)
    hand.step(request, confirmed=False)
    blocks = hand.requests["one"][1][0]
    dropped = blocks[2:4]
    hand.pool.free_blocks(dropped)
    hand.pool.evict_blocks({block.block_id for block in dropped})  # somebody else was given them
    stored = hand.step(request).store_gpu_blocks
    assert stored == [block.block_id for block in blocks if block not in dropped]


def test_every_rank_has_to_report_a_store() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=1, world_size=3, rank=0)
    hand = Hand("forebay", [full()], vllm_config=vllm_config(parallel_config=parallel))
    first = hand.request("first", range(4 * BLOCK))
    hand.admit(first)
    store = hand.step(first)
    hand.forget_device()
    second = hand.request("second", range(5 * BLOCK))
    for reported in range(3):
        answer = hand.scheduler.get_num_new_matched_tokens(second, 0)
        assert answer in {(0, False), (None, False)}, f"offered after {reported} of 3 ranks"
        hand.stored(store)
    assert hand.scheduler.get_num_new_matched_tokens(second, 0) == (4 * BLOCK, True)


@pytest.mark.parametrize("seed", range(20))
def test_capacity_and_lazy_target_are_vllms(seed: int) -> None:
    rng = random.Random(seed)
    kinds = [full, lambda block: window(rng.randint(1, 400), block), lambda block: chunked(64, block), mamba]
    config = kv_cache_config(
        [rng.choice(kinds)(rng.choice([16, 32, 64])) for _ in range(rng.randint(1, 5))],
        rng.randint(1, 5000),
        rng.randint(1, 1 << 16),
    )
    ours, theirs = scheduler_class("forebay"), scheduler_class("vllm")
    for _ in range(20):
        capacity, batched = rng.randint(1, 1 << 32), rng.randint(1, 20_000)
        assert ours._derive_cpu_config(config, capacity) == theirs._derive_cpu_config(config, capacity)
        assert ours._estimate_lazy_target_blocks(config, batched) == theirs._estimate_lazy_target_blocks(
            config, batched
        )


LAYOUTS: dict[str, Any] = {
    "full": lambda: [full()],
    "full and window": lambda: [full(), window(40)],
    "wide window": lambda: [full(), window(100)],
    "two windows": lambda: [full(), window(17), window(64)],
    "larger blocks": lambda: [full(16), full(32)],
    "larger blocks in the window": lambda: [full(16), window(70, 32)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(3))
def test_matches_are_vllms(layout: str, seed: int) -> None:
    """Prompts that share prefixes, all kept by both; then every one is asked for, from every start that the engine
    could have itself."""
    rng = random.Random(f"{layout} {seed}")
    stem = [rng.randrange(100) for _ in range(200)]
    prompts = [
        stem[: rng.randint(1, 200)] + [rng.randrange(100) for _ in range(rng.randint(1, 120))] for _ in range(6)
    ]
    hands = [Hand(name, LAYOUTS[layout](), blocks=512, slots=512) for name in ("forebay", "vllm")]
    for number, prompt in enumerate(prompts):
        for hand in hands:
            hand.keep(hand.request(f"keeps {number}", prompt))
    hits = 0
    for number, prompt in enumerate(prompts):
        longer = [*prompt, *range(rng.randint(0, 40))]
        aligned = hands[0].scheduler.block_size
        for device_tokens in range(0, len(longer), aligned * rng.choice([1, 2])):
            answers = []
            for hand in hands:
                hand.forget_device()  # one side would bridge gaps from it, the other cannot
                request = hand.request(f"asks {number} {device_tokens}", longer)
                answers.append(hand.scheduler.get_num_new_matched_tokens(request, device_tokens))
                hand.scheduler.request_finished(request, [])
            assert answers[0] == answers[1], (len(longer), device_tokens)
            hits += answers[0][0] > 0
    assert hits


def test_asking_again_changes_nothing_and_leaks_nothing() -> None:
    """vLLM asks for a waiting request in every step, hundreds of times."""
    hand = Hand("forebay", [full(), window(64)], blocks=512, slots=512)
    hand.keep(hand.request("first", range(100 * BLOCK)))
    request = hand.request("waits", range(100 * BLOCK))
    answer = hand.scheduler.get_num_new_matched_tokens(request, 0)
    assert answer == (99 * BLOCK, True)
    manager = hand.scheduler.manager
    pinned = manager.pool.pinned
    tracemalloc.start()
    try:
        for _ in range(50):
            hand.scheduler.get_num_new_matched_tokens(request, 0)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(2000):
            assert hand.scheduler.get_num_new_matched_tokens(request, 0) == answer
        assert tracemalloc.get_traced_memory()[0] - before < 2000  # less than a byte per question
    finally:
        tracemalloc.stop()
    assert manager.pool.pinned == pinned
    manager.check()
    hand.scheduler.request_finished(request, [])
    assert manager.pool.pinned == 0
    manager.check()


def test_less_memory_than_a_block_is_refused_with_one_line() -> None:
    from forebay.errors import CapacityError

    with pytest.raises(
        CapacityError, match=r"capacity_bytes: expected .*at least one block \(1024 bytes\), got 1023"
    ):
        scheduler_class("forebay")(vllm_config(), kv_cache_config([full()], 64), 1023)


def test_block_sizes_given_by_position_are_refused() -> None:
    with pytest.raises(TypeError, match="lazy_offload: expected True or False, got 16"):
        scheduler_class("forebay")(vllm_config(), kv_cache_config([full()], 64), 65536, 16)


class Loading:
    """A request that waits for a load that the ranks were told of."""

    def __init__(self, specs: list[Any] | None = None, *, device_tokens: int = 0, **kwargs: Any) -> None:
        self.hand = Hand("forebay", specs or [full()], **kwargs)
        self.scheduler = self.hand.scheduler
        self.hand.keep(self.hand.request("first", range(8 * BLOCK)))
        self.hand.forget_device()
        self.request = self.hand.request("loads", range(9 * BLOCK))
        more = 8 * BLOCK - device_tokens
        assert self.scheduler.get_num_new_matched_tokens(self.request, device_tokens) == (more, True)
        self.hand.admit(self.request, more)
        [self.load] = self.hand.step().loads

    def ranks_say(self, *, finished: bool = True, done: int = 0, failed: int = 0, mismatched: int = 0) -> set[str]:
        """A step's result: who the engine is about to hear of, once the scheduler has seen it."""
        from vllm.v1.outputs import KVConnectorOutput

        from forebay.vllm import SimpleCPUOffloadWorkerMetadata

        events = [{self.load.id: ranks} if ranks else {} for ranks in (done, failed, mismatched)]
        output = KVConnectorOutput(
            finished_recving={self.request.request_id} if finished else set(),
            failed_recving={self.request.request_id} if finished and failed + mismatched else set(),
            kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata({}, *events),
        )
        self.scheduler.update_connector_output(output)
        return output.finished_recving or set()

    def verdicts(self) -> list[tuple[str, int | None, bool]]:
        return [tuple(each[:3]) for each in self.hand.step().verdicts]

    def pins(self) -> int:
        return sum(self.scheduler.manager.device_pins().values())


def test_a_rank_in_the_same_process_is_asked_what_has_ended_meanwhile() -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from forebay.vllm import SimpleCPUOffloadWorkerMetadata
    from forebay.vllm.metadata import Meanwhile

    loading = Loading()
    more = Meanwhile(SimpleCPUOffloadWorkerMetadata({}, {loading.load.id: 1}), {"loads"})
    said = SimpleCPUOffloadWorkerMetadata({}, meanwhile=lambda: more)
    output = KVConnectorOutput(kv_connector_worker_meta=said)
    loading.scheduler.update_connector_output(output)
    assert output.finished_recving == {"loads"}
    assert loading.verdicts() == []
    assert not loading.scheduler.has_pending_work()


def test_a_load_that_ends_in_time_needs_no_verdict() -> None:
    loading = Loading()
    assert loading.ranks_say(done=1) == {"loads"}
    assert loading.verdicts() == []
    assert not loading.scheduler.has_pending_work()


def test_a_load_that_fails_on_a_rank_needs_no_verdict_and_is_not_offered_again() -> None:
    loading = Loading()
    assert loading.ranks_say(failed=1) == {"loads"}
    assert loading.verdicts() == []
    assert loading.scheduler.get_num_new_matched_tokens(loading.request, 0) == (0, False)
    other = loading.hand.request("other", range(9 * BLOCK))
    assert loading.scheduler.get_num_new_matched_tokens(other, 0) == (0, False), (
        "the bad bytes are offered to others"
    )


def test_a_load_of_other_bytes_than_were_stored_is_a_failed_one_and_counted() -> None:
    loading = Loading()
    assert loading.ranks_say(mismatched=1) == {"loads"}
    assert loading.verdicts() == []
    assert loading.scheduler.manager.stats.checksum_mismatches == 1
    assert loading.scheduler.get_num_new_matched_tokens(loading.request, 0) == (0, False)
    assert loading.scheduler.get_stats().data["checksum_mismatches"] == 1
    other = loading.hand.request("other", range(9 * BLOCK))
    assert loading.scheduler.get_num_new_matched_tokens(other, 0) == (0, False)


def test_a_load_past_its_deadline_is_failed_by_a_verdict() -> None:
    from forebay.config import OffloadConfig

    loading = Loading(settings=OffloadConfig(1, load_deadline_s=0.0))
    assert loading.verdicts() == [("loads", loading.load.id, True)]
    assert loading.verdicts() == []
    assert loading.pins() == 8, "the ranks may still be writing"
    assert loading.ranks_say(finished=True) == {"loads"}  # every rank has repeated the verdict
    assert loading.pins() == 8
    loading.ranks_say(finished=False, done=1)
    assert loading.pins() == 0
    loading.scheduler.manager.check()


def test_an_aborted_load_lets_the_engine_go_and_keeps_its_blocks_until_it_ends() -> None:
    loading = Loading()
    loading.hand.finish(loading.request)
    assert loading.scheduler.has_pending_work()
    assert loading.verdicts() == [("loads", loading.load.id, False)]
    assert loading.pins() == 8
    assert loading.ranks_say(finished=True, done=1) == {"loads"}, (
        "the engine must hear of it, or it waits for ever"
    )
    assert loading.pins() == 0
    assert not loading.scheduler.has_pending_work()
    assert all(block.ref_cnt == 0 for block in loading.hand.pool.blocks[1:])


def test_what_another_connector_was_loading_is_not_stored_when_the_request_is_aborted() -> None:
    """vLLM counts tokens as computed from the moment it waits for them, whoever brings them (MultiConnector)."""
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks

    hand = Hand("forebay", [full()])
    request = hand.request("waits", range(6 * BLOCK))
    assert hand.scheduler.get_num_new_matched_tokens(request, BLOCK) == (0, False)
    handles = (hand.pool.get_new_blocks(5),)
    hand.pool.cache_full_blocks(request, handles[0], 0, 1, BLOCK, 0)  # of what is loaded nothing has a hash yet
    hand.requests["waits"] = (request, handles)
    hand.scheduler.update_state_after_alloc(request, KVCacheBlocks(handles), 0)
    request.num_computed_tokens = 5 * BLOCK
    hand.step()
    hand.finish(request)
    assert hand.step().store_gpu_blocks == [handles[0][0].block_id]


def test_bytes_that_arrive_after_a_reset_are_not_used() -> None:
    """What was loaded was computed with weights that may be gone."""
    loading = Loading()
    loading.scheduler.reset()
    assert loading.ranks_say(done=1) == set(), "the engine would run on what was to be forgotten"
    assert loading.verdicts() == [("loads", None, True)]
    assert loading.pins() == 0
    loading.scheduler.manager.check()


def test_what_was_announced_before_a_reset_is_taken_back_after_it() -> None:
    """A router that has applied all events knows of nothing on the host, also of blocks that were evicted between
    two steps and of which it had not heard yet."""
    events = SimpleNamespace(enable_kv_cache_events=True)
    hand = Hand("forebay", [full()], slots=4, vllm_config=vllm_config(kv_events_config=events))
    known: set[Any] = set()

    def apply() -> None:
        for event in hand.scheduler.take_events():
            assert event.medium == "CPU"
            (known.update if type(event).__name__ == "BlockStored" else known.difference_update)(
                event.block_hashes
            )

    hand.keep(hand.request("first", range(4 * BLOCK)))
    apply()
    assert len(known) == 4
    second = hand.request("second", range(1000, 1000 + 4 * BLOCK))
    hand.admit(second)
    hand.step(second)  # its slots are taken from the first, and nobody has asked for events since
    hand.scheduler.reset()
    apply()
    assert known == set()


def test_where_loads_cannot_be_taken_back_a_reset_has_to_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import compat

    loading = Loading(specs=[full(), window(1000)])
    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", False)
    assert loading.scheduler.reset() is False
    loading.ranks_say(done=1)
    assert loading.scheduler.reset() is True


@pytest.mark.parametrize("device_tokens", [0, 4 * BLOCK])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("by_request", [True, False], ids=["by request", "by block"])
def test_a_late_load_is_waited_for_where_it_cannot_be_taken_back(
    by_request: bool, groups: int, device_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told by block, vLLM cannot do it for several groups; and for one it computes into the same blocks, if the
    device had some before them."""
    from forebay.config import OffloadConfig
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "REPORTS_FAILED_REQUESTS", by_request)
    given_up = by_request or (groups == 1 and device_tokens == 0)
    specs = [full(), window(1000)][:groups]
    loading = Loading(specs, device_tokens=device_tokens, settings=OffloadConfig(1, load_deadline_s=0.0))
    assert [request for request, _, failed in loading.verdicts() if failed] == ["loads"] * given_up
    assert loading.scheduler.manager.stats.overdue_transfers == 1
    if not given_up:
        assert loading.ranks_say(done=1) == {"loads"}
        assert loading.verdicts() == []
        assert loading.scheduler.manager.stats.recomputes == 0


def test_the_engine_that_steps_without_reports_still_meets_deadlines() -> None:
    from forebay.config import OffloadConfig

    hand = Hand("forebay", [full()], settings=OffloadConfig(1, store_deadline_s=0.0))
    first = hand.request("first", range(4 * BLOCK))
    hand.admit(first)
    hand.step(first)
    assert hand.scheduler.has_pending_work()
    hand.step()
    assert not hand.scheduler.has_pending_work(), "a store that never reports keeps an idle engine stepping"


def test_a_preempted_request_that_is_admitted_in_the_same_step_keeps_its_new_table() -> None:
    from vllm.v1.core.sched.output import SchedulerOutput

    hand = Hand("forebay", [full()])
    request = hand.request("one", range(4 * BLOCK))
    hand.admit(request)
    _, old = hand.requests["one"]
    hand.pool.free_blocks(reversed(old[0]))
    hand.forget_device()
    request.num_preemptions += 1
    assert hand.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    hand.admit(request)
    new = [block.block_id for block in hand.requests["one"][1][0]]
    output = SchedulerOutput.make_empty()
    output.preempted_req_ids = {"one"}
    assert hand.scheduler.build_connector_meta(output).need_flush
    assert hand.step(request).store_gpu_blocks == new
    assert hand.scheduler.manager.stats.lookups == 2, "it starts over, and asks again"


def test_a_hit_that_may_lack_a_window_is_not_built_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.27 counts what full attention has as a hit of a model with states, whatever its windows have."""
    from forebay.vllm import compat

    for diverges in (False, True):
        monkeypatch.setattr(compat, "LOCAL_HITS_DIVERGE", diverges)
        hand = Hand("forebay", [full(), window(64), mamba()])
        hand.keep(hand.request("first", range(8 * BLOCK)))
        hand.forget_device()
        again = hand.request("again", range(9 * BLOCK))
        assert hand.scheduler.get_num_new_matched_tokens(again, 0) == (8 * BLOCK, True)
        behind = (0, False) if diverges else (4 * BLOCK, True)
        assert hand.scheduler.get_num_new_matched_tokens(again, 4 * BLOCK) == behind
        assert (hand.scheduler.manager.pool.pinned == 0) is diverges, "the manager has to know"


def test_the_least_that_every_rank_has_is_what_all_use() -> None:
    hand = Hand("forebay", [full()])
    hand.scheduler.agree_on_slots([64, 40, 64])
    assert hand.scheduler.num_cpu_blocks == hand.scheduler.cpu_kv_cache_config.num_blocks == 40
    assert hand.scheduler.cpu_block_pool.get_num_free_blocks() == 40
    assert hand.step().slots == 40


def _ranks_have_ready(hand: Hand, ready: dict[int, int]) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    from forebay.vllm import SimpleCPUOffloadWorkerMetadata

    meta = SimpleCPUOffloadWorkerMetadata({}, ready=ready)
    hand.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


def test_slots_are_used_once_every_rank_has_them_ready() -> None:
    hand = Hand("forebay", [full()])
    hand.scheduler.agree_on_slots([64, 40, 64], {0: 64, 2: 3, 3: 8})  # rank 1 has no caches
    pool = hand.scheduler.manager.pool
    assert (pool.capacity, pool.ready) == (40, 3)
    assert hand.scheduler.cpu_block_pool.get_num_free_blocks() == 3
    request = hand.request("a", range(10 * BLOCK))
    hand.admit(request)
    stores = hand.step(request)
    assert stores.store_cpu_blocks == [0, 1, 2]
    hand.stored(stores)
    for said, ready in [({2: 8}, 8), ({0: 64}, 8), ({3: 64}, 8), ({2: 64, 3: 64}, 40), ({2: 4}, 40)]:
        _ranks_have_ready(hand, said)
        assert pool.ready == ready
    assert hand.step(request).store_cpu_blocks == list(range(3, 10))
    assert hand.scheduler.get_stats().data["slots_ready"] == 40


def test_slots_of_ranks_that_nobody_asked_at_the_start_are_all_ready() -> None:
    hand = Hand("forebay", [full()])
    slots = hand.scheduler.manager.pool.capacity
    _ranks_have_ready(hand, {0: 3})
    assert hand.scheduler.manager.pool.ready == slots


def test_on_a_gpu_no_slot_is_ready_before_a_rank_has_said_so() -> None:
    """Another connector beside this one may keep the ranks from being asked at the start."""
    config = vllm_config()
    config.device_config = SimpleNamespace(device_type="cuda")
    hand = Hand("forebay", [full()], vllm_config=config)
    pool = hand.scheduler.manager.pool
    assert pool.ready == 0
    request = hand.request("a", range(10 * BLOCK))
    hand.admit(request)
    assert hand.step(request).store_cpu_blocks == []
    _ranks_have_ready(hand, {0: 3})
    assert pool.ready == 3
    assert hand.step(request).store_cpu_blocks == [0, 1, 2]
    hand.scheduler.agree_on_slots([pool.capacity], {0: pool.capacity})
    assert hand.scheduler.manager.pool.ready == pool.capacity


def test_what_is_ready_is_known_whichever_comes_first_the_ranks_or_the_device() -> None:
    hand = Hand("forebay", [full()])
    slots = hand.scheduler.num_cpu_blocks
    hand.scheduler.agree_on_slots([slots], {0: 5})
    assert hand.scheduler.manager.pool.ready == 5
    hand.scheduler.bind_gpu_block_pool(hand.pool)
    assert hand.scheduler.manager.pool.ready == 5
