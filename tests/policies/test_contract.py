"""What every policy has to do, whatever its order: the built-in ones, and one given as `module:Class`."""

from __future__ import annotations

from itertools import islice

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
    evict,
    hits,
    key,
    keys,
    make_policy,
    numbers,
    order,
    random_traces,
    take,
)

pytestmark = pytest.mark.parametrize("name", POLICY_NAMES)


def test_name_gives_a_class_that_can_be_made(name: str) -> None:
    assert policy_class(name) is {**POLICIES, CUSTOM: NewestFirst}[name]
    policy = make_policy(name, 5)
    assert isinstance(policy, Policy)
    assert policy.capacity == 5
    assert list(policy.keys()) == []
    assert list(policy.candidates()) == []


def test_candidate_has_left_the_order_until_it_is_handed_back(name: str) -> None:
    policy = make_policy(name, 4)
    policy.insert(keys(1, 2, 3, 4))
    candidates = policy.candidates()
    first = list(islice(candidates, 2))
    assert sorted(numbers([*first, *candidates])) == [1, 2, 3, 4], "the same key twice, or one was left out"
    assert list(policy.candidates()) == []
    policy.postpone(keys(1, 2, 3, 4))
    policy.check()
    assert sorted(numbers(policy.keys())) == [1, 2, 3, 4]
    assert sorted(order(policy)) == [1, 2, 3, 4]


def test_keys_that_nobody_asked_for_are_still_in_the_order(name: str) -> None:
    policy = make_policy(name, 4)
    policy.insert(keys(1, 2, 3, 4))
    before = order(policy)
    assert evict(policy, 1) == before[:1]
    assert sorted(numbers(policy.keys())) == sorted(before[1:])
    assert order(policy) == before[1:]


def test_evicting_every_candidate_empties_the_policy(name: str) -> None:
    policy = make_policy(name, 6)
    policy.insert(keys(1, 2, 3, 4, 5, 6))
    policy.touch(keys(2, 4))
    policy.touch(keys(4))
    gone: list[int] = []
    while batch := evict(policy, 2):
        gone += batch
    assert sorted(gone) == [1, 2, 3, 4, 5, 6]
    assert list(policy.keys()) == []


def test_last_key_of_a_fresh_batch_goes_first(name: str) -> None:
    policy = make_policy(name, 4)
    policy.insert(keys(1, 2, 3, 4))  # a chain, head first
    expected = [4, 3, 2, 1] if name != CUSTOM else [1, 2, 3, 4]  # that one is built to do the opposite
    assert order(policy) == expected


def test_postponed_keys_go_last_and_of_them_the_first_one_last(name: str) -> None:
    policy = make_policy(name, 5)
    policy.insert(keys(1, 2, 3, 4, 5))
    rest = order(policy)[2:]
    first, second = take(policy, 2)
    policy.postpone([first, second])
    policy.check()
    assert order(policy) == [*rest, *numbers([second, first])]


def test_postponing_everything_in_its_order_changes_nothing(name: str) -> None:
    policy = make_policy(name, 20)
    policy.insert(keys(*range(20)))
    before = order(policy)
    for _ in range(10):
        policy.postpone(take(policy, 20)[::-1])
        policy.check()
        assert order(policy) == before


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
    assert order(policy) == order(fresh)


def test_cleared_policy_behaves_like_a_new_one(name: str) -> None:
    policy, fresh = make_policy(name, 3), make_policy(name, 3)
    policy.insert(keys(3, 2, 1))
    policy.touch(keys(2))
    policy.touch(keys(2))
    evict(policy, 3)
    policy.insert(keys(1))  # moves ARC's border, and leaves 2 and 3 in what a policy may remember
    policy.clear()
    assert list(policy.keys()) == []
    assert list(policy.candidates()) == []
    for each in (policy, fresh):
        each.insert(keys(1, 2, 3))
        each.touch(keys(1))
        evict(each, 1)
        each.insert(keys(4))
    assert order(policy) == order(fresh)


def test_resized_policy_works_with_its_new_capacity(name: str) -> None:
    policy = make_policy(name, 2)
    policy.insert(keys(1, 2))
    policy.resize(40)
    policy.insert(keys(*range(3, 41)))
    assert policy.capacity == 40
    policy.check()
    assert sorted(evict(policy, 100)) == list(range(1, 41))


def test_asking_for_more_candidates_does_not_change_which_go_first(name: str) -> None:
    for capacity in range(1, 15):
        for trace in random_traces(10, different=2 * capacity, accesses=60):
            tested = PolicyCache(name, capacity)
            hits(tested, trace)
            at_once = order(tested.policy)
            assert sorted(at_once) == sorted(numbers(tested.policy.keys()))
            few_by_few: list[int] = []
            while batch := evict(tested.policy, 1 + len(few_by_few) % 3):
                few_by_few += batch
            assert few_by_few == at_once, (capacity, trace)


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
        self.policy.insert(tuple(batch))  # any sequence, and not the policy's own to keep
        self.held.update(batch)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def touch(self, data: st.DataObject) -> None:
        self.policy.touch(tuple(self._pick(data, self.held, 6)))

    @rule(data=st.data(), asked=st.integers(0, 15))
    def answer_candidates(self, data: st.DataObject, asked: int) -> None:
        batch = take(self.policy, asked)
        assert len(batch) == min(asked, len(self.held))
        assert len(set(batch)) == len(batch)
        assert self.held.issuperset(batch)
        # As the pool does: some must stay, the others go, and of neither there need be any.
        goes = [data.draw(st.booleans()) for _ in batch]
        victims = [each for each, go in zip(batch, goes, strict=True) if go]
        staying = [each for each, go in zip(batch, goes, strict=True) if not go]
        answers = [lambda: self.policy.postpone(staying), lambda: self.policy.evict(victims)]
        for answer in data.draw(st.permutations(answers)):
            answer()
        self.held.difference_update(victims)

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
            assert sorted(evict(self.policy, 100)) == sorted(numbers(self.held))
            assert list(self.policy.keys()) == []


def test_any_allowed_sequence_of_calls_keeps_the_contract(name: str) -> None:
    machine = type("Machine", (_PolicyMachine,), {"policy_name": name})
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=60, stateful_step_count=30))


def test_keys_are_compared_exactly(name: str) -> None:
    policy = make_policy(name, 3)
    twins = [key(1), Key(key(1) + b"\0")]
    policy.insert(twins)
    policy.remove([twins[1]])
    assert list(policy.keys()) == [twins[0]]
