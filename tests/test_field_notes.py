"""What went wrong for others: one test for each failure that the scheduler's side can prevent.

Numbers are public issues of vllm-project/vllm unless another project is named.
"""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from forebay import (
    BlockId,
    FullAttention,
    Hit,
    Key,
    KVLayout,
    Mode,
    NotYet,
    Progress,
    Recurrent,
    SlidingWindow,
    host_slots,
)
from forebay.testing import Faults
from tests.builders import FULL, Desk, hold, lose_device, make_engine, prompt, release, served, tokens_of

# --- wrong output -------------------------------------------------------------------------------------------


def test_blocks_still_being_computed_are_not_stored() -> None:
    """Store read before the compute was done (#45704): only what an earlier step computed is planned."""
    engine = make_engine(max_batched_tokens=16)
    request = engine.submit(prompt(32), 4)
    engine.step()
    assert request.computed == 16
    assert engine.manager.pool.cached + engine.manager.pool.filling == 0, "computed in this very step"
    engine.step()
    assert engine.manager.pool.cached == 4


def test_a_slot_is_not_reused_while_a_load_reads_it() -> None:
    """A copy lands where somebody else reads (#47282): memory under a running copy belongs to the copy."""
    engine = make_engine(slots=8, num_blocks=64)
    served(engine, prompt(32))
    lose_device(engine)
    hold(engine)
    reading = engine.submit(prompt(33), 2)
    engine.step()
    assert reading.id in engine.loading
    engine.submit(prompt(32, 1), 1)  # would like all eight slots
    for _ in range(3):
        engine.step()
    release(engine)
    engine.run()  # the engine compares every byte it reads
    assert reading.cached_tokens == 32


def test_an_aborted_load_does_not_write_into_blocks_of_the_next_request() -> None:
    engine = make_engine(num_blocks=12, slots=16)
    served(engine, prompt(32))
    lose_device(engine)
    hold(engine)
    aborted = engine.submit(prompt(33), 2)
    engine.step()
    engine.abort(aborted)
    follower = engine.submit(prompt(8, 1), 2)  # takes whatever blocks the engine believes to be free
    for _ in range(3):
        engine.step()
    release(engine)
    engine.run()
    assert follower.generated == 2


@pytest.mark.parametrize("when", ["planned", "copying"])
def test_an_aborted_load_never_stores_the_blocks_it_did_not_fill(when: str) -> None:
    """Engines count tokens of a load as computed before they have arrived."""
    desk = Desk()
    whole = desk.store(prompt(32))
    keys: list[list[Key]] = [[]]
    desk.layout.extend_keys(keys, whole.hashes)
    pool = desk.manager.pool
    pool.forget(keys[0][4:], [pool.index()[key] for key in keys[0][4:]])  # those would be moved within the device
    for block in desk.device.find_run(keys[0], 0, 4):
        desk.device.uncache(block)
    request = desk.request(prompt(33))
    assert tokens_of(desk.manager.match(request, 0)) == 32
    table = desk.blocks_for(33)
    desk.manager.allocated(request, table, 0, 32)
    loads = desk.step().loads if when == "copying" else []
    desk.end(request, table, confirmed=32)
    assert desk.step().stores == []
    desk.report(*loads)
    assert pool.cached == 4


def test_the_layout_fingerprint_tells_any_two_layouts_apart() -> None:
    """Bytes read under another layout after an upgrade (LMCache #4463, sglang #39830)."""
    layouts = [
        FULL,
        KVLayout((FullAttention(8),), 4, 16),
        KVLayout((FullAttention(4),), 2, 16),
        KVLayout((FullAttention(4),), 4, 32),
        KVLayout((FullAttention(4), FullAttention(4)), 4, 16),
        KVLayout((SlidingWindow(4, window_tokens=8),), 4, 16),
        KVLayout((SlidingWindow(4, window_tokens=12),), 4, 16),
        KVLayout((FullAttention(2, context_parallel=2),), 4, 16),
    ]
    assert len({layout.fingerprint for layout in layouts}) == len(layouts)
    assert FULL.fingerprint == KVLayout((FullAttention(4),), 4, 16).fingerprint


