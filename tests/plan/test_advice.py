"""Which size is recommended, by curves that were made up."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.plan.advice import Verdict, advise, automatic_sizes, knee, round_up
from forebay.plan.results import Curve
from tests.plan.reports import BLOCK_BYTES, make_curve

GB = 10**9


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    """Shares that grow with size, as those of every LRU do."""
    steps = draw(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=30))
    sizes = list(accumulate(size for size, _ in steps))
    total = sum(share for _, share in steps) or 1.0
    scale = draw(st.floats(0, 1))
    shares = [share / total * scale for share in accumulate(share for _, share in steps)]
    return make_curve(sizes, shares)


def test_the_knee_is_where_the_curve_bends() -> None:
    sizes = list(range(1, 101))
    bend = make_curve(sizes, [0.03 * size if size <= 20 else 0.6 + 0.001 * (size - 20) for size in sizes])
    assert knee(bend, device_blocks=0) == 20


def test_the_knee_of_a_cliff_is_its_edge() -> None:
    """A loop over 100 blocks: nothing is found with 99."""
    assert knee(make_curve([1, 50, 99, 100, 1000], [0.0, 0.0, 0.0, 0.9, 0.9]), device_blocks=10) == 100


def test_what_the_device_finds_alone_is_no_gain() -> None:
    two_bends = make_curve([10, 100, 5000, 10_000], [0.5, 0.502, 0.6, 0.61])
    assert knee(two_bends, device_blocks=0) == 10
    assert knee(two_bends, device_blocks=50) == 5000
    assert knee(two_bends, device_blocks=10_000) is None


@given(curves(), st.integers(0, 3000))
def test_the_knee_is_a_size_of_the_curve_that_gains_something(curve: Curve, device: int) -> None:
    found = knee(curve, device)
    if max(curve.hit_share) > curve.share_at(device):
        assert found in curve.sizes
        assert found > device
        assert curve.share_at(found) > curve.share_at(device)
    else:
        assert found is None


@given(curves(), st.integers(0, 3000), st.floats(0, 1))
def test_a_choice_holds_what_it_promises(curve: Curve, device: int, target: float) -> None:
    advice = advise(curve, BLOCK_BYTES, device, target)
    for choice in (advice.knee, advice.target, advice.recommended):
        if choice is not None:
            assert choice.slots == choice.num_bytes // BLOCK_BYTES
            assert choice.hit_share == curve.share_at(choice.slots)
    if advice.target is None:
        assert target > max(curve.hit_share)
    else:
        assert advice.target.hit_share >= target


def test_without_a_target_it_is_nine_tenths_of_what_is_possible() -> None:
    advice = advise(make_curve([10, 20, 30, 40], [0.1, 0.3, 0.46, 0.5]), BLOCK_BYTES, 0)
    assert advice.target_share == pytest.approx(0.45)
    assert advice.target is not None
    assert advice.target.slots == 31  # 30 blocks are 2.01 GB, and 2.1 GB are asked for
    assert advice.recommended is advice.knee


def test_a_target_that_is_asked_for_is_recommended() -> None:
    advice = advise(make_curve([10, 20, 30, 40], [0.1, 0.3, 0.46, 0.5]), BLOCK_BYTES, 0, 0.5)
    assert advice.recommended is advice.target
    out_of_reach = advise(make_curve([10, 20, 30, 40], [0.1, 0.3, 0.46, 0.5]), BLOCK_BYTES, 0, 0.51)
    assert out_of_reach.target is None
    assert out_of_reach.recommended is out_of_reach.knee


def test_sizes_stay_when_another_curve_knows_them_better() -> None:
    advice = advise(make_curve([10, 20, 30, 40], [0.1, 0.3, 0.46, 0.5]), BLOCK_BYTES, 12)
    finer = make_curve([10, 12, 20, 25, 30, 31, 40], [0.1, 0.15, 0.3, 0.4, 0.46, 0.47, 0.5])
    again = advice.by(finer, 12)
    assert (advice.device_share, again.device_share) == (0.1, 0.15)
    assert again.target is not None
    assert advice.target is not None
    assert (again.target.slots, again.target.hit_share) == (31, 0.47)
    assert (advice.target.slots, advice.target.hit_share) == (31, 0.46)
    assert again.knee is not None
    assert again.knee.hit_share == finer.share_at(again.knee.slots)


def test_nothing_is_recommended_where_nothing_is_gained() -> None:
    nothing = advise(make_curve([10, 100], [0.001, 0.009]), BLOCK_BYTES, 0)
    assert nothing.verdict is Verdict.NOTHING_REPEATS
    assert nothing.recommended is None
    device = advise(make_curve([10, 100], [0.5, 0.505]), BLOCK_BYTES, 10)
    assert device.verdict is Verdict.DEVICE_SUFFICES
    assert device.recommended is None


@given(curves(), st.integers(0, 3000))
def test_automatic_sizes_are_few_different_and_have_the_recommended_ones(curve: Curve, device: int) -> None:
    advice = advise(curve, BLOCK_BYTES, device)
    sizes = automatic_sizes(curve, advice, BLOCK_BYTES, device)
    assert 1 <= len(sizes) <= 8
    assert sizes == sorted(set(sizes))
    assert all(size >= BLOCK_BYTES for size in sizes)
    assert {each.num_bytes for each in advice.named.values()} <= set(sizes)


def test_there_are_eight_of_them_and_none_are_close_to_each_other() -> None:
    curve = make_curve()
    sizes = automatic_sizes(curve, advise(curve, BLOCK_BYTES, 596), BLOCK_BYTES, 596)
    assert len(sizes) == 8
    assert all(later / earlier >= 1.15 for earlier, later in pairwise(sizes))


@given(st.integers(1, 10**15))
def test_sizes_are_rounded_up_to_two_digits(size: int) -> None:
    rounded = round_up(size)
    assert size <= rounded < size * 1.1 + 1
    assert set(str(rounded)[2:]) <= {"0"}
    assert round_up(rounded) == rounded
