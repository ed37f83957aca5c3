from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.chains import Run
from forebay.errors import CapacityError, InvariantError
from forebay.ids import Key, Slot
from forebay.policies import LRU
from forebay.pool import HostPool
from tests.plan.paths import Path, path_lists
from tests.pool_builders import (
    POLICY_NAMES,
    cache,
    cache_chain,
    cached_numbers,
    check_idle,
    evict_one,
    key,
    keys,
    make_policy,
    make_pool,
    numbers,
)

every_policy = pytest.mark.parametrize("name", POLICY_NAMES)


def _pool(slots: int) -> HostPool:
    return make_pool("lru", slots)


class Told(LRU):
    """Notes when it hears of hits."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.touched: list[Key] = []

    def touch(self, keys: Sequence[Key]) -> None:
        self.touched += keys
        super().touch(keys)


def test_the_policy_hears_of_hits_when_there_is_time() -> None:
    policy = Told(4)
    pool = HostPool(4, policy)
    cache(pool, keys(1, 2))
    pool.touch(keys(1))
    assert policy.touched == []
    pool.settle()
    pool.settle()
    assert policy.touched == keys(1)


@pytest.mark.parametrize("what", ["make_room", "commit", "forget", "grow"])
def test_the_policy_hears_of_hits_before_anything_that_changes_its_order(what: str) -> None:
    policy = Told(4)
    pool = HostPool(4, policy, ready=3)
    cache(pool, keys(1, 2))
    coming = pool.reserve(keys(3), chained=False)
    pool.touch(keys(1))
    if what == "make_room":
        pool.make_room(1)
        assert numbers(pool.index()) == [1], "what was hit stays longer"
    elif what == "commit":
        pool.commit(keys(3), coming)
    elif what == "forget":
        pool.forget(keys(2), [pool.index()[key(2)]])
    else:
        pool.grow(4)
    assert policy.touched == keys(1)


def test_the_last_key_tells_whether_a_chain_is_there() -> None:
    pool = HostPool(16, LRU(16))
    cache_chain(pool, keys(1, 2, 3, 4))
    pool.commit(keys(5, 6), pool.reserve(keys(5, 6), chained=True, above=key(2)))
    assert pool.hold(key(1), key(4))
    assert pool.hold(key(1), key(2))
    assert pool.hold(key(1), key(6)), "a branch"
    on_the_way = pool.reserve(keys(7), chained=True, above=key(6))
    assert pool.hold(key(1), key(7)), "what is on the way is not missing"
    pool.forget(keys(7), on_the_way)
    assert not pool.hold(key(1), key(7))
    pool.forget(keys(2), [pool.index()[key(2)]])
    assert pool.hold(key(1), key(1))
    assert not pool.hold(key(1), key(4)), "a gap"
    assert not pool.hold(key(1), key(6)), "a gap above a branch"


def test_of_chains_whose_head_is_not_known_nothing_is_told() -> None:
    """Lazy stores come to blocks whose request is gone, and with it what they build on."""
    pool = HostPool(8, LRU(8))
    cache_chain(pool, keys(3, 4))
    assert not pool.hold(key(1), key(4))
    cache(pool, keys(5, 6))
    assert not pool.hold(key(5), key(6)), "they build on nothing"


def test_not_many_hits_are_put_off() -> None:
    policy = Told(4)
    pool = HostPool(4, policy)
    cache(pool, keys(1))
    for _ in range(1000):
        pool.touch(keys(1))
    assert 700 < len(policy.touched) < 1000


@every_policy
def test_to_hear_of_hits_later_changes_nothing_in_the_order(name: str) -> None:
    rng = random.Random(20241116)
    for _ in range(50):
        sooner, later = make_pool(name, 12), make_pool(name, 12)
        for pool in (sooner, later):
            cache_chain(pool, keys(*range(6)))
            cache(pool, keys(*range(6, 12)))
        for _ in range(rng.randrange(1, 6)):
            hit = keys(*rng.sample(range(14), rng.randrange(1, 5)))
            sooner.touch(hit)
            sooner.settle()
            later.touch(hit)
        assert [evict_one(sooner) for _ in range(8)] == [evict_one(later) for _ in range(8)]


# --- together and one by one -------------------------------------------------------------------------------


class OneByOne(LRU):
    """The same order, told to nobody beforehand."""

    def oldest(self, count: int) -> Sequence[Key]:
        return ()


def _serve(pool: HostPool, path: Path, chained: bool) -> list[object]:
    """A prompt is hit as far as it is there, and the rest of it is stored as far as there is room."""
    chain = keys(*path)
    found = len(pool.find_run(chain, 0, len(chain)))
    pool.touch(chain[:found])
    missing = [chain[i] for i in pool.missing(chain)]
    wanted = missing[: pool.make_room(len(missing), chain[found - 1 : found])]
    slots: list[Slot] = []
    if wanted:
        slots = pool.reserve(wanted, chained=chained, above=chain[found - 1] if found and chained else None)
        pool.commit(wanted, slots)
    return [found, slots, pool.take_removed(), pool.free]


@given(
    path_lists(max_requests=60),
    st.integers(1, 40),
    st.lists(st.integers(0, 5), max_size=60),
    st.booleans(),
    st.sampled_from([1, 3, 16]),
)
@settings(max_examples=200)
def test_what_goes_together_is_what_would_have_gone_one_by_one(
    paths: list[Path], slots: int, pinning: list[int], chained: bool, few: int
) -> None:
    """Slots, what was evicted, and in which order; also with slots that are pinned for a while."""
    with mock.patch("forebay.pool._FEW", few), mock.patch("forebay.pool._AT_ONCE", 2 * few):
        _compare(paths, slots, pinning, chained)


def _compare(paths: list[Path], slots: int, pinning: list[int], chained: bool) -> None:
    pools = HostPool(slots, LRU(slots)), HostPool(slots, OneByOne(slots))
    pinned: list[Slot] = []
    for path, pin in zip_longest(paths, pinning[: len(paths)], fillvalue=1):
        together, one_by_one = (_serve(pool, path, chained) for pool in pools)
        assert together == one_by_one
        if pin == 0:
            change = [slot for slot in pools[0].find_run(keys(*path), 0, len(path)) if slot not in pinned]
            for pool in pools:
                pool.pin(change)
            pinned += change
        elif pin == 5:
            for pool in pools:
                pool.unpin(pinned)
            pinned.clear()
        for pool in pools:
            pool.check(Counter(pinned), [], {})


def test_ends_of_chains_go_together() -> None:
    """Not key by key: the order is asked for no candidate."""
    pool = _pool(100)
    for start in range(0, 100, 20):
        cache_chain(pool, keys(*range(start, start + 20)))
    with mock.patch.object(LRU, "candidates", side_effect=AssertionError):
        assert pool.make_room(50) == 50
    assert numbers(pool.take_removed()) == [*range(19, -1, -1), *range(39, 19, -1), *range(59, 49, -1)]


class Watched(LRU):
    """Counts what it is asked, and answers with tuples, as a policy of somebody else may."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.looked_at = self.orders = 0

    def oldest(self, count: int) -> Sequence[Key]:
        oldest = tuple(super().oldest(count))
        self.looked_at += len(oldest)
        return oldest

    def candidates(self) -> Iterator[Key]:
        self.orders += 1
        return super().candidates()