def test_a_recurrent_state_is_restored_with_the_prefix_or_not_at_all() -> None:
    """State not restored (LMCache #2845), or taken from another boundary (#44599)."""
    layout = KVLayout((FullAttention(4), Recurrent(8)), 4, 16)
    desk = Desk(layout)
    whole = desk.request(prompt(40))
    table = desk.compute(whole)
    for block in (table[1][0], table[1][1], table[1][3], table[1][4]):
        desk.device.uncache(block)  # only the state after 24 tokens was kept
    desk.manager.allocated(whole, table, 0, 0)
    desk.report(*desk.step(Progress(whole.id, 40)).stores)
    desk.end(whole, table)
    desk.device.reset()
    request = desk.request(prompt(41))
    assert tokens_of(desk.manager.match(request, 0)) == 24, "40 tokens of attention, but a state only at 24"
    target = desk.blocks_for(24)
    desk.manager.allocated(request, target, 0, 24)
    [load] = desk.step().loads
    assert load.blocks == [*target[0], target[1][2]]


def test_a_window_is_never_filled_with_blocks_it_has_left() -> None:
    """Stale window (#42959): a table entry that now belongs to somebody else is not stored under the old key."""
    layout = KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=6)), 4, 16)
    desk = Desk(layout)
    request = desk.request(prompt(32))
    table = desk.compute(request)
    desk.manager.allocated(request, table, 0, 0)
    for block in table[1][:5]:  # the window has moved on; the blocks were freed and taken by another prompt
        desk.device.uncache(block)
    stranger: list[list[Key]] = [[], []]
    layout.extend_keys(stranger, desk.request(prompt(32, 9)).hashes)
    for block, key in zip(table[1][:5], stranger[1], strict=False):
        desk.device.cache(block, key)
    [store] = desk.step(Progress(request.id, 32)).stores
    assert store.blocks == [*table[0], *table[1][5:]]


def test_prompts_that_differ_only_in_salt_never_share() -> None:
    """Keys that collide: adapters, images, salts (#44250, #44701, #56643)."""
    engine = make_engine()
    secret = engine.submit(prompt(32), 1, salt=b"tenant a")
    engine.run()
    lose_device(engine)
    other = engine.submit(prompt(32), 1, salt=b"tenant b")
    engine.run()
    assert other.cached_tokens == 0
    again = engine.submit(prompt(32), 1, salt=b"tenant a")
    engine.run()
    assert again.cached_tokens == 28
    assert secret.num_tokens == again.num_tokens


def test_groups_never_share_a_key() -> None:
    keys: list[list[Key]] = [[], [], []]
    layout = KVLayout((FullAttention(4), FullAttention(4), Recurrent(4)), 4, 16)
    layout.extend_keys(keys, Desk(layout).request(prompt(32)).hashes)
    every = [key for group in keys for key in group]
    assert len(set(every)) == len(every) == 24
    assert [layout.group_of(group[0]) for group in keys] == [0, 1, 2]


def test_a_request_that_must_compute_everything_is_promised_nothing() -> None:
    """prompt_logprobs served from the cache (#54998)."""
    engine = make_engine()
    served(engine, prompt(32))
    lose_device(engine)
    request = engine.submit(prompt(32), 1, may_load=False)
    engine.run()
    assert request.cached_tokens == 0
    assert engine.manager.stats.hit_tokens == 0


# --- crashes, hangs, leaks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chance", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("mode", Mode)
def test_failing_copies_end_in_recomputes_never_in_a_crash_or_a_hang(chance: float, mode: Mode) -> None:
    """A failed copy takes the engine down (#39732) or leaves requests waiting for ever."""
    engine = make_engine(num_blocks=24, slots=64, ranks=2, mode=mode, seed=7)
    for copier in engine.copiers:
        copier.faults = Faults(fail_chance=chance)
    for turn in range(3):
        for family in range(6):
            engine.submit(prompt(16 + 4 * turn, family), 3)
        engine.run(max_steps=2000)
    assert len(engine.finished) == 18
    assert engine.manager.pool.pinned == 0
    assert engine.manager.stats.store_failures > 0


def test_nothing_is_evicted_between_match_and_allocation() -> None:
    """Evicted between the two calls: assertion (#39702). It is pinned at match."""
    desk = Desk(slots=4)
    desk.store(prompt(16))
    desk.device.reset()
    waiting = desk.request(prompt(17))
    assert tokens_of(desk.manager.match(waiting, 0)) == 16
    for family in range(1, 4):
        desk.store(prompt(16, family))
    assert desk.manager.allocated(waiting, desk.blocks_for(17), 0, 16)
    assert len(desk.step().loads[0].slots) == 4


def test_two_requests_with_the_same_new_blocks_store_them_once() -> None:
    """The same block stored twice across steps (#41289)."""
    desk = Desk()
    first, second = desk.request(prompt(16)), desk.request(prompt(16))
    for request in (first, second):
        desk.manager.allocated(request, desk.compute(request), 0, 0)
    [store] = desk.step(Progress(first.id, 8), Progress(second.id, 16)).stores
    assert len(store.slots) == 4
    assert desk.step(Progress(first.id, 16), Progress(second.id, 16)).stores == []
    desk.report(store)
    assert desk.manager.pool.cached == 4


