from __future__ import annotations

from collections import OrderedDict

import pytest

from forebay.policies import S3FIFO
from tests.pool_builders import (
    PolicyCache,
    PoolCache,
    cached_numbers,
    evict,
    first_difference,
    hits,
    key,
    keys,
    leaving,
    order,
    popular_and_scans,
    random_traces,
    take,
)


class ReferenceS3FIFO:
    """Algorithm 1 of the paper, one object at a time; S, M and G as there, oldest first, with their hit counts.

    What Forebay does otherwise: S stops giving as soon as it is below its tenth because what it held has earned M
    (the paper: goes on until something is evicted). And G has room for one key even where M has none.
    `as_printed` is the paper to the letter.
    """

    def __init__(self, capacity: int, *, as_printed: bool = False) -> None:
        self.capacity = capacity
        self.s_share = max(1, capacity // 10)
        self.s_stops = 1 if as_printed else self.s_share
        self.g_size = capacity - self.s_share if as_printed else max(1, capacity - self.s_share)
        self.s: OrderedDict[int, int] = OrderedDict()
        self.m: OrderedDict[int, int] = OrderedDict()
        self.g: OrderedDict[int, None] = OrderedDict()

    def access(self, number: int) -> bool:
        for queue in (self.s, self.m):
            if number in queue:
                queue[number] = min(queue[number] + 1, 3)
                return True
        if len(self.s) + len(self.m) == self.capacity:
            self._evict()
        if number in self.g:
            del self.g[number]
            self.m[number] = 0
        else:
            self.s[number] = 0
        return False

    def _evict(self) -> None:
        if len(self.s) >= self.s_share:
            while len(self.s) >= self.s_stops:
                number, freq = self.s.popitem(last=False)
                if freq > 1:
                    self.m[number] = 0  # "its access bits are cleared during the move"
                else:
                    self._remember(number)
                    return
        while self.m:
            number, freq = self.m.popitem(last=False)
            if not freq:
                return
            self.m[number] = freq - 1
        number, _ = self.s.popitem(last=False)  # everything is in S, and S has less than its share
        self._remember(number)

    def _remember(self, number: int) -> None:
        self.g[number] = None
        if len(self.g) > self.g_size:
            self.g.popitem(last=False)


# With 20 slots the small queue gives while it has two keys or more, and the ghost remembers 18.


def _ghost_then_main() -> S3FIFO:
    """1 was evicted and came back, so it is in main; 2 … 20 are in the small queue."""
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    assert evict(policy, 1) == [1]
    policy.insert(keys(1))
    return policy


def _all_in_main(*wanted: int) -> S3FIFO:
    policy = S3FIFO(20)
    policy.insert(leaving(*wanted))
    assert evict(policy, len(wanted)) == list(wanted)
    policy.insert(leaving(*wanted))
    return policy


def test_keys_seen_once_leave_through_the_small_queue_in_order() -> None:
    policy = S3FIFO(10)
    policy.insert(leaving(*range(1, 11)))
    assert evict(policy, 10) == list(range(1, 11))


def test_key_back_from_the_ghost_goes_to_main() -> None:
    # The small queue gives until it has less than its tenth, which is 20 alone; then main; then the rest.
    assert evict(_ghost_then_main(), 20) == [*range(2, 20), 1, 20]


def test_two_hits_earn_main_and_one_does_not() -> None:
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    policy.touch(leaving(1, 2))
    policy.touch(keys(2))
    assert evict(policy, 20) == [1, *range(3, 20), 2, 20]


def test_key_in_main_goes_around_once_for_every_hit() -> None:
    policy = _all_in_main(1, 2, 3)
    policy.touch(leaving(1, 2))
    policy.touch(keys(1))
    assert evict(policy, 3) == [3, 2, 1]


def test_hits_beyond_the_third_do_not_count() -> None:
    policy = _all_in_main(1, 2)
    for _ in range(100):
        policy.touch(keys(1))
    for _ in range(3):
        policy.touch(keys(2))
    # Equal counts, so the order of arrival decides.
    assert evict(policy, 2) == [1, 2]


def test_hits_are_forgotten_on_the_way_to_main() -> None:
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    for _ in range(3):
        policy.touch(keys(1))
    assert evict(policy, 18) == list(range(2, 20))
    policy.insert(keys(2))  # from the ghost, behind 1 in main: 1 would outlive it if it still had its hits
    assert evict(policy, 2) == [1, 2]


def test_key_evicted_from_main_is_not_remembered() -> None:
    policy = _ghost_then_main()
    *others, main = take(policy, 19)
    assert main == key(1)
    policy.evict([main])
    policy.postpone(others[::-1])
    policy.insert(keys(1))
    # It is in the small queue, behind the others.
    assert evict(policy, 20) == [20, *range(2, 20), 1]


def test_removed_key_is_not_remembered() -> None:
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    policy.remove(keys(1))
    policy.insert(keys(1))
    assert evict(policy, 20) == [*range(2, 21), 1]


def test_ghost_remembers_as_many_keys_as_main_may_hold() -> None:
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    assert evict(policy, 20) == list(range(1, 21))
    policy.insert(leaving(*range(1, 21)))
    # 1 and 2 fell out of the ghost and are in the small queue; the others are in main.
    assert evict(policy, 20) == [1, *range(3, 21), 2]


def test_postponed_key_stays_in_its_queue_and_gains_no_hit() -> None:
    policy = _ghost_then_main()
    for _ in range(3):
        policy.postpone(take(policy, 20)[::-1])
        policy.check()
    assert order(policy) == [*range(2, 20), 1, 20]
    policy.postpone(take(policy, 1))
    assert order(policy) == [*range(3, 21), 1, 2]


def test_postponed_key_keeps_the_hit_it_has() -> None:
    policy = S3FIFO(20)
    policy.insert(leaving(*range(1, 21)))
    policy.touch(keys(1))
    policy.postpone(take(policy, 20)[::-1])
    policy.touch(keys(1))  # the second hit: it has earned main
    assert order(policy) == [*range(2, 20), 1, 20]


def test_keys_hit_often_survive_a_scan() -> None:
    tested = PoolCache("s3fifo", 20)
    hits(tested, [1, 2, 3, 4, 5] * 3)
    assert hits(tested, range(100, 300)) == 0
    assert set(cached_numbers(tested.pool)) >= {1, 2, 3, 4, 5}


def test_keys_seen_once_do_not_survive_a_scan() -> None:
    tested = PoolCache("s3fifo", 20)
    hits(tested, [1, 2, 3, 4, 5])
    hits(tested, range(100, 120))
    assert set(cached_numbers(tested.pool)).isdisjoint({1, 2, 3, 4, 5})


def test_pool_takes_from_main_while_the_small_queue_has_less_than_its_share() -> None:
    # The pool looks at no more candidates than it needs; which go first must not depend on how many it asks for.
    tested = PoolCache("s3fifo", 20)
    hits(tested, range(1, 21))
    hits(tested, range(21, 36))  # 1 … 15 go to the ghost
    hits(tested, range(1, 20))  # and come back to main with 16 … 19, where 35 alone stays on probation
    assert cached_numbers(tested.pool) == [*range(1, 20), 35]
    tested.access(50)
    assert cached_numbers(tested.pool) == [*range(2, 20), 35, 50]
    tested.access(51)  # now the small queue has its share
    assert cached_numbers(tested.pool) == [*range(2, 20), 50, 51]


def test_eviction_takes_no_hits_from_keys_that_did_not_come_to_their_turn() -> None:
    tested = PoolCache("s3fifo", 50)
    hits(tested, range(50))
    hits(tested, range(100, 140))  # 0 … 39 go to the ghost
    hits(tested, range(40))  # and come back to main; 130 … 139 are left in the small queue
    for _ in range(3):
        assert hits(tested, range(40)) == 40
    tested.access(200)  # the small queue has its share and gives 130: nobody asked main for anything
    # Back to main without a hit, one after the other, until the small queue has less than its share.
    assert hits(tested, range(130, 136)) == 0
    assert {key(number) for number in (137, 138, 139, 200)} <= tested.pool.index().keys()
    tested.access(201)  # main gives: all its keys have three hits but 130 … 135
    assert key(130) not in tested.pool
    assert set(cached_numbers(tested.pool)) >= {*range(40), *range(131, 136)}


both_ways = pytest.mark.parametrize("tested", [PolicyCache, PoolCache])


def _same_hits(tested: type[PolicyCache] | type[PoolCache], capacity: int, trace: list[int]) -> None:
    difference = first_difference(tested("s3fifo", capacity), ReferenceS3FIFO(capacity), trace)
    assert difference is None, (capacity, difference, trace)


@both_ways
def test_same_hits_as_the_reference_in_small_caches(tested: type[PolicyCache] | type[PoolCache]) -> None:
    for capacity in range(1, 25):
        for trace in random_traces(20, different=2 * capacity + 2, accesses=150):
            _same_hits(tested, capacity, trace)


@both_ways
@pytest.mark.parametrize("capacity", [20, 30, 50])
def test_same_hits_as_the_reference_where_much_of_the_small_queue_earns_main(
    tested: type[PolicyCache] | type[PoolCache], capacity: int
) -> None:
    # Most accesses hit, so the small queue falls below its share without an eviction: what Forebay and the paper
    # do then is not the same.
    traces = random_traces(10, different=capacity * 4 // 3, accesses=20 * capacity)
    for trace in traces:
        _same_hits(tested, capacity, trace)
    papers = [ReferenceS3FIFO(capacity, as_printed=True) for _ in traces]
    same = [
        first_difference(tested("s3fifo", capacity), *each) is None for each in zip(papers, traces, strict=True)
    ]
    assert not all(same), "the traces must reach the case"


@both_ways
@pytest.mark.parametrize("capacity", [10, 50, 150])
def test_same_hits_as_the_reference_on_popular_keys_and_scans(
    tested: type[PolicyCache] | type[PoolCache], capacity: int
) -> None:
    _same_hits(tested, capacity, popular_and_scans())


@pytest.mark.parametrize("capacity", [10, 50, 150])
def test_hits_as_often_as_the_paper_to_the_letter(capacity: int) -> None:
    # What Forebay does otherwise makes no difference on such a trace.
    trace = popular_and_scans()
    assert hits(PoolCache("s3fifo", capacity), trace) == hits(ReferenceS3FIFO(capacity, as_printed=True), trace)


def test_hits_more_often_than_lru() -> None:
    trace = popular_and_scans()
    assert hits(PoolCache("s3fifo", 50), trace) > 1.1 * hits(PoolCache("lru", 50), trace)
