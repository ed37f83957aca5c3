from __future__ import annotations

from collections import OrderedDict

import pytest

from tests.pool_builders import (
    PolicyCache,
    PoolCache,
    cache,
    evict_one,
    first_difference,
    keys,
    make_policy,
    make_pool,
    numbers,
    popular_and_scans,
    random_traces,
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
    policy.insert(keys(1, 2, 3))
    policy.touch(keys(1))
    policy.insert(keys(4))
    policy.touch(keys(3, 2))
    assert numbers(policy.candidates(5)) == [1, 4, 3, 2]


def test_last_touched_key_of_a_batch_is_the_most_recent() -> None:
    policy = make_policy("lru", 3)
    policy.insert(keys(1, 2, 3))
    policy.touch(keys(2, 1))
    assert numbers(policy.candidates(3)) == [3, 2, 1]


def test_asking_for_candidates_changes_nothing() -> None:
    policy = make_policy("lru", 3)
    policy.insert(keys(1, 2, 3))
    assert numbers(policy.candidates(2)) == numbers(policy.candidates(2)) == [1, 2]


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