def test_scheduler_and_ranks_arrive_at_the_same_number_of_slots() -> None:
    """Different slot counts with pipeline parallelism: out-of-bounds copies (#50821, #52921). The number follows
    from three others; a scheduler and ranks that agree on those cannot differ, whatever layers each one has."""
    assert {host_slots(1000, 1000 * size, 64 * 1000 * size) for size in (3, 17, 4096)} == {64_000}


def test_requests_whose_loads_would_fill_the_device_do_not_block_each_other() -> None:
    """Running: 0, Waiting: N, for ever (#45387, #57841): loaded requests hold all blocks and none can go on."""
    layout = KVLayout((Recurrent(4),), 4, 16)
    engine = make_engine(layout, num_blocks=17, slots=200, max_batched_tokens=24)
    for family in range(6):
        served(engine, prompt(32, family))
    lose_device(engine)
    for family in range(6):
        for _ in range(3):
            engine.submit([*prompt(32, family), *range(8)], 4)
    engine.run(max_steps=1000)
    assert engine.manager.stats.loaded_blocks > 0


def test_loads_wait_until_those_before_them_have_room_to_run() -> None:
    """Behind the test above: promises are only made if everybody who got one can still run."""
    desk = Desk(KVLayout((Recurrent(4),), 4, 16), num_blocks=17, max_batched_tokens=64)
    for family in range(2):
        desk.store(prompt(32, family))
    desk.device.reset()
    first, second = (desk.request([*prompt(32, family), *prompt(20, 5)]) for family in range(2))
    assert desk.manager.match(first, 0) == Hit(32, needs_load=True)
    null = BlockId(0)
    taken = desk.device.take(1)
    assert taken is not None
    desk.manager.allocated(first, [[null] * 7 + taken], 0, 32)
    [load] = desk.step().loads
    assert isinstance(desk.manager.match(second, 0), NotYet), "the first still needs most of the device"
    desk.report(load)
    assert isinstance(desk.manager.match(second, 0), NotYet), "loaded, but not running yet"
    desk.step(Progress(first.id, 32))
    assert desk.manager.match(second, 0) == Hit(32, needs_load=True)


def test_finished_stores_are_committed_while_the_engine_idles() -> None:
    engine = make_engine()
    for copier in engine.copiers:
        copier.faults = Faults(delay_polls=50)
    engine.submit(prompt(16), 1)
    engine.run()
    assert engine.manager.pool.cached == 4
    assert not engine.device.pins