def test_a_policy_may_name_the_oldest_in_a_tuple() -> None:
    pool = HostPool(40, Watched(40))
    cache_chain(pool, keys(*range(40)))
    assert pool.make_room(40) == 40
    assert numbers(pool.take_removed()) == [*range(39, -1, -1)]


def test_few_are_looked_at_where_few_may_go_together() -> None:
    """Something newer builds on every key of a long chain."""
    policy = Watched(1000)
    pool = HostPool(1000, policy)
    chain = keys(*range(500))
    cache_chain(pool, chain)
    for number, above in enumerate(chain):
        branch = keys(1000 + number)
        pool.commit(branch, pool.reserve(branch, chained=True, above=above))
    assert pool.make_room(1000) == 1000
    assert policy.looked_at < 10_000


def test_keys_that_build_on_nothing_go_many_at_a_time() -> None:
    policy = Watched(1000)
    pool = HostPool(1000, policy)
    windows = keys(*range(1000))
    pool.commit(windows, pool.reserve(windows, chained=False))
    assert pool.make_room(1000) == 1000
    assert policy.orders < 100


# --- sizes and errors ----------------------------------------------------------------------------------


def test_new_pool_is_all_free() -> None:
    pool = _pool(5)
    assert (pool.capacity, pool.free, pool.filling, pool.cached, pool.pinned) == (5, 5, 0, 0, 0)
    assert (pool.evictions, pool.take_removed()) == (0, [])
    check_idle(pool)


@pytest.mark.parametrize("slots", [0, -1])
def test_pool_without_a_slot_is_a_capacity_error(slots: int) -> None:
    with pytest.raises(CapacityError, match=f"slots.*at least 1.*{slots}"):
        HostPool(slots, LRU(1))


def test_reserving_more_than_is_free_is_an_invariant_error() -> None:
    pool = _pool(2)
    with pytest.raises(InvariantError, match="free"):
        pool.reserve(keys(1, 2, 3), chained=False)


@pytest.mark.parametrize("chained", [True, False])
def test_key_reserved_twice_is_an_invariant_error(chained: bool) -> None:
    with pytest.raises(InvariantError, match="reserved that has a slot"):
        _pool(4).reserve(keys(1, 1), chained=chained)
    pool = _pool(4)
    pool.reserve(keys(1), chained=chained)
    with pytest.raises(InvariantError, match="reserved that has a slot"):
        pool.reserve(keys(2, 1), chained=chained)


def test_key_reserved_while_it_is_cached_is_an_invariant_error() -> None:
    pool = _pool(4)
    cache(pool, keys(1))
    with pytest.raises(InvariantError, match="reserved that has a slot"):
        pool.reserve(keys(1), chained=False)


def test_slot_committed_that_is_not_filling_is_an_invariant_error() -> None:
    pool = _pool(4)
    slots = cache(pool, keys(1))
    with pytest.raises(InvariantError, match="not filling"):
        pool.commit(keys(1), slots)
    pool = _pool(4)
    slots = pool.reserve(keys(1, 2), chained=False)
    pool.forget(keys(1), slots[:1])
    with pytest.raises(InvariantError, match="not filling"):
        pool.commit(keys(1, 2), slots)


def test_unpin_without_a_pin_is_an_invariant_error() -> None:
    pool = _pool(2)
    slots = cache(pool, keys(1))
    pool.pin(slots)
    pool.unpin(slots)
    with pytest.raises(InvariantError, match="nobody holds"):
        pool.unpin(slots)


# --- the life of a slot --------------------------------------------------------------------------------


def test_reserved_key_is_on_the_way_and_cannot_be_found() -> None:
    pool = _pool(3)
    (slot,) = pool.reserve(keys(1), chained=False)
    assert key(1) not in pool
    assert key(1) not in pool.index()
    assert pool.find_run(keys(1), 0, 1) == []
    assert pool.on_the_way(key(1))
    assert (pool.free, pool.filling, pool.cached, pool.pinned) == (2, 1, 0, 0)
    pool.check(Counter(), [slot], {key(1): slot})


def test_key_that_nobody_knows_is_not_on_the_way() -> None:
    pool = _pool(3)
    cache(pool, keys(2))
    pool.reserve(keys(3), chained=False)
    assert not pool.on_the_way(key(1))
    assert not pool.on_the_way(key(2))


def test_committed_key_is_found_in_its_slot() -> None:
    pool = _pool(3)
    slots = pool.reserve(keys(1, 2), chained=True)
    pool.commit(keys(1, 2), slots)
    pool.release(slots)
    assert pool.index() == dict(zip(keys(1, 2), slots, strict=True))
    assert pool.find_run(keys(1, 2), 0, 2) == slots
    assert not pool.on_the_way(key(1))
    assert (pool.free, pool.filling, pool.cached, pool.pinned) == (1, 0, 2, 0)
    check_idle(pool)


def test_index_is_a_copy() -> None:
    pool = _pool(2)
    cache(pool, keys(1))
    pool.index().clear()
    assert cached_numbers(pool) == [1]


def test_pinned_slots_are_counted_once_however_often_they_are_pinned() -> None:
    pool = _pool(3)
    slots = cache(pool, keys(1, 2))
    pool.pin(slots)
    pool.pin(slots[:1])
    assert pool.pinned == 2
    pool.check(Counter([*slots, slots[0]]), (), {})
    pool.unpin(slots)
    assert pool.pinned == 1
    check_idle(pool, slots[0])
    pool.unpin(slots[:1])
    check_idle(pool)


def test_slots_given_out_are_distinct_and_inside_the_pool() -> None:
    pool = _pool(4)
    first = cache(pool, keys(1, 2, 3))
    pool.forget(keys(1, 3), [first[0], first[2]])
    again = pool.reserve(keys(4, 5, 6), chained=True)  # two used slots and a fresh one
    assert sorted([first[1], *again]) == [0, 1, 2, 3]


def test_missing_counts_neither_cached_keys_nor_those_on_the_way() -> None:
    pool = _pool(4)
    cache(pool, keys(1))
    pool.reserve(keys(2), chained=False)
    assert list(pool.missing(keys(0, 1, 2, 3))) == [0, 3]
    assert list(pool.missing(keys(0, 1, 2, 3), 10)) == [10, 13]
    assert list(pool.missing(keys(1, 2))) == []
    assert list(pool.missing(keys(5, 6, 7), 4)) == [4, 5, 6]
    assert list(pool.missing([])) == []


