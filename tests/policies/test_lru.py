from __future__ import annotations

import random
from collections import OrderedDict
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from forebay.ids import Key
from forebay.policies import LRU, lru
from forebay.pool import HostPool
from tests.pool_builders import (
    PolicyCache,
    PoolCache,
    cache,
    check_idle,
    evict_one,
    first_difference,
    keys,
    leaving,
    make_policy,
    make_pool,
    numbers,
    order,
    popular_and_scans,
    random_traces,
    take,
)


class ReferenceLRU:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, None] = OrderedDict()

    def access(self, number: int) -> bool:
        hit = number in self.order
        if not hit and len(self.order) == self.capacity:
            self.order.popitem(last=False)
        self.order[number] = None
        self.order.move_to_end(number)
        return hit


def test_order_is_by_last_use() -> None:
    policy = make_policy("lru", 5)
    policy.insert(leaving(1, 2, 3))
    policy.touch(keys(1))
    policy.insert(keys(4))
    policy.touch(leaving(3, 2))
    assert order(policy) == [1, 4, 3, 2]


def test_first_touched_key_of_a_batch_is_the_most_recent() -> None:
    policy = make_policy("lru", 3)
    policy.insert(leaving(1, 2, 3))
    policy.touch(keys(1, 2))
    assert order(policy) == [3, 2, 1]


def test_the_picture_in_lru() -> None:
    policy = LRU(5)
    a, b, c, d, e = range(5)
    policy.insert(keys(a, b, c))
    policy.insert(keys(d, e))
    policy.touch(keys(a, b))
    assert order(policy) == [c, e, d, b, a]


def test_batch_that_was_handed_over_may_change_afterwards() -> None:
    # Callers go on using their lists: a request's keys grow while it runs.
    policy = LRU(4)
    batch = keys(1, 2)
    policy.insert(batch)
    policy.touch(batch)
    batch += keys(3)
    policy.check()
    assert order(policy) == [2, 1]


def test_pool_touches_a_chain_so_that_its_tail_is_the_first_to_go() -> None:
    pool = make_pool("lru", 4)
    cache(pool, keys(1, 2))
    cache(pool, keys(8, 9))
    pool.touch(keys(8, 9))
    pool.touch(keys(1, 2))  # chain order, head first
    assert [evict_one(pool) for _ in range(4)] == [9, 8, 2, 1]


@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_in_small_caches(tested: type[PolicyCache] | type[PoolCache]) -> None:
    for capacity in range(1, 6):
        for trace in random_traces(20, different=2 * capacity + 2, accesses=150):
            assert first_difference(tested("lru", capacity), ReferenceLRU(capacity), trace) is None, (
                capacity,
                trace,
            )


@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_on_popular_keys_and_scans(
    tested: type[PolicyCache] | type[PoolCache],
) -> None:
    assert first_difference(tested("lru", 50), ReferenceLRU(50), popular_and_scans()) is None


# --- the exact order, against an OrderedDict ----------------------------------------------------------------

_MIN_STALE = 3  # so that stale entries are swept all the time