def test_a_load_that_never_reports_ends_at_its_deadline_and_its_memory_is_never_reused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A dead copy thread: every later load waits for ever."""
    engine = make_engine(ranks=2, slots=8, num_blocks=64, load_deadline_s=3.0)
    served(engine, prompt(32))
    lose_device(engine)
    engine.copiers[1].faults = Faults(drop_chance=1.0)
    request = engine.submit(prompt(33), 2)
    engine.step()
    blocks = list(request.table[0][:8])
    engine.clock.advance(3.1)
    engine.step()
    engine.copiers[1].faults = Faults()
    while request.generated < 2:
        engine.step()
    assert request.cached_tokens == 0
    assert engine.manager.stats.overdue_transfers == 1
    assert len(caplog.records) == 1
    assert "rank 1" in caplog.text
    for family in range(1, 12):
        engine.submit(prompt(32, family), 1)
    for _ in range(60):
        engine.step()
    assert engine.manager.pool.pinned == 8, "nobody knows whether rank 1 still reads these slots"
    assert not set(blocks) & set(engine.device.next_evictions(100)[0]), "or still writes these blocks"
    engine.deliver_lost_reports()
    assert engine.manager.pool.pinned == 0
    assert not engine.device.pins


def test_a_store_that_never_reports_is_counted_and_logged_and_keeps_its_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    desk = Desk(store_deadline_s=1.0)
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    desk.step(Progress(request.id, 16))
    for _ in range(3):
        desk.clock.advance(1.5)
        desk.report()
    assert desk.manager.stats.overdue_transfers == 1
    assert len(caplog.records) == 1
    assert desk.manager.pool.filling == 4


def test_a_failed_load_is_not_tried_again_without_end() -> None:
    """After a failure the engine asks again, without limit."""
    engine = make_engine()
    served(engine, prompt(32))
    lose_device(engine)
    for copier in engine.copiers:
        copier.faults = Faults(fail_chance=1.0)
    request = engine.submit(prompt(33), 2)
    engine.run(max_steps=50)
    assert request.generated == 2
    assert engine.manager.stats.load_failures == 1


def test_one_reset_is_enough_and_drops_nothing_under_a_running_copy() -> None:
    """Reset while copies run: had to be called twice, or dropped references under a copy."""
    desk = Desk(ranks=2)
    request = desk.request(prompt(16))
    desk.manager.allocated(request, desk.compute(request), 0, 0)
    [store] = desk.step(Progress(request.id, 16)).stores
    desk.report(store, ranks=[0])
    desk.manager.reset()
    desk.check()
    assert desk.manager.pool.filling == 4
    assert sum(desk.device.pins.values()) == 4
    desk.report(store, ranks=[1])
    assert (desk.manager.pool.cached, desk.manager.pool.filling) == (0, 0)
    assert not desk.device.pins


def test_memory_does_not_grow_with_traffic() -> None:
    """Host memory grows without bound over days (LMCache #3187, #3767)."""
    engine = make_engine(num_blocks=40, slots=32, mode=Mode.LAZY)

    def traffic(start: int) -> int:
        for family in range(start, start + 150):
            served(engine, prompt(24, family))
        engine.finished.clear()
        engine.device.evicted.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        traffic(0)
        before = traffic(1000)
        after = max(traffic(2000), traffic(3000))
    finally:
        tracemalloc.stop()
    assert after < before + 40_000, "150 requests leave nothing behind"


# --- slower than nothing ----------------------------------------------------------------------------------


def test_asking_again_for_a_waiting_request_does_not_walk_its_keys_again() -> None:
    """Lookups of up to 655 ms in Python (LMCache #891); engines ask hundreds of times for one request."""
    desk = Desk(slots=1000, num_blocks=2100)
    desk.store(prompt(4000))
    desk.device.reset()
    waiting = desk.request(prompt(4001))
    walks: list[int] = []
    find_run = desk.manager.pool.find_run
    desk.manager.pool.find_run = lambda *args: (walks.append(1), find_run(*args))[1]  # type: ignore[method-assign]
    answers = {desk.manager.match(waiting, 0) for _ in range(500)}
    assert answers == {Hit(4000, needs_load=True)}
    assert len(walks) == 1
    assert desk.manager.pool.pinned == 1000


def test_a_prompt_that_is_nowhere_costs_one_look() -> None:
    desk = Desk(num_blocks=4000)
    looks: list[int] = []
    find_run = desk.device.find_run
    desk.device.find_run = lambda keys, start, stop: (looks.append(stop - start), find_run(keys, start, stop))[1]  # type: ignore[method-assign]
    assert desk.manager.match(desk.request(prompt(4001)), 0) == Hit(0, needs_load=False)
    assert len(looks) == 1


def test_hits_shorter_than_it_is_worth_are_computed() -> None:
    """A hit slower than a recompute (LMCache #914)."""
    desk = Desk(min_load_tokens=20)
    desk.store(prompt(32))
    desk.device.reset()
    assert tokens_of(desk.manager.match(desk.request(prompt(17)), 0)) == 0
    assert tokens_of(desk.manager.match(desk.request(prompt(25)), 0)) == 24


# --- what users ask for -------------------------------------------------------------------------------------


def test_a_request_can_ask_not_to_be_kept() -> None:
    """Control by request (#52113, #51234)."""
    engine = make_engine()
    engine.submit(prompt(32), 4, may_store=False)
    engine.run()
    assert engine.manager.pool.cached == 0


def test_occupancy_hits_misses_bytes_and_evictions_are_counted() -> None:
    engine = make_engine(slots=10)
    served(engine, prompt(32))
    lose_device(engine)
    served(engine, prompt(34))
    served(engine, prompt(32, 1))
    stats, pool = engine.manager.stats, engine.manager.pool
    assert (stats.lookups, stats.hit_tokens, stats.hit_blocks) == (3, 32, 8)
    assert (stats.miss_tokens, stats.miss_blocks) == (32 + 2 + 32, 8 + 0 + 8)
    assert (stats.loaded_bytes, stats.loaded_blocks) == (8 * 16, 8)
    assert stats.stored_bytes == 16 * stats.stored_blocks
    assert (pool.cached, pool.free, pool.evictions) == (10, 0, 6)
    assert stats.load_latency_s.count == 1
    assert set(stats.snapshot()) >= {"hit_tokens", "store_latency_s", "abandoned_transfers"}
