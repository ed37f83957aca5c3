"""What every policy has to do, whatever its order: the built-in ones, and one given as `module:Class`."""

from __future__ import annotations

from copy import deepcopy

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

from forebay.ids import Key
from forebay.policies import POLICIES, Policy, policy_class
from tests.pool_builders import (
    CUSTOM,
    POLICY_NAMES,
    NewestFirst,
    PolicyCache,
    hits,
    key,
    keys,
    make_policy,
    numbers,
    random_traces,
)

pytestmark = pytest.mark.parametrize("name", POLICY_NAMES)


def test_name_gives_a_class_that_can_be_made(name: str) -> None:
    assert policy_class(name) is {**POLICIES, CUSTOM: NewestFirst}[name]
    policy = make_policy(name, 5)
    assert isinstance(policy, Policy)
    assert policy.capacity == 5
    assert list(policy.keys()) == []
    assert policy.candidates(3) == []


def test_candidates_stay_in_the_policy_until_the_pool_has_answered(name: str) -> None:
    policy = make_policy(name, 4)
    policy.insert(keys(1, 2, 3, 4))
    policy.candidates(4)
    assert sorted(numbers(policy.keys())) == [1, 2, 3, 4]
    assert sorted(numbers(policy.candidates(4))) == [1, 2, 3, 4]


def test_evicting_every_candidate_empties_the_policy(name: str) -> None:
    policy = make_policy(name, 6)
    policy.insert(keys(1, 2, 3, 4, 5, 6))
    policy.touch(keys(2, 4))
    policy.touch(keys(4))
    gone: list[Key] = []
    while batch := policy.candidates(2):
        policy.evict(batch)
        gone += batch
        policy.check()
    assert sorted(numbers(gone)) == [1, 2, 3, 4, 5, 6]
    assert list(policy.keys()) == []


def test_first_key_of_a_fresh_batch_goes_first(name: str) -> None:
    policy = make_policy(name, 4)
    policy.insert(keys(4, 3, 2, 1))  # a chain, tail first
    expected = [4, 3, 2, 1] if name != CUSTOM else [1, 2, 3, 4]  # that one is built to do the opposite
    assert numbers(policy.candidates(4)) == expected


def test_postponed_keys_go_last_in_the_order_given(name: str) -> None:
    policy = make_policy(name, 5)
    policy.insert(keys(1, 2, 3, 4, 5))
    first, second, *rest = policy.candidates(5)
    policy.postpone([second, first])
    assert policy.candidates(5) == [*rest, second, first]


def test_postponed_key_is_a_candidate_again_when_nothing_else_is_left(name: str) -> None:
    policy = make_policy(name, 3)
    policy.insert(keys(1, 2, 3))
    for _ in range(10):
        batch = policy.candidates(3)
        assert sorted(numbers(batch)) == [1, 2, 3]
        policy.postpone(batch)
        policy.check()


def test_removed_key_comes_back_as_if_it_had_never_been_there(name: str) -> None:
    # A failed load says nothing about the worth of a block: no ghost hit, no second chance, no hits kept.
    policy, fresh = make_policy(name, 4), make_policy(name, 4)
    for each in (policy, fresh):
        each.insert(keys(1, 2, 3))
    policy.insert(keys(4))
    policy.touch(keys(4))
    policy.remove(keys(4))
    policy.insert(keys(4))
    fresh.insert(keys(4))
    assert policy.candidates(4) == fresh.candidates(4)


def test_cleared_policy_behaves_like_a_new_one(name: str) -> None:
    policy, fresh = make_policy(name, 3), make_policy(name, 3)
    policy.insert(keys(1, 2, 3))
    policy.touch(keys(2))
    policy.touch(keys(2))
    policy.evict(policy.candidates(3))
    policy.insert(keys(1))  # moves ARC's border, and leaves 2 and 3 in what a policy may remember
    policy.clear()
    assert list(policy.keys()) == []
    assert policy.candidates(3) == []
    for each in (policy, fresh):
        each.insert(keys(3, 2, 1))
        each.touch(keys(1))
        each.evict(each.candidates(1))
        each.insert(keys(4))
    assert policy.candidates(3) == fresh.candidates(3)


def test_resized_policy_works_with_its_new_capacity(name: str) -> None:
    policy = make_policy(name, 2)
    policy.insert(keys(1, 2))
    policy.resize(40)
    policy.insert(keys(*range(3, 41)))
    assert policy.capacity == 40
    assert len(set(policy.candidates(40))) == 40
    policy.check()


def test_asking_for_more_candidates_does_not_change_which_go_first(name: str) -> None:
    for capacity in range(1, 15):
        for trace in random_traces(10, different=2 * capacity, accesses=60):
            tested = PolicyCache(name, capacity)
            hits(tested, trace)
            everything = deepcopy(tested.policy).candidates(100)
            for few in range(1, capacity + 1):
                assert deepcopy(tested.policy).candidates(few) == everything[:few], (capacity, few, trace)


class _PolicyMachine(RuleBasedStateMachine):
    """Calls that the contract allows, in any order, against a set."""

    policy_name: str

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.policy = make_policy(self.policy_name, capacity)
        self.held: set[Key] = set()

    def _pick(self, data: st.DataObject, pool: set[Key], most: int) -> list[Key]:
        if not pool or most < 1:
            return []
        return data.draw(st.lists(st.sampled_from(sorted(pool)), unique=True, max_size=most))

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        absent = set(keys(*range(24))) - self.held
        batch = self._pick(data, absent, self.policy.capacity - len(self.held))
        self.policy.insert(iter(batch))  # any iterable, read once
        self.held.update(batch)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.policy.touch(iter(self._pick(data, self.held, 6)))

    @rule(data=st.data(), asked=st.integers(0, 15))
    def answer_candidates(self, data: st.DataObject, asked: int) -> None:
        batch = self.policy.candidates(asked)
        assert len(batch) == min(asked, len(self.held))
        assert len(set(batch)) == len(batch)
        assert self.held.issuperset(batch)
        # As the pool does: some go, some must stay, the rest was not looked at.
        looked_at = data.draw(st.integers(0, len(batch)))
        goes = [data.draw(st.booleans()) for _ in range(looked_at)]
        victims = [each for each, go in zip(batch, goes, strict=False) if go]
        staying = [each for each, go in zip(batch, goes, strict=False) if not go]
        self.policy.evict(victims)
        self.held.difference_update(victims)
        assert set(self.policy.keys()) == self.held
        self.policy.postpone(staying[::-1])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        batch = self._pick(data, self.held, 3)
        self.policy.remove(batch)
        self.held.difference_update(batch)

    @rule(more=st.integers(0, 2))
    def resize(self, more: int) -> None:
        self.policy.resize(self.policy.capacity + more)  # pools only grow

    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.held.clear()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if hasattr(self, "policy"):
            assert len(self.policy.keys()) == len(self.held)
            assert set(self.policy.keys()) == self.held
            self.policy.check()

    def teardown(self) -> None:
        if hasattr(self, "policy"):
            self.policy.evict(self.policy.candidates(len(self.held)))
            assert list(self.policy.keys()) == []
            self.policy.check()


def test_any_allowed_sequence_of_calls_keeps_the_contract(name: str) -> None:
    machine = type("Machine", (_PolicyMachine,), {"policy_name": name})
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=60, stateful_step_count=30))


def test_keys_are_compared_exactly(name: str) -> None:
    policy = make_policy(name, 3)
    twins = [key(1), Key(key(1) + b"\0")]
    policy.insert(twins)
    policy.evict([twins[1]])
    assert list(policy.keys()) == [twins[0]]