class _OrderMachine(RuleBasedStateMachine):
    """Everything the pool may do, in any order. The model is the textbook's: a dict, the oldest key first."""

    @initialize()
    def start(self) -> None:
        self.policy = LRU(100)
        self.model: OrderedDict[Key, None] = OrderedDict()
        self.at_most = 0  # entries, stale or not

    def _put(self, batch: list[Key]) -> None:
        for each in reversed(batch):
            self.model[each] = None
            self.model.move_to_end(each)
        # However often keys are put, they do not pile up. Removing keys makes entries stale, but adds none.
        self.at_most = 2 * len(self.model) + _MIN_STALE

    def _some(self, data: st.DataObject, pool: list[Key]) -> list[Key]:
        return data.draw(st.lists(st.sampled_from(pool), unique=True, max_size=8)) if pool else []

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        batch = self._some(data, [each for each in keys(*range(20)) if each not in self.model])
        self.policy.insert(batch)
        self._put(batch)

    @rule(data=st.data(), times=st.integers(1, 8))
    def touch(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            batch = self._some(data, list(self.model))
            self.policy.touch(batch)
            self._put(batch)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        batch = self._some(data, list(self.model))
        self.policy.remove(batch)
        for each in batch:
            del self.model[each]

    @rule(data=st.data(), asked=st.integers(0, 8))
    def evict_some_and_postpone_the_others(self, data: st.DataObject, asked: int) -> None:
        candidates = take(self.policy, asked)
        assert candidates == list(self.model)[:asked]
        staying = self._some(data, candidates)  # in any order
        for each in candidates:
            del self.model[each]
        self.policy.postpone(staying)
        self._put(staying)
        self.policy.evict([each for each in candidates if each not in staying])

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.model.clear()
        self.at_most = 0

    @invariant()
    def same_order(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check()
            assert set(self.policy.keys()) == self.model.keys()
            assert order(self.policy) == numbers(self.model)
            assert sum(map(len, self.policy._batches)) <= self.at_most


def test_order_is_exactly_that_of_an_ordered_dict() -> None:
    with (
        mock.patch.object(lru, "_MIN_STALE", _MIN_STALE),
        mock.patch.object(LRU, "_sweep", autospec=True, side_effect=LRU._sweep) as sweep,
    ):
        run_state_machine_as_test(
            _OrderMachine, settings=settings(deadline=None, max_examples=150, stateful_step_count=40)
        )
    assert sweep.call_count > 20, "the test must reach the sweep"


# --- memory -------------------------------------------------------------------------------------------------


def test_touches_do_not_pile_up() -> None:
    policy = LRU(100)
    policy.insert(keys(*range(100)))
    rng = random.Random(3)
    entries = batches = 0
    for _ in range(10_000):
        first = rng.randrange(100)
        policy.touch(keys(*range(first, min(100, first + 5))))
        entries = max(entries, sum(map(len, policy._batches)))
        batches = max(batches, len(policy._batches))
    assert entries <= 2 * 100 + lru._MIN_STALE
    assert batches <= 2 * 100 + lru._MIN_STALE
    policy.check()
    assert len(order(policy)) == 100


def test_stale_entries_of_removed_keys_go_with_the_next_touch() -> None:
    policy = LRU(10_000)
    policy.insert(keys(*range(10_000)))
    policy.remove(keys(*range(1, 10_000)))
    policy.touch(keys(0))
    assert sum(map(len, policy._batches)) == 1
    policy.check()


@pytest.mark.parametrize("together", [1, 10, 50])
@pytest.mark.parametrize("looks_at_all", [False, True])
def test_pool_that_evicts_for_ever_does_not_pile_up_batches(together: int, looks_at_all: bool) -> None:
    # Every eviction hands back what had to stay, also if that is nothing at all.
    policy = LRU(52)
    pool = HostPool(52, policy)
    read = cache(pool, keys(0, 1))
    pool.pin(read)
    most = 0
    with mock.patch.object(lru, "_MIN_STALE", 10):
        for number in range(1000):
            wanted = keys(*range(100 * number, 100 * number + together))
            for _ in range(together):  # one by one, so that a large batch is asked many times
                pool.make_room(pool.free + 1 if pool.free < together else together)
                most = max(most, len(policy._batches) + sum(map(len, policy._batches)))
            cache(pool, [each for each in wanted if each not in pool])
            pool.touch(wanted[::3])
            if looks_at_all:
                assert pool.make_room(pool.free + 1, keep=set(pool.index())) == pool.free
    # Batches that are not empty have an entry; every eviction since the oldest key came may leave an empty one.
    entries = 2 * 52 + 10
    assert most <= entries + (entries + 52)
    check_idle(pool, *read)
