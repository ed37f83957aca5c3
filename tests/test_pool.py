from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forebay.errors import CapacityError, InvariantError
from forebay.ids import Key, Slot
from forebay.policies import LRU
from forebay.pool import HostPool
from tests.pool_builders import (
    POLICY_NAMES,
    cache,
    cached_numbers,
    chain_parents,
    check_idle,
    evict_one,
    key,
    keys,
    make_pool,
    numbers,
)

every_policy = pytest.mark.parametrize("name", POLICY_NAMES)


def _pool(slots: int) -> HostPool:
    return make_pool("lru", slots)


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
        pool.reserve(keys(1, 2, 3), None)


def test_key_reserved_twice_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="twice"):
        _pool(4).reserve(keys(1, 1), None)
    pool = _pool(4)
    pool.reserve(keys(1), None)
    with pytest.raises(InvariantError, match="twice"):
        pool.reserve(keys(2, 1), None)


def test_key_committed_while_it_is_cached_is_an_invariant_error() -> None:
    pool = _pool(4)
    cache(pool, keys(1))
    slots = pool.reserve(keys(1), None)
    with pytest.raises(InvariantError, match="committed twice"):
        pool.commit(keys(1), slots)


# --- the life of a slot --------------------------------------------------------------------------------


def test_reserved_key_is_on_the_way_and_cannot_be_found() -> None:
    pool = _pool(3)
    (slot,) = pool.reserve(keys(1), None)
    assert key(1) not in pool
    assert key(1) not in pool.index
    assert pool.on_the_way(key(1))
    assert (pool.free, pool.filling, pool.cached, pool.pinned) == (2, 1, 0, 1)
    pool.check(Counter({slot: 1}), {key(1): slot})


def test_committed_key_is_found_in_its_slot_and_stays_pinned_until_unpin() -> None:
    pool = _pool(3)
    slots = pool.reserve(keys(1, 2), None)
    pool.commit(keys(1, 2), slots)
    assert dict(pool.index) == dict(zip(keys(1, 2), slots, strict=True))
    assert not pool.on_the_way(key(1))
    assert (pool.free, pool.filling, pool.cached, pool.pinned) == (1, 0, 2, 2)
    pool.check(Counter(slots), {})
    pool.unpin(slots)
    assert pool.pinned == 0
    check_idle(pool)


def test_slots_given_out_are_distinct_and_inside_the_pool() -> None:
    pool = _pool(4)
    first = cache(pool, keys(1, 2, 3))
    pool.forget(keys(1, 3), [first[0], first[2]])
    again = pool.reserve(keys(4, 5, 6), None)  # two used slots and a fresh one
    assert sorted([first[1], *again]) == [0, 1, 2, 3]


def test_missing_counts_neither_cached_keys_nor_those_on_the_way() -> None:
    pool = _pool(4)
    cache(pool, keys(1))
    pool.reserve(keys(2), None)
    assert pool.missing(keys(0, 1, 2, 3)) == [0, 3]
    assert pool.missing(keys(0, 1, 2, 3), 10) == [10, 13]
    assert pool.missing(iter(keys(1, 2))) == []


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
    pool.check(Counter(slots), {})
    pool.unpin(slots)
    assert pool.make_room(1) == 1
    check_idle(pool)


def test_store_that_failed_leaves_nothing_behind() -> None:
    pool = _pool(2)
    slots = pool.reserve(keys(1, 2), [None, key(1)])
    pool.forget(keys(1, 2), slots)
    assert pool.missing(keys(1, 2)) == [0, 1]
    assert pool.take_removed() == [], "a key that was never found cannot be announced as removed"
    pool.unpin(slots)
    assert pool.free == 2
    check_idle(pool)


def test_forgotten_key_can_be_stored_again_while_the_old_copy_still_runs() -> None:
    pool = _pool(2)
    (old,) = pool.reserve(keys(1), None)
    pool.forget(keys(1), [old])
    (new,) = pool.reserve(keys(1), None)
    pool.commit(keys(1), [new])
    pool.forget(keys(1), [old])  # the old copy ends, and must not take the new one with it
    assert dict(pool.index) == {key(1): new}
    pool.unpin([old])
    pool.unpin([new])
    assert (pool.free, pool.cached) == (1, 1)
    check_idle(pool)


