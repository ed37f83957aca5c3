from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvariantError
from forebay.tally import Tally

_BATCH = st.lists(st.integers(0, 5), unique=True, max_size=5)


def _tally(*batches: list[int]) -> Tally[int]:
    tally: Tally[int] = Tally()
    for batch in batches:
        tally.add(batch)
    return tally


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.booleans(), _BATCH), min_size=10, max_size=30))
def test_counts_like_a_counter(steps: list[tuple[bool, list[int]]]) -> None:
    tally: Tally[int] = Tally()
    model: Counter[int] = Counter()
    for adds, batch in steps:
        if adds:
            tally.add(batch)
            model.update(batch)
        else:
            held = [item for item in batch if model[item]]
            model.subtract(held)
            # The order of the batch is kept, and only the last holder of an item lets it go.
            assert list(tally.drop(held)) == [item for item in held if not model[item]]
            model = +model
        assert tally.counts() == model
        assert len(tally) == len(model)
        for item in range(6):
            assert (item in tally) is (item in model)
            assert tally.isdisjoint([item]) is (item not in model)


def test_item_stays_held_until_its_last_hold_goes() -> None:
    tally = _tally([1, 2], [2, 3], [2])
    assert list(tally.drop([1, 2])) == [1]
    assert list(tally.drop([2, 3])) == [3]
    assert 2 in tally
    assert list(tally.drop([2])) == [2]
    assert len(tally) == 0


def test_batch_that_overlaps_only_in_part_counts_every_item() -> None:
    tally = _tally([1, 2], [2, 3, 4])
    assert tally.counts() == Counter({1: 1, 2: 2, 3: 1, 4: 1})


def test_clear_forgets_also_the_holds_beyond_the_first() -> None:
    tally = _tally([1, 2], [2])
    tally.clear()
    tally.add([2])
    assert tally.counts() == Counter({2: 1})
    assert list(tally.drop([2])) == [2]


def test_empty_batches_change_nothing() -> None:
    tally = _tally([], [1], [])
    assert list(tally.drop([])) == []
    assert tally.counts() == Counter({1: 1})


@pytest.mark.parametrize("held", [[], [1], [1, 2]])
def test_dropping_what_nobody_holds_is_an_invariant_error(held: list[int]) -> None:
    tally = _tally(held)
    with pytest.raises(InvariantError, match="nobody holds"):
        tally.drop([*held, 9])
    assert tally.counts() == Counter(held), "a refused drop must leave the books as they were"


def test_item_dropped_once_too_often_is_an_invariant_error() -> None:
    tally = _tally([1], [1])
    tally.drop([1])
    tally.drop([1])
    with pytest.raises(InvariantError):
        tally.drop([1])


def test_item_named_twice_in_one_batch_is_an_invariant_error() -> None:
    with pytest.raises(InvariantError, match="twice"):
        _tally([1, 1])
    with pytest.raises(InvariantError, match="twice"):
        _tally([1, 2]).drop([1, 1])


def test_items_may_be_of_any_hashable_type() -> None:
    tally: Tally[bytes] = Tally()
    tally.add([b"a", b"b"])
    assert b"a" in tally
    assert 1 not in tally