def test_run_ends_at_the_first_key_that_cannot_be_found() -> None:
    pool = _pool(8)
    slots = dict(zip(range(8), cache(pool, keys(0, 1, 2)) + pool.reserve(keys(3), chained=False), strict=False))
    slots |= dict(zip((4, 6), cache(pool, keys(4, 6)), strict=True))
    chain = keys(*range(8))
    assert pool.find_run(chain, 0, 8) == [slots[0], slots[1], slots[2]], "3 is on the way"
    assert pool.find_run(chain, 1, 2) == [slots[1]]
    assert pool.find_run(chain, 4, 8) == [slots[4]], "5 is nowhere"
    assert pool.find_run(chain, 6, 100) == [slots[6]]
    for start, stop in ((3, 8), (5, 8), (7, 8), (2, 2), (2, 1), (8, 8)):
        assert pool.find_run(chain, start, stop) == []


def test_forgotten_key_frees_its_slot_at_once_if_nobody_uses_it() -> None:
    pool = _pool(2)
    slots = cache(pool, keys(1, 2))
    pool.forget(keys(1), slots[:1])
    assert cached_numbers(pool) == [2]
    assert pool.free == 1
    assert numbers(pool.take_removed()) == [1]
    check_idle(pool)


def test_forgotten_slot_is_not_given_out_before_its_last_unpin() -> None:
    pool = _pool(1)
    slots = cache(pool, keys(1))
    pool.pin(slots)
    pool.pin(slots)
    pool.forget(keys(1), slots)
    assert key(1) not in pool
    assert (pool.free, pool.filling, pool.make_room(1)) == (0, 1, 0)
    pool.unpin(slots)
    assert pool.make_room(1) == 0
    check_idle(pool, *slots)
    pool.unpin(slots)
    assert pool.make_room(1) == 1
    check_idle(pool)


def test_forgotten_slot_is_not_given_out_before_its_store_has_ended() -> None:
    pool = _pool(1)
    slots = pool.reserve(keys(1), chained=False)
    pool.forget(keys(1), slots)
    assert not pool.on_the_way(key(1))
    assert (pool.free, pool.filling, pool.make_room(1)) == (0, 1, 0)
    pool.check(Counter(), slots, {})
    pool.release(slots)
    assert pool.make_room(1) == 1
    check_idle(pool)


def test_store_that_ends_frees_only_slots_that_lost_their_key() -> None:
    pool = _pool(4)
    slots = pool.reserve(keys(1, 2), chained=True)
    pool.forget(keys(2), slots[1:])
    (other,) = pool.reserve(keys(3), chained=False)
    pool.forget(keys(3), [other])
    pool.commit(keys(1), slots[:1])
    pool.release(slots)
    assert (cached_numbers(pool), pool.filling, pool.free) == ([1], 1, 2)
    pool.check(Counter(), [other], {})


def test_store_that_failed_leaves_nothing_behind() -> None:
    pool = _pool(2)
    slots = pool.reserve(keys(1, 2), chained=True)
    pool.forget(keys(1, 2), slots)
    assert list(pool.missing(keys(1, 2))) == [0, 1]
    assert pool.take_removed() == [], "a key that was never found cannot be announced as removed"
    pool.release(slots)
    assert pool.free == 2
    check_idle(pool)


def test_forgotten_key_can_be_stored_again_while_the_old_copy_still_runs() -> None:
    pool = _pool(2)
    (old,) = pool.reserve(keys(1), chained=False)
    pool.forget(keys(1), [old])
    (new,) = cache(pool, keys(1))
    pool.forget(keys(1), [old])  # the old copy ends, and must not take the new one with it
    assert pool.index() == {key(1): new}
    pool.check(Counter(), [old], {})
    pool.release([old])
    assert (pool.free, pool.cached) == (1, 1)
    check_idle(pool)


def test_forgetting_a_slot_that_is_on_the_way_again_changes_nothing() -> None:
    pool = _pool(2)
    (old,) = cache(pool, keys(1))
    pool.pin([old])
    pool.forget(keys(1), [old])
    (new,) = pool.reserve(keys(1), chained=False)
    pool.forget(keys(1), [old])
    assert pool.on_the_way(key(1))
    pool.check(Counter([old]), [new], {key(1): new})


def test_reset_forgets_every_key_and_keeps_memory_that_copies_use() -> None:
    pool = _pool(4)
    read, _ = cache(pool, keys(1, 2))
    pool.pin([read])
    (written,) = pool.reserve(keys(3), chained=True, above=key(1))
    pool.reset()
    assert (pool.cached, pool.filling, pool.free) == (0, 2, 2)
    assert not pool.on_the_way(key(3))
    pool.check(Counter([read]), [written], {})
    pool.unpin([read])
    pool.check(Counter(), [written], {})
    assert pool.free == 3
    pool.release([written])
    assert pool.free == 4
    check_idle(pool)


def test_reset_announces_no_single_keys() -> None:
    pool = _pool(2)
    cache(pool, keys(1, 2))
    pool.make_room(1)
    pool.reset()
    assert pool.take_removed() == []


def test_after_a_reset_the_same_chain_can_be_stored_again() -> None:
    pool = _pool(3)
    chain = keys(1, 2, 3)
    cache_chain(pool, chain)
    pool.reset()
    cache_chain(pool, chain)
    assert [evict_one(pool) for _ in chain] == [3, 2, 1]
    check_idle(pool)


def test_grown_pool_has_more_slots_and_keeps_what_it_has() -> None:
    pool = make_pool("lru", 4, ready=2)
    before = cache(pool, keys(1, 2))
    pool.grow(4)
    assert (pool.capacity, pool.ready, pool.free) == (4, 4, 2)
    after = cache(pool, keys(3, 4))
    assert sorted(before + after) == [0, 1, 2, 3]
    check_idle(pool)


@every_policy
def test_no_slot_is_given_out_before_it_is_ready(name: str) -> None:
    pool = make_pool(name, 6, ready=2)
    assert (pool.capacity, pool.ready, pool.free) == (6, 2, 2)
    assert pool.make_room(6) == 2
    assert sorted(cache(pool, keys(1, 2))) == [0, 1]
    check_idle(pool)
    with pytest.raises(InvariantError, match="more slots reserved"):
        pool.reserve(keys(3), chained=False)
    pool.grow(3)
    assert pool.make_room(6, keep=set(keys(1, 2))) == 1
    assert cache(pool, keys(3)) == [2]
    pool.reset()
    assert pool.make_room(6) == 3, "a reset makes nothing ready"
    check_idle(pool)