def test_forgetting_a_slot_that_is_on_the_way_again_changes_nothing() -> None:
    pool = _pool(2)
    (old,) = cache(pool, keys(1))
    pool.pin([old])
    pool.forget(keys(1), [old])
    (new,) = pool.reserve(keys(1), None)
    pool.forget(keys(1), [old])
    assert pool.on_the_way(key(1))
    pool.check(Counter([old, new]), {key(1): new})


def test_reset_forgets_every_key_and_keeps_memory_that_copies_use() -> None:
    pool = _pool(4)
    read, _ = cache(pool, keys(1, 2))
    pool.pin([read])
    (written,) = pool.reserve(keys(3), keys(1))
    pool.reset()
    assert (pool.cached, pool.filling, pool.free) == (0, 2, 2)
    assert not pool.on_the_way(key(3))
    pool.check(Counter([read, written]), {})
    pool.unpin([read, written])
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
    cache(pool, chain, chain_parents(chain))
    pool.reset()
    cache(pool, chain, chain_parents(chain))
    assert [evict_one(pool) for _ in chain] == [3, 2, 1]
    check_idle(pool)


def test_grown_pool_has_more_slots_and_keeps_what_it_has() -> None:
    pool = _pool(2)
    before = cache(pool, keys(1, 2))
    pool.grow(4)
    assert (pool.capacity, pool.free) == (4, 2)
    after = cache(pool, keys(3, 4))
    assert sorted(before + after) == [0, 1, 2, 3]
    check_idle(pool)


def test_pool_does_not_shrink() -> None:
    pool = _pool(3)
    with pytest.raises(CapacityError, match=r"slots.*at least the 3.*2"):
        pool.grow(2)
    pool.grow(3)
    assert pool.capacity == 3


def test_epoch_changes_when_keys_stop_being_valid_and_not_when_they_are_evicted() -> None:
    pool = _pool(2)
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
    assert sorted(pool.index.values()) == [0, 1]
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
    pool.check(Counter(slots[1:3]), {})


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
    pool.reserve(keys(2), None)
    assert pool.make_room(2) == 1
    assert pool.on_the_way(key(2))


@every_policy
@pytest.mark.parametrize("arrived", [True, False])
def test_key_is_not_evicted_while_something_on_the_host_builds_on_it(name: str, arrived: bool) -> None:
    pool = make_pool(name, 3)
    cache(pool, keys(1, 9))
    slots = pool.reserve(keys(2), keys(1))
    if arrived:
        pool.commit(keys(2), slots)  # still pinned, so it cannot go first
    assert pool.make_room(3) == 1
    assert key(1) in pool


@every_policy
def test_key_may_go_when_what_built_on_it_is_gone(name: str) -> None:
    pool = make_pool(name, 3)
    cache(pool, keys(1))
    children = cache(pool, keys(2, 3), keys(1, 1))
    pool.pin(children)
    assert pool.make_room(1) == 0
    pool.forget(keys(2), children[:1])
    assert pool.make_room(1) == 0, "one child is still there"
    pool.forget(keys(3), children[1:])
    assert pool.make_room(1) == 1
    pool.check(Counter(children), {})


def test_parent_that_left_by_force_is_protected_again_when_it_is_back() -> None:
    pool = _pool(3)
    slots = cache(pool, keys(1, 2), [None, key(1)])
    pool.forget(keys(1), slots[:1])
    cache(pool, keys(1))
    pool.touch(keys(2))  # 1 is the older one now
    assert [evict_one(pool), evict_one(pool)] == [2, 1]
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


def _reset(pool: HostPool, slots: list[Slot]) -> None:
    pool.reset()
    pool.unpin(slots)


def _grow(pool: HostPool, slots: list[Slot]) -> None:
    pool.grow(3)
    cache(pool, keys(3))


