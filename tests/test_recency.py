"""Recency in fixed memory, against a stack that is a plain list."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvariantError
from forebay.plan.curve import prefix_path
from forebay.recency import Recency, Seen
from tests.plan.paths import Path, PlainStack, path_lists, random_paths

DEEP = 10**9
MANY = 10**6
EACH_ITSELF = range(4000)  # of a prompt


def _by_turn(expected: Sequence[tuple[int, int, int, int]]) -> list[Seen]:
    return [(newer, blocks) for _, newer, _, blocks in expected]


@given(path_lists(max_requests=60), st.integers(1, 4))
@settings(max_examples=150)
def test_what_was_seen_is_what_a_plain_stack_saw(paths: list[Path], times: int) -> None:
    """Also if each block stands for several: then everything is so many times as much."""
    recency, plain = Recency(range(0, 1000 * times, times), MANY, DEEP), PlainStack()
    for path in paths:
        seen, sampled = recency.use(path)
        assert list(seen) == [(times * newer, times * blocks) for newer, blocks in _by_turn(plain.use(path))]
        assert not sampled
        recency.check()


@given(path_lists(max_requests=60), st.integers(1, 60))
@settings(max_examples=150)
def test_what_lies_too_deep_is_forgotten_and_nothing_else(paths: list[Path], depth: int) -> None:
    recency, plain = Recency(EACH_ITSELF, MANY, depth), PlainStack()
    for path in paths:
        seen, _ = recency.use(path)
        expected = plain.use(path)
        recency.check()
        assert list(seen) == _by_turn(expected[: len(seen)])
        assert all(newer + left > depth for _, newer, left, _ in expected[len(seen) :])
        assert all(newer < depth for newer, _ in seen)


@given(path_lists(max_requests=60), st.integers(40, 80), st.integers(1, 200))
@settings(max_examples=150)
def test_books_agree_with_few_batches_and_a_sample(paths: list[Path], most: int, depth: int) -> None:
    """Memory is bounded, and of a path it is said that it was used no more often than it was."""
    with mock.patch("forebay.recency._MAX_BATCHES", 6):
        recency, plain = Recency(EACH_ITSELF, most, depth), PlainStack()
        for path in paths:
            path = path[:20]
            seen, sampled = recency.use(prefix_path(path))
            recency.check()
            expected = plain.use(path)
            known = sum(blocks for _, blocks in seen)
            assert known <= sum(blocks for *_, blocks in expected)
            assert [newer for newer, _ in seen] == sorted(newer for newer, _ in seen)
            assert all(known <= before < len(path) for _, _, before in sampled)
            assert recency.num_known <= most
            assert len(recency._starts) <= 7


def test_large_batches_are_wrong_by_a_small_part_only() -> None:
    recency, plain = Recency(EACH_ITSELF, MANY, DEEP), PlainStack()
    worst = 0.0
    for path in random_paths(seed=11, requests=2500, max_new=9, reach=600):
        seen, _ = recency.use(path)
        expected = _by_turn(plain.use(path))
        assert [blocks for _, blocks in seen] == [blocks for _, blocks in expected]
        for (newer, _), (exactly, _) in zip(seen, expected, strict=True):
            worst = max(worst, abs(newer - exactly) / max(500, exactly))
    recency.check()
    assert len(recency._starts) < 600
    assert 0 < worst < 0.05


def test_a_sample_is_right_on_average() -> None:
    """Of 2,000 prompts that come a second time in the same order, one in eight or fewer blocks is known."""
    recency = Recency(EACH_ITSELF, max_known=4000, depth=DEEP)
    prompts = [prefix_path(range(1000 * i, 1000 * i + 16)) for i in range(2000)]
    for prompt in prompts:
        recency.use(prompt)
    recency.check()
    assert recency.rate <= 1 / 8
    blocks, newer_sum = 0, 0.0
    for prompt in prompts[:-50]:
        seen, sampled = recency.use(prompt)
        assert not seen
        for newer, stands_for, before in sampled:
            assert before < 16
            blocks += stands_for
            newer_sum += newer * stands_for
    recency.check()
    assert blocks == pytest.approx(16 * 1950, rel=0.1)
    assert newer_sum / blocks == pytest.approx(16 * 2000, rel=0.1)


def test_a_sample_stays_right_however_often_it_is_used() -> None:
    """The same blocks are in it each time: what they are wrong by must not add up."""
    recency = Recency(EACH_ITSELF, max_known=1000, depth=DEEP)
    prompts = [prefix_path(range(1000 * i, 1000 * i + 16)) for i in range(400)]
    for _ in range(50):
        for prompt in prompts:
            recency.use(prompt)
        recency.check()
        assert recency._total == pytest.approx(400 * 16, rel=0.3)
    assert recency.rate == pytest.approx(1 / 16, rel=0.5)


def test_distances_behind_a_near_head_count_all_that_is_near() -> None:
    recency = Recency(EACH_ITSELF, max_known=4000, depth=DEEP)
    long = prefix_path(range(1500))
    recency.use(long)
    for start in range(50_000, 53_000, 100):
        recency.use([*long[:300], *prefix_path(range(start, start + 100))])
    assert recency.rate < 1
    seen, sampled = recency.use(long)
    assert seen == [(0, 300)]
    assert all(newer == pytest.approx(3300, rel=0.3) for newer, *_ in sampled)
    assert sum(blocks for _, blocks, _ in sampled) == pytest.approx(1200, rel=0.2)
    assert min(before for *_, before in sampled) >= 300


def test_memory_stays_bounded_however_long_it_goes_on() -> None:
    recency = Recency(EACH_ITSELF, max_known=500, depth=DEEP)
    for number, path in enumerate(random_paths(seed=5, requests=20_000, max_new=6, reach=5_000)):
        recency.use(prefix_path(path))
        if number % 1000 == 0:
            recency.check()
    recency.check()
    assert 0 < recency.rate < 0.1


def test_prompts_that_take_turns_behind_one_head_leave_nothing_behind() -> None:
    """Each is used twice, so it moves; and the next one takes its head away."""
    recency = Recency(EACH_ITSELF, MANY, DEEP)
    recency.use([0])  # never too deep: what is new stays new
    for number in range(12_000):
        recency.use([1, 2 + number // 2 % 2])
        if number % 50 == 0:
            recency.check()
    assert recency.num_known == 4
    assert len(recency._moved) < 2100


def test_clear_forgets_what_was_used() -> None:
    recency = Recency(EACH_ITSELF, 100, DEEP)
    recency.use([1, 2, 3])
    recency.clear()
    recency.check()
    assert recency.use([1, 2, 3]) == ((), ())
    assert recency.use([1, 2]) == ([(0, 2)], ())


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("_left", [2], "miscounted"),
        ("_total", 2, "do not add up"),
        ("_ends", [0], "out of order|before it starts"),
        ("_new_from", 9, "mixed up"),
        ("_max_known", 2, "too many"),
    ],
)
def test_check_notices_books_that_disagree(name: str, wrong: object, words: str) -> None:
    recency = Recency(EACH_ITSELF, 100, DEEP)
    recency.use([1, 2, 3])
    recency.use([1, 2, 3])
    recency.check()
    value = getattr(recency, name)
    setattr(recency, name, [*value[:-1], *wrong] if isinstance(wrong, list) else wrong)
    with pytest.raises(InvariantError, match=words):
        recency.check()