@every_policy
def test_pool_with_nothing_ready_holds_and_finds_nothing(name: str) -> None:
    pool = make_pool(name, 4, ready=0)
    assert (pool.ready, pool.free, pool.make_room(3), pool.make_room(3)) == (0, 0, 0, 0)
    assert pool.find_run(keys(1, 2), 0, 2) == []
    assert list(pool.missing(keys(1, 2))) == [0, 1]
    pool.touch(keys(1))
    pool.reset()
    check_idle(pool)
    pool.grow(1)
    assert pool.make_room(3) == 1
    cache(pool, keys(1))
    assert evict_one(pool) == 1
    check_idle(pool)


@pytest.mark.parametrize("name", ["lru", "s3fifo", "arc"])
def test_policy_shares_out_what_is_ready(name: str) -> None:
    policy = make_policy(name, 100)
    pool = HostPool(100, policy, 20)
    assert policy.capacity == 20
    pool.grow(60)
    assert policy.capacity == 60


def test_pool_does_not_shrink_nor_outgrow_its_capacity() -> None:
    pool = make_pool("lru", 5, ready=3)
    for wrong in (2, 6, True, 4.0):
        with pytest.raises(CapacityError, match=rf"ready slots.*at least the 3 .*at most 5, got {wrong}"):
            pool.grow(wrong)  # type: ignore[arg-type]
    pool.grow(3)
    assert (pool.ready, pool.free) == (3, 3)
    for wrong in (-1, 6):
        with pytest.raises(CapacityError, match=f"ready slots.*got {wrong}"):
            make_pool("lru", 5, ready=wrong)


def test_epoch_changes_when_keys_stop_being_valid_and_not_when_they_are_evicted() -> None:
    pool = make_pool("lru", 3, ready=2)
    slots = cache(pool, keys(1, 2))
    epoch = pool.epoch
    pool.touch(keys(1))
    pool.make_room(1)
    pool.grow(3)
    assert pool.epoch == epoch
    pool.forget(keys(1), slots[:1])
    assert pool.epoch != epoch
    epoch = pool.epoch
    pool.reset()
    assert pool.epoch != epoch


# --- eviction ------------------------------------------------------------------------------------------


def test_room_that_is_there_costs_nothing() -> None:
    pool = _pool(3)
    cache(pool, keys(1))
    assert pool.make_room(2) == 2
    assert (cached_numbers(pool), pool.evictions) == ([1], 0)


@every_policy
def test_no_more_is_evicted_than_was_asked_for(name: str) -> None:
    pool = make_pool(name, 5)
    cache(pool, keys(1, 2, 3, 4))
    assert pool.make_room(3) == 3
    assert (pool.free, pool.cached, pool.evictions) == (3, 2, 2)
    assert len(pool.take_removed()) == 2
    assert pool.take_removed() == []
    check_idle(pool)


@every_policy
def test_asking_for_more_than_the_pool_has_gives_what_it_has(name: str) -> None:
    pool = make_pool(name, 3)
    cache(pool, keys(1, 2, 3))
    assert pool.make_room(10) == 3
    assert (pool.free, pool.cached) == (3, 0)


@every_policy
def test_evicted_slot_is_given_out_again(name: str) -> None:
    pool = make_pool(name, 2)
    for number in range(20):
        assert pool.make_room(1) == 1
        cache(pool, keys(number))
    assert sorted(pool.index().values()) == [0, 1]
    assert pool.evictions == 18
    check_idle(pool)


def test_blocks_stored_together_leave_from_the_last() -> None:
    # Also where no block builds on another: a shorter hit ends earlier, and needs the earlier blocks.
    pool = _pool(4)
    cache(pool, keys(1, 2))
    cache(pool, keys(3, 4))
    assert [evict_one(pool) for _ in range(4)] == [2, 1, 4, 3]


@every_policy
def test_pinned_slot_is_never_evicted(name: str) -> None:
    pool = make_pool(name, 4)
    slots = cache(pool, keys(1, 2, 3, 4))
    pool.pin(slots[1:3])
    assert pool.make_room(4) == 2
    assert cached_numbers(pool) == [2, 3]
    check_idle(pool, *slots[1:3])


@every_policy
def test_kept_key_is_never_evicted(name: str) -> None:
    pool = make_pool(name, 4)
    cache(pool, keys(1, 2, 3, 4))
    assert pool.make_room(4, keep=set(keys(2, 3, 9))) == 2
    assert cached_numbers(pool) == [2, 3]


@every_policy
def test_slot_that_is_being_filled_is_never_evicted(name: str) -> None:
    pool = make_pool(name, 2)
    cache(pool, keys(1))
    slots = pool.reserve(keys(2), chained=False)
    assert pool.make_room(2) == 1
    assert pool.on_the_way(key(2))
    pool.check(Counter(), slots, {key(2): slots[0]})


@every_policy
def test_slot_without_a_key_is_never_evicted(name: str) -> None:
    pool = make_pool(name, 3)
    (read, _, _) = cache(pool, keys(1, 2, 3))
    pool.pin([read])
    pool.forget(keys(1), [read])
    assert pool.make_room(3) == 2
    check_idle(pool, read)


