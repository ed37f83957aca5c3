from __future__ import annotations

from collections import OrderedDict

import pytest

from forebay.policies import S3FIFO
from tests.pool_builders import (
    PolicyCache,
    PoolCache,
    cached_numbers,
    first_difference,
    hits,
    key,
    keys,
    numbers,
    popular_and_scans,
    random_traces,
)


class ReferenceS3FIFO:
    """Algorithm 1 of the paper, one object at a time; S, M and G as there, oldest first, with their hit counts.

    What Forebay does otherwise:
    - S gives while it has more than its tenth (the paper: a tenth or more), and stops giving when it is down to
      that because everything it held had earned M (the paper: goes on until something is evicted);
    - G has as many keys as the cache has slots (the paper: as many as M).
    `as_printed` is the paper to the letter.
    """

    def __init__(self, capacity: int, *, as_printed: bool = False) -> None:
        self.capacity = capacity
        share = max(1, capacity // 10)
        self.s_stays = share - 1 if as_printed else share
        self.s_stops = 0 if as_printed else share
        self.g_size = capacity - share if as_printed else capacity
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
        if len(self.s) > self.s_stays:
            while len(self.s) > self.s_stops:
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
        number, _ = self.s.popitem(last=False)  # everything is in S, and S has its share at most
        self._remember(number)

    def _remember(self, number: int) -> None:
        self.g[number] = None
        if len(self.g) > self.g_size:
            self.g.popitem(last=False)


def _evict(policy: S3FIFO) -> int:
    victims = policy.candidates(1)
    policy.evict(victims)
    policy.check()
    return numbers(victims)[0]


def _ghost_then_main(capacity: int) -> S3FIFO:
    """1 was evicted and came back, so it is in main; 2 … capacity are in the small queue."""
    policy = S3FIFO(capacity)
    policy.insert(keys(*range(1, capacity + 1)))
    assert _evict(policy) == 1
    policy.insert(keys(1))
    return policy


def test_keys_seen_once_leave_through_the_small_queue_in_order() -> None:
    policy = S3FIFO(10)
    policy.insert(keys(*range(1, 11)))
    assert [_evict(policy) for _ in range(10)] == list(range(1, 11))


def test_key_back_from_the_ghost_goes_to_main() -> None:
    policy = _ghost_then_main(10)
    # The small queue gives until it is down to its tenth, which is 10 itself; then main; then the tenth.
    assert [_evict(policy) for _ in range(10)] == [2, 3, 4, 5, 6, 7, 8, 9, 1, 10]


def test_two_hits_earn_main_and_one_does_not() -> None:
    policy = S3FIFO(10)
    policy.insert(keys(*range(1, 11)))
    policy.touch(keys(1, 2))
    policy.touch(keys(2))
    assert [_evict(policy) for _ in range(10)] == [1, 3, 4, 5, 6, 7, 8, 9, 2, 10]


def test_key_in_main_goes_around_once_for_every_hit() -> None:
    policy = S3FIFO(20)
    policy.insert(keys(1, 2, 3))
    policy.evict(keys(1, 2, 3))
    policy.insert(keys(1, 2, 3))  # all three are in main
    policy.touch(keys(1, 2))
    policy.touch(keys(1))
    assert [_evict(policy) for _ in range(3)] == [3, 2, 1]


def test_hits_beyond_the_third_do_not_count() -> None:
    policy = S3FIFO(20)
    policy.insert(keys(1, 2))
    policy.evict(keys(1, 2))
    policy.insert(keys(1, 2))
    for _ in range(100):
        policy.touch(keys(1))
    for _ in range(3):
        policy.touch(keys(2))
    # Equal counts, so the order of arrival decides.
    assert [_evict(policy) for _ in range(2)] == [1, 2]


def test_hits_are_forgotten_on_the_way_to_main() -> None:
    policy = S3FIFO(10)
    policy.insert(keys(*range(1, 11)))
    for _ in range(3):
        policy.touch(keys(1))
    assert [_evict(policy) for _ in range(8)] == [2, 3, 4, 5, 6, 7, 8, 9]
    policy.insert(keys(2))  # from the ghost, behind 1 in main: 1 would outlive it if it still had its hits
    assert [_evict(policy) for _ in range(2)] == [1, 2]


def test_key_evicted_from_main_is_not_remembered() -> None:
    policy = _ghost_then_main(10)
    policy.evict(keys(1))
    policy.insert(keys(1))
    # It is in the small queue, behind the others.
    assert [_evict(policy) for _ in range(10)] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 1]