@every_policy
@pytest.mark.parametrize("change", [_unpin, _forget, _reset, _grow])
def test_pool_that_was_exhausted_evicts_again_after_a_change(
    name: str, change: Callable[[HostPool, list[Slot]], None]
) -> None:
    pool = make_pool(name, 2)
    slots = cache(pool, keys(1, 2))
    pool.pin(slots)
    assert pool.make_room(1) == 0
    assert pool.make_room(1) == 0
    change(pool, slots)
    assert pool.make_room(1) == 1


@every_policy
def test_store_that_ends_ends_the_exhaustion(name: str) -> None:
    pool = make_pool(name, 1)
    slots = pool.reserve(keys(1), None)
    assert pool.make_room(1) == 0
    pool.commit(keys(1), slots)
    assert pool.make_room(1) == 0
    pool.unpin(slots)
    assert pool.make_room(1) == 1


@every_policy
def test_what_one_caller_keeps_does_not_bind_the_next(name: str) -> None:
    pool = make_pool(name, 2)
    cache(pool, keys(1, 2))
    assert pool.make_room(1, keep=set(keys(1, 2))) == 0
    assert pool.make_room(1, keep=set(keys(1))) == 1
    assert cached_numbers(pool) == [1]


# --- tails go before heads ------------------------------------------------------------------------------


@every_policy
@pytest.mark.parametrize("chunk", [1, 2, 3, 10])
def test_chain_stored_in_chunks_loses_its_last_block_first(name: str, chunk: int) -> None:
    pool = make_pool(name, 10)
    chain = keys(*range(10))
    parents = chain_parents(chain)
    for start in range(0, 10, chunk):
        cache(pool, chain[start : start + chunk], parents[start : start + chunk])
    assert [evict_one(pool) for _ in chain] == list(range(9, -1, -1))
    check_idle(pool)


def test_chain_that_stands_head_first_is_turned_around_for_the_next_eviction() -> None:
    policy = LRU(4)
    pool = HostPool(4, policy)
    for number in range(4):
        cache(pool, keys(number), keys(number - 1) if number else None)
    assert numbers(policy.candidates(4)) == [0, 1, 2, 3]
    assert evict_one(pool) == 3
    assert numbers(policy.candidates(4)) == [2, 1, 0]


@every_policy
@pytest.mark.parametrize("wanted", [2, 10, 70, 100])
@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_any_number_of_blocks_can_be_taken_from_the_tail_of_a_long_chain(
    name: str, chunk: int, wanted: int
) -> None:
    # Longer than what one look of an eviction takes in; chunks of one are blocks that were decoded.
    pool = make_pool(name, 100)
    chain = keys(*range(100))
    parents = chain_parents(chain)
    for start in range(0, 100, chunk):
        cache(pool, chain[start : start + chunk], parents[start : start + chunk])
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
            cache(pool, keys(100 * chain + block), [above])
    for wanted in (50, 100, 150, 200):
        assert pool.make_room(wanted) == wanted
        left = set(cached_numbers(pool))
        assert all(number % 100 == 0 or number - 1 in left for number in left)
    check_idle(pool)


@every_policy
def test_branches_go_before_what_they_share(name: str) -> None:
    #       ┌ 3 ─ 4
    # 1 ─ 2 ┤
    #       └ 5 ─ 6
    above = {2: 1, 3: 2, 4: 3, 5: 2, 6: 5}
    pool = make_pool(name, 6)
    for number in range(1, 7):
        cache(pool, keys(number), keys(above[number]) if number in above else None)
    pool.touch(keys(1, 2, 3, 4))
    gone = [evict_one(pool) for _ in range(6)]
    assert all(gone.index(number) < gone.index(parent) for number, parent in above.items()), gone
    assert gone[-2:] == [2, 1]
    check_idle(pool)