@every_policy
@pytest.mark.parametrize("arrived", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_key_is_not_evicted_while_something_on_the_host_builds_on_it(
    name: str, arrived: bool, together: bool
) -> None:
    pool = make_pool(name, 3)
    cache(pool, keys(9))
    if together:
        slots = cache_chain(pool, keys(1, 2))[1:]
        if not arrived:  # the tail fails and is stored once more
            pool.forget(keys(2), slots)
            slots = pool.reserve(keys(2), chained=True, above=key(1))
    else:
        cache(pool, keys(1))
        slots = pool.reserve(keys(2), chained=True, above=key(1))
        if arrived:
            pool.commit(keys(2), slots)
            pool.release(slots)
    if arrived:
        pool.pin(slots)  # so that it cannot go first
    assert pool.make_room(3) == 1
    assert key(1) in pool


@every_policy
def test_key_may_go_when_what_built_on_it_is_gone(name: str) -> None:
    pool = make_pool(name, 3)
    cache(pool, keys(1))
    children = [slot for number in (2, 3) for slot in cache_chain(pool, keys(number), key(1))]
    pool.pin(children)
    assert pool.make_room(1) == 0
    pool.forget(keys(2), children[:1])
    assert pool.make_room(1) == 0, "one child is still there"
    pool.forget(keys(3), children[1:])
    assert pool.make_room(1) == 1
    check_idle(pool, *children)


@every_policy
@pytest.mark.parametrize("chained", [True, False])
def test_parent_that_left_by_force_is_protected_again_when_it_is_back(name: str, chained: bool) -> None:
    pool = make_pool(name, 3)
    slots = cache_chain(pool, keys(1, 2))
    pool.forget(keys(1), slots[:1])
    check_idle(pool)
    if chained:
        cache_chain(pool, keys(1))
    else:
        cache(pool, keys(1))
    pool.touch(keys(2))  # 1 is the older one now
    assert [evict_one(pool), evict_one(pool)] == [2, 1]
    check_idle(pool)


@every_policy
def test_key_stored_after_what_builds_on_it_outlives_it(name: str) -> None:
    pool = make_pool(name, 4)
    cache_chain(pool, keys(3, 4), key(2))
    cache_chain(pool, keys(1, 2))
    pool.touch(keys(3, 4))
    assert [evict_one(pool) for _ in range(4)] == [4, 3, 2, 1]
    check_idle(pool)


@every_policy
def test_parent_that_never_comes_holds_nothing_up(name: str) -> None:
    pool = make_pool(name, 3)
    cache_chain(pool, keys(2, 3), key(1))
    assert pool.make_room(3) == 3
    check_idle(pool)
    cache_chain(pool, keys(1))
    assert pool.make_room(3) == 3
    check_idle(pool)


@every_policy
@pytest.mark.parametrize("blocked", [10, 40, 100])
def test_keys_that_must_stay_do_not_hide_those_that_may_go(name: str, blocked: int) -> None:
    # The first ten were hit and wait in another queue than the rest, which outnumbers them and is being read.
    pool = make_pool(name, 10 + blocked)
    cache(pool, keys(*range(10)))
    for _ in range(3):
        pool.touch(keys(*range(10)))
    pool.pin(cache(pool, keys(*range(100, 100 + blocked))))
    assert pool.make_room(10) == 10
    assert cached_numbers(pool) == list(range(100, 100 + blocked))


def _unpin(pool: HostPool, slots: list[Slot]) -> None:
    pool.unpin(slots)


def _forget(pool: HostPool, slots: list[Slot]) -> None:
    pool.forget(keys(1, 2), slots)
    pool.unpin(slots)


def _forget_unpinned(pool: HostPool, slots: list[Slot]) -> None:
    pool.unpin(slots)
    assert pool.make_room(2, keep=set(keys(1, 2))) == 0
    pool.forget(keys(1, 2), slots)


def _reset(pool: HostPool, slots: list[Slot]) -> None:
    pool.reset()
    pool.unpin(slots)


def _grow(pool: HostPool, slots: list[Slot]) -> None:
    pool.grow(3)
    cache(pool, keys(3))


@every_policy
@pytest.mark.parametrize("change", [_unpin, _forget, _forget_unpinned, _reset, _grow])
def test_pool_that_was_exhausted_evicts_again_after_a_change(
    name: str, change: Callable[[HostPool, list[Slot]], None]
) -> None:
    pool = make_pool(name, 3, ready=2)
    slots = cache(pool, keys(1, 2))
    pool.pin(slots)
    assert pool.make_room(1) == 0
    assert pool.make_room(1) == 0
    change(pool, slots)
    assert pool.make_room(1) == 1


@every_policy
def test_store_that_ends_ends_the_exhaustion(name: str) -> None:
    pool = make_pool(name, 1)
    slots = pool.reserve(keys(1), chained=False)
    assert pool.make_room(1) == 0
    pool.commit(keys(1), slots)
    pool.release(slots)
    assert pool.make_room(1) == 1


@every_policy
def test_store_that_failed_ends_the_exhaustion(name: str) -> None:
    # The block that was to come built on one that may go now.
    pool = make_pool(name, 2)
    cache(pool, keys(1))
    slots = pool.reserve(keys(2), chained=True, above=key(1))
    assert pool.make_room(1) == 0
    pool.forget(keys(2), slots)
    assert pool.make_room(1) == 1
    pool.release(slots)
    assert pool.make_room(2) == 2
    check_idle(pool)


@every_policy
def test_what_one_caller_keeps_does_not_bind_the_next(name: str) -> None:
    pool = make_pool(name, 2)
    cache(pool, keys(1, 2))
    assert pool.make_room(1, keep=set(keys(1, 2))) == 0
    assert pool.make_room(1, keep=set(keys(1))) == 1
    assert cached_numbers(pool) == [1]


@every_policy
def test_head_of_a_kept_tail_may_go_for_the_next_caller(name: str) -> None:
    # What was kept is not the only thing that stayed: the rest of its chain stayed because of it.
    pool = make_pool(name, 4)
    cache_chain(pool, keys(1, 2, 3))
    (read,) = cache_chain(pool, keys(9))
    pool.pin([read])
    assert pool.make_room(4, keep=set(keys(3))) == 0
    assert pool.make_room(4) == 3
    check_idle(pool, read)


# --- tails go before heads ------------------------------------------------------------------------------


def _cache_in_chunks(pool: HostPool, chain: list[Key], chunk: int) -> None:
    for start in range(0, len(chain), chunk):
        cache_chain(pool, chain[start : start + chunk], chain[start - 1] if start else None)


@every_policy
@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_chain_stored_in_chunks_loses_its_last_block_first(name: str, chunk: int) -> None:
    pool = make_pool(name, 10)
    _cache_in_chunks(pool, keys(*range(10)), chunk)
    assert [evict_one(pool) for _ in range(10)] == list(range(9, -1, -1))
    check_idle(pool)


def test_tail_goes_in_the_place_of_its_head_without_a_walk_over_the_pool() -> None:
    looked_at: list[Key] = []

    class Watched(LRU):
        def candidates(self) -> Iterator[Key]:
            for each in super().candidates():
                looked_at.append(each)
                yield each

    pool = HostPool(400, Watched(400))
    _cache_in_chunks(pool, keys(*range(400)), 1)
    assert evict_one(pool) == 399
    assert looked_at == keys(0)


@every_policy
@pytest.mark.parametrize("wanted", [2, 10, 70, 100])
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_any_number_of_blocks_can_be_taken_from_the_tail_of_a_long_chain(
    name: str, chunk: int, wanted: int
) -> None:
    # Chunks of one are blocks that were decoded.
    pool = make_pool(name, 100)
    _cache_in_chunks(pool, keys(*range(100)), chunk)
    assert pool.make_room(wanted) == wanted
    assert cached_numbers(pool) == list(range(100 - wanted))
    check_idle(pool)


@every_policy
def test_many_chains_stored_side_by_side_lose_their_tails(name: str) -> None:
    # Twenty requests that decode together: their blocks alternate in every queue.
    pool = make_pool(name, 200)
    for block in range(10):
        for chain in range(20):
            above = key(100 * chain + block - 1) if block else None
            cache_chain(pool, keys(100 * chain + block), above)
    for wanted in (50, 100, 150, 200):
        assert pool.make_room(wanted) == wanted
        left = set(cached_numbers(pool))
        assert all(number % 100 == 0 or number - 1 in left for number in left)
    check_idle(pool)


_HOLES = [{0}, {4}, {9}, {3, 4, 5}, {0, 9}, {1, 3, 5, 7}, {0, 1, 2}, set(range(10))]


@every_policy
@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("lost", _HOLES, ids=repr)
def test_chain_with_holes_loses_the_tail_of_each_piece_first(name: str, chunk: int, lost: set[int]) -> None:
    pool = make_pool(name, 10)
    chain = keys(*range(10))
    _cache_in_chunks(pool, chain, chunk)
    index = pool.index()
    pool.forget([chain[i] for i in lost], [index[chain[i]] for i in lost])
    check_idle(pool)
    gone = [evict_one(pool) for _ in range(10 - len(lost))]
    for number in gone:
        assert number + 1 in lost or number == 9 or gone.index(number + 1) < gone.index(number), gone
    check_idle(pool)


@every_policy
@pytest.mark.parametrize("chunk", [1, 4, 10])
@pytest.mark.parametrize("lost", _HOLES, ids=repr)
@pytest.mark.parametrize("backwards", [False, True])
def test_chain_whose_holes_were_filled_again_is_one_chain(
    name: str, chunk: int, lost: set[int], backwards: bool
) -> None:
    pool = make_pool(name, 10)
    chain = keys(*range(10))
    _cache_in_chunks(pool, chain, chunk)
    index = pool.index()
    pool.forget([chain[i] for i in lost], [index[chain[i]] for i in lost])
    for i in sorted(lost, reverse=backwards):
        cache_chain(pool, [chain[i]], chain[i - 1] if i else None)
        check_idle(pool)
    pool.touch(chain[5:])
    assert [evict_one(pool) for _ in chain] == list(range(9, -1, -1))
    check_idle(pool)


@every_policy
def test_hole_in_a_chain_that_others_branch_from(name: str) -> None:
    # 1 ─ 2 ─ 3 ─ 4, and on 2 and on 3 another block each. 2 fails to load and is stored again.
    pool = make_pool(name, 6)
    slots = cache_chain(pool, keys(1, 2, 3, 4))
    cache_chain(pool, keys(5), key(2))
    cache_chain(pool, keys(6), key(3))
    pool.forget(keys(2), slots[1:2])
    check_idle(pool)
    cache_chain(pool, keys(2), key(1))
    pool.touch(keys(5, 6))
    above = {2: 1, 3: 2, 4: 3, 5: 2, 6: 3}
    gone = [evict_one(pool) for _ in range(6)]
    assert all(gone.index(number) < gone.index(parent) for number, parent in above.items()), gone
    check_idle(pool)


@every_policy
def test_branches_go_before_what_they_share(name: str) -> None:
    #       ┌ 3 ─ 4
    # 1 ─ 2 ┤
    #       └ 5 ─ 6
    above = {2: 1, 3: 2, 4: 3, 5: 2, 6: 5}
    pool = make_pool(name, 6)
    for number in range(1, 7):
        cache_chain(pool, keys(number), key(above[number]) if number in above else None)
    pool.touch(keys(1, 2, 3, 4))
    gone = [evict_one(pool) for _ in range(6)]
    assert all(gone.index(number) < gone.index(parent) for number, parent in above.items()), gone
    assert gone[-2:] == [2, 1]
    check_idle(pool)


@every_policy
def test_head_that_came_long_before_its_tail_outlives_it(name: str) -> None:
    pool = make_pool(name, 40)
    cache_chain(pool, keys(1, 2))
    for number in range(100, 120):
        cache(pool, keys(number))
        pool.touch(keys(number, number - 1, number - 2))
    pool.touch(keys(1))
    cache_chain(pool, keys(3, 4), key(2))
    for number in range(120, 136):
        cache(pool, keys(number))
    for _ in range(3):
        pool.touch(keys(3, 4))  # only the tail is hit, so that by its own merit it would stay longest
    gone = [evict_one(pool) for _ in range(40)]
    assert [number for number in gone if number < 100] == [4, 3, 2, 1]
    check_idle(pool)


def _runs(chain: list[Key], todo: Sequence[int]) -> list[tuple[list[Key], Key | None]]:
    """The keys at these positions as runs without a gap, each with what it builds on."""
    runs: list[tuple[list[Key], Key | None]] = []
    for i in todo:
        above = chain[i - 1] if i else None
        if runs and runs[-1][0][-1] == above:
            runs[-1][0].append(chain[i])
        else:
            runs.append(([chain[i]], above))
    return runs


def _store_chain(pool: HostPool, chain: list[Key]) -> None:
    """As a request stores its prefix: what is missing, as far as there is room, in chain order."""
    todo = pool.missing(chain)
    room = pool.make_room(len(todo), keep={chain[i - 1] for i in todo if i})
    for run, above in _runs(chain, todo[:room]):
        cache_chain(pool, run, above)


@every_policy
def test_chain_longer_than_the_pool_keeps_its_head(name: str) -> None:
    pool = make_pool(name, 4)
    chain = keys(*range(10))
    for blocks in (*range(1, 11), 10, 10):  # growing block by block, then flushed again and again
        _store_chain(pool, chain[:blocks])
        assert cached_numbers(pool) == list(range(min(blocks, 4)))
    assert pool.evictions == 0
    check_idle(pool)


@every_policy
def test_chain_stored_at_once_that_is_longer_than_the_pool_keeps_its_head(name: str) -> None:
    pool = make_pool(name, 4)
    cache(pool, keys(100, 101, 102, 103))
    _store_chain(pool, keys(*range(10)))
    assert cached_numbers(pool) == [0, 1, 2, 3]
    check_idle(pool)


@every_policy
def test_other_blocks_make_room_for_a_chain_that_grows(name: str) -> None:
    pool = make_pool(name, 4)
    cache(pool, keys(100, 101))
    for blocks in range(1, 5):
        _store_chain(pool, keys(*range(blocks)))
    assert cached_numbers(pool) == [0, 1, 2, 3]
    check_idle(pool)


@every_policy
def test_chain_that_filled_the_pool_makes_room_for_another(name: str) -> None:
    # The first one wants to grow and must not eat its own tail; the second one may.
    pool = make_pool(name, 4)
    _store_chain(pool, keys(0, 1, 2, 3))
    _store_chain(pool, keys(0, 1, 2, 3, 4))
    assert cached_numbers(pool) == [0, 1, 2, 3]
    _store_chain(pool, keys(50, 51))
    assert cached_numbers(pool) == [0, 1, 50, 51]
    check_idle(pool)


# --- check() --------------------------------------------------------------------------------------------


def test_check_finds_a_pin_that_nobody_owns() -> None:
    pool = _pool(3)
    (slot, _) = cache(pool, keys(1, 2))
    pool.pin([slot])
    check_idle(pool, slot)
    for owned in ([], [slot, slot], [slot, Slot(1 - slot)]):
        with pytest.raises(InvariantError, match="pin"):
            check_idle(pool, *owned)


def test_check_finds_a_filling_key_without_a_store() -> None:
    pool = _pool(3)
    (slot,) = pool.reserve(keys(1), chained=False)
    pool.check(Counter(), [slot], {key(1): slot})
    with pytest.raises(InvariantError, match="without a copy"):
        pool.check(Counter(), [], {key(1): slot})
    for owned in ({}, {key(2): slot}, {key(1): Slot(slot + 1)}, {key(1): slot, key(2): slot}):
        with pytest.raises(InvariantError, match="filling keys"):
            pool.check(Counter(), [slot], owned)


def test_check_finds_a_store_into_a_slot_that_is_not_its_own() -> None:
    pool = _pool(3)
    (slot, _) = cache(pool, keys(1, 2))
    for written in (slot, Slot(2)):  # cached, free
        with pytest.raises(InvariantError, match="not its own"):
            pool.check(Counter(), [written], {})


def test_check_finds_memory_that_no_copy_uses_and_that_is_not_free() -> None:
    pool = _pool(3)
    slots = pool.reserve(keys(1), chained=False)
    pool.forget(keys(1), slots)
    pool.check(Counter(), slots, {})
    with pytest.raises(InvariantError, match="without a copy"):
        check_idle(pool)


def _spoil_free(pool: HostPool) -> None:
    pool._unused.append(pool._unused[0])


def _spoil_states(pool: HostPool) -> None:
    pool._unused.append(pool._slots[key(1)])


def _spoil_lost(pool: HostPool) -> None:
    pool._lost.add(pool._slots[key(1)])


def _spoil_count(pool: HostPool) -> None:
    pool._unused.pop()


def _spoil_ready(pool: HostPool) -> None:
    pool._unused[0] = Slot(5)


def _spoil_index(pool: HostPool) -> None:
    pool._slots[key(1)] = pool._slots[key(2)]


def _spoil_policy(pool: HostPool) -> None:
    pool._policy.remove(keys(1))


def _spoil_policy_keys(pool: HostPool) -> None:
    pool._policy.remove(keys(1))
    pool._policy.insert(keys(77))


def _spoil_branches(pool: HostPool) -> None:
    pool._chains._branches[key(1)] = [Run([key(99)], key(1))]


def _spoil_lost_branch(pool: HostPool) -> None:
    del pool._chains._branches[key(2)]


def _run_of(pool: HostPool, number: int) -> Run:
    run = pool._chains._runs[pool._slots[key(number)]]
    assert run is not None
    return run


def _spoil_run_with_a_stranger(pool: HostPool) -> None:
    _run_of(pool, 1).keys.append(key(77))


def _spoil_run_with_a_key_of_another(pool: HostPool) -> None:
    _run_of(pool, 1).keys.append(key(4))


def _spoil_run_without_its_tail(pool: HostPool) -> None:
    _run_of(pool, 1).keys.pop()


def _spoil_key_without_its_run(pool: HostPool) -> None:
    pool._chains._runs[pool._slots[key(2)]] = None


@pytest.mark.parametrize(
    "spoil",
    [
        _spoil_free,
        _spoil_states,
        _spoil_lost,
        _spoil_count,
        _spoil_ready,
        _spoil_index,
        _spoil_policy,
        _spoil_policy_keys,
        _spoil_branches,
        _spoil_lost_branch,
        _spoil_run_with_a_stranger,
        _spoil_run_with_a_key_of_another,
        _spoil_run_without_its_tail,
        _spoil_key_without_its_run,
    ],
)
def test_check_finds_books_that_disagree(spoil: Callable[[HostPool], None]) -> None:
    pool = _pool(5)
    slots = cache_chain(pool, keys(1, 2, 3))
    cache_chain(pool, keys(4), key(2))
    pool.forget(keys(3), slots[2:])
    check_idle(pool)
    spoil(pool)
    with pytest.raises(InvariantError):
        check_idle(pool)


# --- everything at random, against plain dicts -------------------------------------------------------------

_NODES = 40


def _parent_of(number: int) -> int | None:
    """Two trees of prefixes that share their beginnings, and at the end keys of groups that need no prefix."""
    if number < 2 or number >= 32:
        return None
    return number // 2


def _path(number: int) -> list[int]:
    above = _parent_of(number)
    return [number] if above is None else [*_path(above), number]


class _Copy:
    """A store or a load that has begun. A store writes its slots until it ends; a load pins what it reads."""

    def __init__(self, copied: list[Key], slots: list[Slot], *, is_store: bool) -> None:
        self.keys = copied
        self.slots = slots
        self.is_store = is_store
        self.forgotten = False


class _PoolMachine(RuleBasedStateMachine):
    policy_name: str

    @initialize(slots=st.integers(1, 12), more=st.one_of(st.just(0), st.integers(1, 12)), none=st.booleans())
    def start(self, slots: int, more: int, none: bool) -> None:
        self.ready = 0 if none and more else slots
        self.capacity = slots + more
        self.pool = make_pool(self.policy_name, self.capacity, self.ready)
        self.cached: dict[Key, Slot] = {}
        self.filling: dict[Key, Slot] = {}
        self.lost: set[Slot] = set()  # without a key, still copied
        self.pins: Counter[Slot] = Counter()
        self.copies: list[_Copy] = []
        self.above: dict[Key, Key] = {}  # for every key on the host
        self.removed: set[Key] = set()

    # What the model does.

    def _free(self) -> int:
        return self.ready - len(self.cached) - len(self.filling) - len(self.lost)

    def _may_go(self, keep: set[Key]) -> set[Key]:
        needed = set(self.above.values()) | keep
        return {each for each, slot in self.cached.items() if each not in needed and not self.pins[slot]}

    def _storing(self) -> set[Slot]:
        return {slot for copy in self.copies if copy.is_store for slot in copy.slots}

    def _in_use(self) -> set[Slot]:
        return self._storing() | self.pins.keys()

    def _lose(self, books: dict[Key, Slot], lost: list[Key]) -> None:
        in_use = self._in_use()
        for each in lost:
            slot = books.pop(each)
            self.above.pop(each, None)
            if slot in in_use:
                self.lost.add(slot)

    def _end(self, copy: _Copy) -> None:
        self.copies.remove(copy)
        if copy.is_store:
            self.pool.release(copy.slots)
        else:
            self.pool.unpin(copy.slots)
            self.pins.subtract(copy.slots)
            self.pins = +self.pins
        self.lost &= self._in_use()

    def _forget(self, copy: _Copy) -> None:
        self.pool.forget(copy.keys, copy.slots)
        for books in (self.cached, self.filling):
            lost = [each for each, slot in zip(copy.keys, copy.slots, strict=True) if books.get(each) == slot]
            if books is self.cached:
                self.removed.update(lost)
            self._lose(books, lost)
        copy.forgotten = True

    def _make_room(self, count: int, keep: set[Key]) -> int:
        short = max(0, count - self._free())
        assert set(self.pool.take_removed()) == self.removed
        self.removed.clear()
        room = self.pool.make_room(count, keep)
        gone = self.pool.take_removed()
        assert len(gone) <= short, "evicted more than was asked for"
        for each in gone:
            # In the order of leaving, each may go only after what builds on it.
            assert each in self._may_go(keep), "evicted what was pinned, kept or needed"
            self._lose(self.cached, [each])
        assert room == min(count, self._free())
        if room < count:
            assert not self._may_go(keep), "gave up although something may go"
        return room

    # What can happen.

    @rule(visited=st.lists(st.integers(0, _NODES - 1), min_size=1, max_size=8))
    def serve_some_requests(self, visited: list[int]) -> None:
        """Paths that are hit as far as they are there, and stored at once: what fills the pool."""
        for number in visited:
            self.pool.touch(keys(*_path(number)))
            self._store_path(number, 6)
            if self.copies and self.copies[-1].is_store:
                self._arrive(self.copies[-1])

    @rule(number=st.integers(0, _NODES - 1), most=st.integers(1, 6))
    def begin_a_store(self, number: int, most: int) -> None:
        self._store_path(number, most)

    def _store_path(self, number: int, most: int) -> None:
        path = keys(*_path(number))
        todo = [i for i, each in enumerate(path) if each not in self.cached and each not in self.filling]
        assert list(self.pool.missing(path)) == todo
        assert not (todo and self.pool.hold(path[0], path[-1])), "said to hold a chain that has gaps"
        todo = todo[:most]
        room = self._make_room(len(todo), {path[i - 1] for i in todo if i})
        self._begin_store(_runs(path, todo[:room]), chained=True)

    @rule(data=st.data(), chained=st.booleans())
    def begin_a_store_of_anything(self, data: st.DataObject, chained: bool) -> None:
        """Also keys whose parents are not on the host, heads after their tails, and keys that protect nothing."""
        absent = [each for each in keys(*range(_NODES)) if each not in self.cached and each not in self.filling]
        todo = data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=5)) if absent else []
        todo = todo[: self._make_room(len(todo), set())]
        if chained:
            ups = [_parent_of(number) for number in numbers(todo)]
            runs = [([each], key(up) if up is not None else None) for each, up in zip(todo, ups, strict=True)]
            self._begin_store(runs, chained=True)
        else:
            self._begin_store([(todo, None)], chained=False)

    def _begin_store(self, runs: list[tuple[list[Key], Key | None]], *, chained: bool) -> None:
        """One transfer, as many runs as it needs."""
        copy = _Copy([], [], is_store=True)
        for run, above in runs:
            used = {*self.cached.values(), *self.filling.values(), *self.lost, *self.pins}
            slots = self.pool.reserve(run, chained=chained, above=above)
            assert len(set(slots)) == len(slots) == len(run)
            assert used.isdisjoint(slots), "gave out memory that is in use"
            assert all(0 <= slot < self.ready for slot in slots)
            self.filling.update(zip(run, slots, strict=True))
            if chained:
                self.above.update(zip(run[1:], run, strict=False))
                self.above.update({run[0]: above} if above is not None else {})
            copy.keys += run
            copy.slots += slots
        if copy.keys:
            self.copies.append(copy)

    @rule(data=st.data())
    def begin_a_load(self, data: st.DataObject) -> None:
        if not self.cached:
            return
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.cached)), unique=True, min_size=1, max_size=5))
        slots = [self.cached[each] for each in wanted]
        self.pool.pin(slots)
        self.pins.update(slots)
        self.copies.append(_Copy(wanted, slots, is_store=False))

    def _some_copy(self, data: st.DataObject) -> _Copy:
        return self.copies[data.draw(st.integers(0, len(self.copies) - 1))]

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_arrives(self, data: st.DataObject) -> None:
        self._arrive(self._some_copy(data))

    def _arrive(self, copy: _Copy) -> None:
        if copy.is_store and not copy.forgotten:
            self.pool.commit(copy.keys, copy.slots)
            for each in copy.keys:
                self.cached[each] = self.filling.pop(each)
        self._end(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_fails(self, data: st.DataObject) -> None:
        copy = self._some_copy(data)
        self._forget(copy)  # also one that was forgotten before: its keys may have found other slots
        self._end(copy)

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def copy_is_abandoned(self, data: st.DataObject) -> None:
        self._forget(self._some_copy(data))

    @rule(touched=st.lists(st.integers(0, _NODES - 1), unique=True, max_size=8))
    def touch(self, touched: list[int]) -> None:
        self.pool.touch(keys(*touched))

    @rule(number=st.integers(0, 31), times=st.integers(1, 3))
    def hit_a_path(self, number: int, times: int) -> None:
        for _ in range(times):
            self.pool.touch(keys(*_path(number)))

    @rule(data=st.data(), count=st.integers(1, 8))
    def make_room(self, data: st.DataObject, count: int) -> None:
        keep = data.draw(st.sets(st.integers(0, _NODES - 1), max_size=4))
        self._make_room(count, set(keys(*keep)))

    @rule()
    def reset(self) -> None:
        self.pool.reset()
        for books in (self.cached, self.filling):
            self._lose(books, list(books))
        for copy in self.copies:
            copy.forgotten = True
        self.removed.clear()

    @rule(more=st.integers(0, 3))
    def grow(self, more: int) -> None:
        self.ready = min(self.capacity, self.ready + more)
        self.pool.grow(self.ready)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check(self.pins, self._storing(), self.filling)
        assert pool.index() == self.cached
        assert pool.free + pool.filling + pool.cached == pool.ready == self.ready
        assert (pool.free, pool.pinned) == (self._free(), len(self.pins))
        for number in (15, 16, 23, 31, 40):
            path = keys(*_path(number))
            for start in range(len(path)):
                found = [self.cached.get(each) for each in path[start:]]
                assert pool.find_run(path, start, len(path)) == found[: found.index(None) if None in found else 9]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for copy in list(self.copies):
            if copy.is_store:
                self._forget(copy)
            self._end(copy)
        self.the_books_agree()
        # When no copy runs, nothing holds anything any more.
        assert self._make_room(self.capacity, set()) == self.ready
        check_idle(self.pool)


@every_policy
def test_pool_agrees_with_plain_dicts_whatever_happens(name: str) -> None:
    machine = type("Machine", (_PoolMachine,), {"policy_name": name})
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=150, stateful_step_count=40))