def test_removed_key_is_not_remembered() -> None:
    policy = S3FIFO(10)
    policy.insert(keys(*range(1, 11)))
    policy.remove(keys(1))
    policy.insert(keys(1))
    assert [_evict(policy) for _ in range(10)] == [2, 3, 4, 5, 6, 7, 8, 9, 10, 1]


def test_ghost_remembers_as_many_keys_as_there_are_slots() -> None:
    policy = S3FIFO(3)
    policy.insert(keys(1, 2, 3))
    policy.evict(keys(1, 2, 3))
    policy.insert(keys(4))
    policy.evict(keys(4))  # pushes 1 out of the ghost
    policy.insert(keys(1, 2, 3))
    # 1 is alone in the small queue, which may have one key: main, with 2 and 3, gives first.
    assert [_evict(policy) for _ in range(3)] == [2, 3, 1]


def test_postponed_key_stays_in_its_queue_and_gains_no_hit() -> None:
    policy = _ghost_then_main(10)
    policy.postpone(keys(2))
    policy.postpone(keys(2))
    assert [_evict(policy) for _ in range(10)] == [3, 4, 5, 6, 7, 8, 9, 10, 1, 2]


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


def test_pool_takes_from_main_while_the_small_queue_has_no_more_than_its_share() -> None:
    # The pool looks at more candidates than it needs; which go first must not depend on that.
    tested = PoolCache("s3fifo", 10)
    hits(tested, range(1, 11))
    hits(tested, range(11, 20))  # 1 … 9 go to the ghost
    hits(tested, range(1, 10))  # and come back to main, where 19 alone stays on probation
    assert cached_numbers(tested.pool) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 19]
    tested.access(50)
    assert cached_numbers(tested.pool) == [2, 3, 4, 5, 6, 7, 8, 9, 19, 50]


def test_eviction_takes_no_hits_from_keys_that_did_not_come_to_their_turn() -> None:
    tested = PoolCache("s3fifo", 50)
    hits(tested, range(50))
    hits(tested, range(100, 145))  # 0 … 44 go to the ghost
    hits(tested, range(44))  # and 0 … 43 come back to main; 139 … 144 are left in the small queue
    for _ in range(3):
        assert hits(tested, range(44)) == 44
    tested.access(200)  # the small queue is over its share and gives 139: nobody asked main for anything
    tested.access(139)  # to main, without a hit; the small queue gives once more and is down to its share
    tested.access(201)  # main gives: all its keys have three hits but 139
    assert key(139) not in tested.pool
    assert set(cached_numbers(tested.pool)) >= set(range(44))


@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_in_small_caches(tested: type[PolicyCache] | type[PoolCache]) -> None:
    for capacity in range(1, 25):
        for trace in random_traces(20, different=2 * capacity + 2, accesses=150):
            assert first_difference(tested("s3fifo", capacity), ReferenceS3FIFO(capacity), trace) is None, (
                capacity,
                trace,
            )


@pytest.mark.parametrize("capacity", [10, 50, 150])
@pytest.mark.parametrize("tested", [PolicyCache, PoolCache])
def test_same_hits_as_the_reference_on_popular_keys_and_scans(
    tested: type[PolicyCache] | type[PoolCache], capacity: int
) -> None:
    assert first_difference(tested("s3fifo", capacity), ReferenceS3FIFO(capacity), popular_and_scans()) is None


@pytest.mark.parametrize("capacity", [10, 50, 150])
def test_hits_about_as_often_as_the_paper_to_the_letter(capacity: int) -> None:
    # Small caches differ most: there one slot more for S is a large part of it.
    trace = popular_and_scans()
    paper = ReferenceS3FIFO(capacity, as_printed=True)
    assert hits(PolicyCache("s3fifo", capacity), trace) >= 0.95 * hits(paper, trace)


def test_hits_more_often_than_lru() -> None:
    trace = popular_and_scans()
    assert hits(PoolCache("s3fifo", 50), trace) > 1.1 * hits(PoolCache("lru", 50), trace)