@every_policy
def test_head_that_came_long_before_its_tail_outlives_it(name: str) -> None:
    pool = make_pool(name, 40)
    cache(pool, keys(1, 2), [None, key(1)])
    for number in range(100, 120):
        cache(pool, keys(number))
        pool.touch(keys(number, number - 1, number - 2))
    pool.touch(keys(1))
    cache(pool, keys(3, 4), keys(2, 3))
    for number in range(120, 136):
        cache(pool, keys(number))
    for _ in range(3):
        pool.touch(keys(3, 4))  # only the tail is hit, so that by its own merit it would stay longest
    gone = [evict_one(pool) for _ in range(40)]
    assert [number for number in gone if number < 100] == [4, 3, 2, 1]
    check_idle(pool)


def _store_chain(pool: HostPool, chain: list[Key]) -> None:
    """As a request stores its prefix: what is missing, as far as there is room, in chain order."""
    todo = pool.missing(chain)
    parents = [chain[i - 1] if i else None for i in todo]
    room = pool.make_room(len(todo), keep={above for above in parents if above is not None})
    if room:
        cache(pool, [chain[i] for i in todo[:room]], parents[:room])


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
    pool.check(Counter({slot: 1}), {})
    for owned in (Counter[Slot](), Counter({slot: 2}), Counter({slot: 1, 1 - slot: 1})):
        with pytest.raises(InvariantError, match="pin"):
            pool.check(owned, {})  # type: ignore[arg-type]


def test_check_finds_a_filling_key_without_a_store() -> None:
    pool = _pool(3)
    slots = pool.reserve(keys(1), None)
    for owned in ({}, {key(2): slots[0]}, {key(1): Slot(slots[0] + 1)}):
        with pytest.raises(InvariantError, match="live store"):
            pool.check(Counter(slots), owned)


def _spoil_free(pool: HostPool) -> None:
    pool._unused.append(pool._unused[0])


def _spoil_states(pool: HostPool) -> None:
    pool._unused.append(pool._index[key(1)])


def _spoil_index(pool: HostPool) -> None:
    pool._index[key(1)] = pool._index[key(2)]


def _spoil_policy(pool: HostPool) -> None:
    pool._policy.remove(keys(1))


def _spoil_policy_keys(pool: HostPool) -> None:
    pool._policy.remove(keys(1))
    pool._policy.insert(keys(77))


def _spoil_children(pool: HostPool) -> None:
    pool._children[key(1)] += 1


def _spoil_parents(pool: HostPool) -> None:
    pool._parent[key(77)] = key(1)
    pool._children[key(1)] += 1


@pytest.mark.parametrize(
    "spoil",
    [
        _spoil_free,
        _spoil_states,
        _spoil_index,
        _spoil_policy,
        _spoil_policy_keys,
        _spoil_children,
        _spoil_parents,
    ],
)
def test_check_finds_books_that_disagree(spoil: Callable[[HostPool], None]) -> None:
    pool = _pool(4)
    slots = cache(pool, keys(1, 2, 3), [None, key(1), key(2)])
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
    """A store or a load that has begun: it pins its slots until it ends."""

    def __init__(self, copied: list[Key], slots: list[Slot], *, is_store: bool) -> None:
        self.keys = copied
        self.slots = slots
        self.is_store = is_store
        self.forgotten = False
        self.arrived = not is_store


