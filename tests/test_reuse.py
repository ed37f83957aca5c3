"""Stack distances, against a stack that is a plain list."""

from __future__ import annotations

from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvariantError
from forebay.plan.curve import prefix_path
from forebay.reuse import ReuseStack, Run
from tests.plan.paths import Path, PlainStack, path_lists, random_paths


@given(path_lists(), st.sampled_from([4, 16, 1024]))
@settings(max_examples=150)
def test_runs_are_those_of_a_plain_stack(paths: list[Path], places: int) -> None:
    with mock.patch("forebay.reuse._MIN_BATCHES", places):
        stack, plain = ReuseStack(max_blocks=10_000), PlainStack()
        for path in paths:
            runs = stack.use(prefix_path(path))
            assert [run[:4] for run in runs] == plain.use(path)
            assert all(run.known for run in runs)
            stack.check()
    assert stack.rate == 1.0


@given(path_lists(max_requests=60), st.integers(1, 40), st.integers(1, 30), st.sampled_from([0.2, 0.7, 1.0]))
@settings(max_examples=150)
def test_books_of_a_sample_agree(paths: list[Path], max_blocks: int, near: int, rate: float) -> None:
    """What is near is exact whatever the sample has, and memory stays bounded."""
    stack, plain = ReuseStack(max_blocks, rate, near), PlainStack()
    for path in paths:
        runs, expected = stack.use(prefix_path(path)), plain.use(path)
        stack.check()
        known = [run[:4] for run in runs if run.known]
        assert known == expected[: len(known)]
        close = [each for each in expected if each[1] + each[2] <= near]
        assert len(known) >= len(close)
        assert len(stack._last) <= 1.25 * (max_blocks + 2 * near) + len(path)


def test_far_blocks_are_estimated_from_the_sample() -> None:
    stack = ReuseStack(max_blocks=100_000, rate=0.1, near_blocks=100)
    first = prefix_path(range(20_000))
    stack.use(first)
    stack.use(prefix_path(range(100_000, 140_000)))
    [run] = stack.use(first)
    assert not run.known
    assert run.newer == pytest.approx(40_000, rel=0.05)
    assert run.left == pytest.approx(20_000, rel=0.05)
    assert run.blocks == run.left


def test_distances_behind_a_near_head_count_all_that_is_near() -> None:
    stack = ReuseStack(max_blocks=100_000, rate=0.1, near_blocks=4000)
    long = prefix_path(range(20_000))
    stack.use(long)
    stack.use([*long[:3000], *prefix_path(range(50_000, 51_000))])
    head, tail = stack.use(long)
    assert head == Run(1, 0, 4000, 3000, known=True)
    assert not tail.known
    assert tail.newer == 4000
    assert tail.left == pytest.approx(17_000, rel=0.05)


def test_memory_stays_bounded_however_long_it_goes_on() -> None:
    stack = ReuseStack(max_blocks=500, near_blocks=50)
    for path in random_paths(seed=5, requests=20_000, max_new=6, reach=5_000):
        stack.use(prefix_path(path))
    assert len(stack._last) < 1300
    assert len(stack.turns) < 3000
    assert 0 < stack.rate < 0.1
    stack.check()


def test_check_notices_books_that_disagree() -> None:
    stack = ReuseStack(max_blocks=100)
    stack.use(prefix_path([1, 2, 3]))
    stack._near.add(0, 1)
    with pytest.raises(InvariantError, match="miscounted"):
        stack.check()
