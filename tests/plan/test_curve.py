"""Curves from one reading, against caches that are simulated one size at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from random import Random
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.plan.best import BestCache
from forebay.plan.curve import Curves, prefix_path, read_curves
from forebay.plan.distinct import DistinctCount
from forebay.plan.results import Curve
from forebay.reuse import Run
from tests.plan.paths import ListTrace, Path, hits_of_any_cache, lru_hits, most_hits, path_lists, random_paths


def _blocks(paths: Sequence[Path]) -> int:
    return sum(map(len, paths))


def _distinct(paths: Sequence[Path]) -> int:
    return len({block for path in paths for block in path})


def _read(paths: Sequence[Path], **settings: float) -> Curves:
    every_size = range(1, _distinct(paths) + 2)
    return read_curves(ListTrace.of(paths), every_size, **settings)  # type: ignore[arg-type]


def _at(curve: Curve, size: int) -> float:
    return curve.hit_share[list(curve.sizes).index(size)]


@given(path_lists())
@settings(max_examples=150)
def test_lru_curve_is_that_of_a_simulated_cache_at_every_size(paths: list[Path]) -> None:
    curve = _read(paths).lru
    for size in range(1, _distinct(paths) + 2):
        assert _at(curve, size) * _blocks(paths) == pytest.approx(lru_hits(paths, size)), size
    assert curve.sampled == 1.0
    assert curve.num_blocks == _blocks(paths)
    assert curve.distinct_blocks == _distinct(paths)


@given(path_lists(max_requests=20))
@settings(max_examples=100)
def test_best_possible_curve_is_that_of_a_cache_that_knows_the_future(paths: list[Path]) -> None:
    curve = _read(paths).best
    for size in range(1, _distinct(paths) + 2):
        assert _at(curve, size) * _blocks(paths) == pytest.approx(most_hits(paths, size)), size


@given(path_lists(max_requests=20), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_no_cache_finds_more_than_the_best_possible(paths: list[Path], rng: Random) -> None:
    curve = _read(paths).best
    for size in range(1, _distinct(paths) + 1):
        assert hits_of_any_cache(paths, size, rng) <= _at(curve, size) * _blocks(paths) + 1e-6


@given(path_lists())
@settings(max_examples=100)
def test_more_memory_never_finds_less(paths: list[Path]) -> None:
    curves = _read(paths)
    for curve in (curves.lru, curves.best):
        assert list(curve.hit_share) == sorted(curve.hit_share)
        assert curve.hit_share[-1] <= curve.unbounded_share
    assert all(map(float.__ge__, map(float, curves.best.hit_share), map(float, curves.lru.hit_share)))
    assert curves.best.hit_share[-1] == curves.best.unbounded_share == curves.lru.unbounded_share


def test_a_long_trace_is_the_same_with_books_that_are_rewritten_often() -> None:
    """Compacting the stack and merging the places of the best cache change nothing."""
    paths = random_paths(seed=1, requests=1500)
    sizes = [3, 10, 40, 160, 640]
    with (
        mock.patch("forebay.reuse._MIN_BATCHES", 4),
        mock.patch("forebay.plan.best._MIN_STEPS", 4),
        mock.patch("forebay.plan.curve._EVERY_REQUESTS", 8),
    ):
        often = read_curves(ListTrace.of(paths), sizes)
    assert often == read_curves(ListTrace.of(paths), sizes)
    for size in sizes:
        assert _at(often.lru, size) * _blocks(paths) == pytest.approx(lru_hits(paths, size))


def test_places_of_the_best_cache_are_merged_by_what_can_still_begin() -> None:
    """Those that became free after turn 700 are of no use to what was last used then, but to what was in 1400."""
    cache = BestCache(3)
    for turn, now in ((0, 700), (0, 701), (0, 1400)):
        cache.use([Run(turn, 0, 1, 1, known=True)], now)
    with mock.patch("forebay.plan.best._MIN_STEPS", -100):
        cache.simplify([700, 1400])
    cache.use([Run(700, 0, 3, 3, known=True)], 1500)
    assert cache.known_hits == 3 + 1
    cache.use([Run(1400, 0, 3, 3, known=True)], 1500)
    assert cache.known_hits == 3 + 1 + 2


def test_a_sample_is_close_and_says_so() -> None:
    paths = random_paths(seed=2, requests=12_000, max_new=30, reach=400)
    sizes = [2**i for i in range(8, 18)]
    exact = read_curves(ListTrace.of(paths), sizes)
    for seed in range(3):
        sampled = read_curves(ListTrace.of(paths), sizes, rate=0.02, seed=seed)
        assert sampled.lru.sampled == pytest.approx(0.02)
        assert sampled.lru.distinct_blocks == pytest.approx(_distinct(paths), rel=0.01)
        assert sampled.lru.unbounded_share == pytest.approx(exact.lru.unbounded_share, abs=0.005)
        for size in sizes:
            assert _at(sampled.lru, size) == pytest.approx(_at(exact.lru, size), abs=0.02), size
            assert _at(sampled.best, size) == pytest.approx(_at(exact.best, size), abs=0.03), size


def test_a_trace_with_too_many_blocks_is_sampled_by_itself() -> None:
    paths = random_paths(seed=3, requests=12_000, max_new=30, reach=400)
    sizes = [2**i for i in range(8, 18)]
    exact = read_curves(ListTrace.of(paths), sizes)
    sampled = read_curves(ListTrace.of(paths), sizes, max_blocks=8_000)
    assert 8_000 * 0.5 < sampled.lru.sampled * _distinct(paths) <= 8_000 + 4096
    for size in sizes:
        assert _at(sampled.lru, size) == pytest.approx(_at(exact.lru, size), abs=0.02), size


def test_a_prompt_that_everybody_begins_with_is_no_matter_of_luck() -> None:
    """One block is a quarter of all uses; whether a sample has it must not matter."""
    paths = [(0, *range(3 * i + 1, 3 * i + 4)) for i in range(4000)]
    for seed in range(8):
        curve = read_curves(ListTrace.of(paths), [100], rate=0.01, seed=seed).lru
        assert _at(curve, 100) == pytest.approx(0.25, abs=0.01)


def test_a_few_blocks_that_are_used_often_do_not_lift_a_sample() -> None:
    """A sample has twice as many of them as it should, or half: what all uses come to is known from elsewhere."""
    often = [tuple(range(10 * i, 10 * i + 10)) for i in range(200)] * 30
    once = [tuple(range(100_000 + 10 * i, 100_010 + 10 * i)) for i in range(3_000)]
    paths = often + once
    Random(6).shuffle(paths)
    for seed in range(5):
        curve = read_curves(ListTrace.of(paths), [100_000], rate=0.01, seed=seed).lru
        assert _at(curve, 100_000) == pytest.approx(200 * 10 * 29 / _blocks(paths), abs=0.01)


def test_content_ids_become_prefixes() -> None:
    """The same block behind other blocks is another one."""
    curve = read_curves(ListTrace.of([(1, 2), (3, 2), (1, 2)]), [10]).lru
    assert _at(curve, 10) * 6 == pytest.approx(2)
    assert prefix_path([1, 2])[1] != prefix_path([3, 2])[1]
    assert prefix_path([1, 2], seed=1) != prefix_path([1, 2], seed=2)


def test_an_empty_trace_has_flat_curves() -> None:
    curves = read_curves(ListTrace.of([]), [1, 100])
    assert set(curves.lru.hit_share) == {0.0}
    assert curves.requests == curves.lru.num_blocks == 0


def test_progress_is_told_and_ends_with_all() -> None:
    told: list[tuple[int, int]] = []
    read_curves(ListTrace.of(random_paths(4, 700)), progress=lambda *each: told.append(each))
    assert len(told) >= 3
    assert told == sorted(told)
    assert told[-1][0] == len(random_paths(4, 700))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"sizes": [0]}, "sizes: expected whole numbers of at least 1 block, got 0"),
        ({"max_blocks": 0}, "max_blocks: expected a whole number of at least 1, got 0"),
        ({"rate": 0}, "rate: expected more than 0 and at most 1, got 0"),
        ({"rate": 1.5}, "rate: expected more than 0 and at most 1, got 1.5"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_curves(ListTrace.of([(1,)]), **settings)  # type: ignore[arg-type]
    assert str(caught.value) == line


@pytest.mark.parametrize("count", [0, 1, 1000, 60_000, 200_000])
def test_distinct_blocks_are_counted_within_a_percent(count: int) -> None:
    rng, distinct = Random(count), DistinctCount()
    hashes = [rng.getrandbits(64) for _ in range(count)]
    distinct.add(hashes)
    distinct.add(hashes)
    assert distinct.estimate() == pytest.approx(count, rel=0.012, abs=0.01)


def test_the_first_curve_is_known_at_fine_steps_and_both_at_the_sizes_asked_for() -> None:
    paths = [[request * 40 + block for block in range(40)] for request in (*range(50), *range(50))]
    curves = read_curves(ListTrace.of(paths), [77, 1999, 2000])
    assert curves.lru.share_at(1999) == 0
    assert curves.lru.share_at(2000) == 0.5
    assert {77, 1999, 2000} <= set(curves.best.sizes) < set(curves.lru.sizes)
    fine = [size for size in curves.lru.sizes if size > 100]
    assert all(after / before <= 1.021 for before, after in pairwise(fine))