class _PoolMachine(RuleBasedStateMachine):
    policy_name: str

    @initialize(slots=st.integers(1, 12))
    def start(self, slots: int) -> None:
        self.pool = make_pool(self.policy_name, slots)
        self.capacity = slots
        self.cached: dict[Key, Slot] = {}
        self.filling: dict[Key, Slot] = {}
        self.lost: set[Slot] = set()  # without a key, still copied
        self.pins: Counter[Slot] = Counter()
        self.copies: list[_Copy] = []
        self.above: dict[Key, Key] = {}  # for every key on the host
        self.removed: set[Key] = set()

    # What the model does.

    def _free(self) -> int:
        return self.capacity - len(self.cached) - len(self.filling) - len(self.lost)

    def _may_go(self, keep: set[Key]) -> set[Key]:
        needed = set(self.above.values()) | keep
        return {each for each, slot in self.cached.items() if each not in needed and not self.pins[slot]}

    def _lose(self, books: dict[Key, Slot], lost: list[Key]) -> None:
        for each in lost:
            slot = books.pop(each)
            self.above.pop(each, None)
            if self.pins[slot]:
                self.lost.add(slot)

    def _end(self, copy: _Copy) -> None:
        self.copies.remove(copy)
        self.pool.unpin(copy.slots)
        self.pins.subtract(copy.slots)
        self.pins = +self.pins
        self.lost = {slot for slot in self.lost if self.pins[slot]}

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
            if self.copies and not self.copies[-1].arrived:
                self._arrive(self.copies[-1], at_once=True)

    @rule(number=st.integers(0, _NODES - 1), most=st.integers(1, 6))
    def begin_a_store(self, number: int, most: int) -> None:
        self._store_path(number, most)

    def _store_path(self, number: int, most: int) -> None:
        path = keys(*_path(number))
        todo = [each for each in path if each not in self.cached and each not in self.filling][:most]
        assert [path[i] for i in self.pool.missing(path)][:most] == todo
        above = dict(zip(path[1:], path, strict=False))
        parents = [above.get(each) for each in todo]
        room = self._make_room(len(todo), {each for each in parents if each is not None})
        self._reserve(todo[:room], parents[:room])

    @rule(data=st.data())
    def begin_a_store_of_anything(self, data: st.DataObject) -> None:
        """Also keys whose parents are not on the host, and heads after their tails."""
        absent = [each for each in keys(*range(_NODES)) if each not in self.cached and each not in self.filling]
        todo = data.draw(st.lists(st.sampled_from(absent), unique=True, max_size=5)) if absent else []
        room = self._make_room(len(todo), set())
        todo = todo[:room]
        ups = [_parent_of(number) for number in numbers(todo)]
        self._reserve(todo, [key(up) if up is not None else None for up in ups])

    def _reserve(self, todo: list[Key], parents: list[Key | None]) -> None:
        if not todo:
            return
        used = {*self.cached.values(), *self.filling.values(), *self.lost, *self.pins}
        slots = self.pool.reserve(todo, parents if any(parents) else None)
        assert len(set(slots)) == len(slots) == len(todo)
        assert used.isdisjoint(slots), "gave out memory that is in use"
        assert all(0 <= slot < self.capacity for slot in slots)
        self.filling.update(zip(todo, slots, strict=True))
        self.pins.update(slots)
        self.above.update((each, up) for each, up in zip(todo, parents, strict=True) if up is not None)
        self.copies.append(_Copy(todo, slots, is_store=True))

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
    @rule(data=st.data(), at_once=st.booleans())
    def copy_arrives(self, data: st.DataObject, at_once: bool) -> None:
        self._arrive(self._some_copy(data), at_once=at_once)

    def _arrive(self, copy: _Copy, *, at_once: bool) -> None:
        if not copy.arrived and not copy.forgotten:
            self.pool.commit(copy.keys, copy.slots)
            for each in copy.keys:
                self.cached[each] = self.filling.pop(each)
            copy.arrived = True
        if at_once or not copy.is_store:
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
        self.capacity += more
        self.pool.grow(self.capacity)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool = self.pool
        pool.check(self.pins, self.filling)
        assert dict(pool.index) == self.cached
        assert pool.free + pool.filling + pool.cached == pool.capacity == self.capacity
        assert (pool.free, pool.pinned) == (self._free(), len(self.pins))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for copy in list(self.copies):
            if not copy.arrived:
                self._forget(copy)
            self._end(copy)
        self.the_books_agree()
        # When no copy runs, nothing holds anything any more.
        assert self._make_room(self.capacity, set()) == self.capacity
        check_idle(self.pool)


@every_policy
def test_pool_agrees_with_plain_dicts_whatever_happens(name: str) -> None:
    machine = type("Machine", (_PoolMachine,), {"policy_name": name})
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=150, stateful_step_count=40))
