from __future__ import annotations

from collections import OrderedDict

import pytest

from forebay.policies import ARC
from tests.pool_builders import (
    PolicyCache,
    PoolCache,
    cache,
    cached_numbers,
    evict,
    evict_one,
    first_difference,
    hits,
    keys,
    leaving,
    make_pool,
    order,
    popular_and_scans,
    random_traces,
    take,
)


class ReferenceARC:
    """Figure 4 of the paper, one page at a time; T1, T2, B1, B2 and p as there, oldest first.

    What Forebay does otherwise, because it makes room before it knows what for, and several steps before the new
    key is inserted: it replaces first and adapts p afterwards, so also without the rule for |T1| = p and a page
    from B2, and T1 gives below p where T2 is empty. `as_printed` is the paper to the letter.
    """

    def __init__(self, capacity: int, *, as_printed: bool = False) -> None:
        self.c = capacity
        self.as_printed = as_printed
        self.p = 0.0
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()

    def access(self, number: int) -> bool:
        if number in self.t1 or number in self.t2:
            self.t1.pop(number, None)
            self.t2.pop(number, None)
            self.t2[number] = None
            return True
        if number in self.b1 or number in self.b2:
            if self.as_printed:
                self._adapt(number)
                self._replace(number)
            else:
                self._replace(number)
                self._adapt(number)
            self.b1.pop(number, None)
            self.b2.pop(number, None)
            self.t2[number] = None
            return False
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self._replace(number)
            else:
                self.t1.popitem(last=False)
        else:
            total = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if total == 2 * self.c:
                self.b2.popitem(last=False)
            if total >= self.c:
                self._replace(number)
        self.t1[number] = None
        return False

    def _adapt(self, number: int) -> None:
        if number in self.b1:
            self.p = min(self.p + max(len(self.b2) / len(self.b1), 1), self.c)
        else:
            self.p = max(self.p - max(len(self.b1) / len(self.b2), 1), 0)

    def _replace(self, number: int) -> None:
        tie = self.as_printed and number in self.b2 and len(self.t1) == self.p
        if self.t1 and (len(self.t1) > self.p or tie or not self.t2):
            gone, _ = self.t1.popitem(last=False)
            self.b1[gone] = None
        else:
            gone, _ = self.t2.popitem(last=False)
            self.b2[gone] = None


def _two_and_two() -> ARC:
    """1 and 2 were seen once, 3 and 4 twice, and the border is at the far left: T1 should have nothing."""
    policy = ARC(4)
    policy.insert(leaving(1, 2, 3, 4))
    policy.touch(leaving(3, 4))
    return policy


def test_keys_seen_once_go_before_keys_seen_twice() -> None:
    assert evict(_two_and_two(), 4) == [1, 2, 3, 4]


def test_hit_in_the_memory_of_once_seen_keys_gives_them_room() -> None:
    policy = _two_and_two()
    assert evict(policy, 1) == [1]
    policy.insert(keys(1))
    # T1 is [2] and may have one slot now: T2, which is [3, 4, 1], gives.
    assert evict(policy, 1) == [3]


def test_hit_in_the_memory_of_twice_seen_keys_takes_the_room_back() -> None:
    policy = _two_and_two()
    assert evict(policy, 1) == [1]
    policy.insert(keys(1))
    assert evict(policy, 1) == [3]
    policy.insert(keys(3))
    # The border is back at the far left: T1 gives again, although 2 is no older than 4.
    assert evict(policy, 4) == [2, 4, 1, 3]


def test_the_border_moves_faster_when_the_other_memory_is_longer() -> None:
    # B2 has three keys and B1 one: a hit in B1 moves the border by three, not by one.
    policy = ARC(8)
    policy.insert(leaving(1, 2, 3, 4))
    policy.touch(leaving(1, 2, 3, 4))
    assert evict(policy, 3) == [1, 2, 3]
    policy.insert(leaving(5, 6, 7, 8))
    assert evict(policy, 1) == [5]
    policy.insert(keys(5))
    # T1 is [6, 7, 8] and T2 [4, 5]. With room for three in T1, all of T2 goes first.
    assert evict(policy, 5) == [4, 5, 6, 7, 8]


def test_a_key_in_neither_memory_moves_no_border() -> None:
    policy = _two_and_two()
    assert evict(policy, 1) == [1]
    policy.insert(keys(9))
    assert evict(policy, 4) == [2, 9, 3, 4]


def test_removed_key_leaves_no_memory() -> None:
    policy = _two_and_two()
    policy.remove(keys(1))
    policy.insert(keys(1))
    assert evict(policy, 4) == [2, 1, 3, 4]


def test_postponed_key_stays_in_its_queue() -> None:
    # It had to stay for now; that is no second use, so it must not become a key that was seen twice.
    policy = _two_and_two()
    assert take(policy, 1) == keys(1)
    policy.postpone(keys(1))
    assert order(policy) == [2, 1, 3, 4]
    policy = _two_and_two()
    assert take(policy, 3) == keys(1, 2, 3)
    policy.postpone(leaving(1, 2, 3))
    assert order(policy) == [1, 2, 4, 3]


def test_key_that_was_postponed_before_is_remembered_where_it_was_evicted_from() -> None:
    policy = _two_and_two()
    policy.postpone(take(policy, 4)[::-1])
    assert evict(policy, 1) == [1]
    policy.insert(keys(1))  # from the memory of once seen keys: T1, which is [2], may have one slot now
    assert evict(policy, 1) == [3]


def test_memories_are_no_longer_than_the_capacity() -> None:
    policy = ARC(3)
    policy.insert(leaving(1, 2, 3))
    assert evict(policy, 3) == [1, 2, 3]
    policy.insert(keys(4))  # T1 and B1 have room for three together: 1 is forgotten
    policy.insert(keys(1))  # so this is a new key, and 2 is forgotten
    policy.insert(keys(3))  # this one is remembered
    policy.check()
    assert evict(policy, 3) == [4, 3, 1]


def test_scan_does_not_push_out_keys_seen_twice() -> None:
    tested = PoolCache("arc", 10)
    hits(tested, [1, 2, 3, 4, 5] * 2)
    assert hits(tested, range(100, 200)) == 0
    assert set(cached_numbers(tested.pool)) >= {1, 2, 3, 4, 5}


def test_pool_takes_from_keys_seen_twice_while_those_seen_once_have_no_more_than_their_share() -> None:
    # The same as for the policy alone: the pool looks at no more candidates than it needs.
    pool = make_pool("arc", 4)
    cache(pool, keys(4, 3, 2, 1))  # chain order: 1 is the first to go
    pool.touch(keys(4, 3))
    assert evict_one(pool) == 1
    cache(pool, keys(1))
    assert evict_one(pool) == 3


@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_in_small_caches(tested: type[PolicyCache] | type[PoolCache]) -> None:
    for capacity in range(1, 8):
        for trace in random_traces(20, different=3 * capacity + 2, accesses=150):
            assert first_difference(tested("arc", capacity), ReferenceARC(capacity), trace) is None, (
                capacity,
                trace,
            )


@pytest.mark.parametrize("capacity", [10, 50, 150])
@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_on_popular_keys_and_scans(
    tested: type[PolicyCache] | type[PoolCache], capacity: int
) -> None:
    assert first_difference(tested("arc", capacity), ReferenceARC(capacity), popular_and_scans()) is None


@pytest.mark.parametrize("capacity", [10, 50, 150])
def test_hits_about_as_often_as_the_paper_to_the_letter(capacity: int) -> None:
    trace = popular_and_scans()
    paper = ReferenceARC(capacity, as_printed=True)
    assert hits(PoolCache("arc", capacity), trace) >= 0.998 * hits(paper, trace)


def test_hits_more_often_than_lru() -> None:
    trace = popular_and_scans()
    assert hits(PoolCache("arc", 50), trace) > 1.1 * hits(PoolCache("lru", 50), trace)
