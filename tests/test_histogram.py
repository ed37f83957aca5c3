from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.stats import LATENCY_BOUNDS_S, Histogram, Stats


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(0.0, 0), (0.5, 0), (1.0, 0), (1.5, 1), (2.0, 1), (4.0, 2), (4.1, 3), (1e9, 3)],
)
def test_a_bound_belongs_to_the_bucket_below_it(value: float, bucket: int) -> None:
    # "le" as Prometheus means it: less than or equal to the bound.
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe(value)
    assert histogram.counts == [int(i == bucket) for i in range(4)]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 12)))
def test_counts_by_bucket_are_what_counting_gives(values: list[int]) -> None:
    histogram = Histogram((2.0, 5.0, 9.0))
    for value in values:
        histogram.observe(value)
    at_most = [sum(histogram.counts[: i + 1]) for i in range(4)]
    assert at_most == [sum(value <= bound for value in values) for bound in (2, 5, 9, 12)]
    assert histogram.count == len(values)
    assert histogram.total == sum(values)


def test_snapshot_does_not_change_with_the_histogram() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.25)
    before = histogram.snapshot()
    histogram.observe(3.0)
    assert before == {"bounds": (1.0,), "counts": (1, 0), "sum": 0.25}
    assert histogram.snapshot() == {"bounds": (1.0,), "counts": (1, 1), "sum": 3.25}


def test_latency_bounds_rise() -> None:
    # observe() searches by halving: bounds out of order would fill the wrong buckets without a sound.
    assert list(LATENCY_BOUNDS_S) == sorted(set(LATENCY_BOUNDS_S))


def test_stats_start_at_nothing() -> None:
    for name, value in Stats().snapshot().items():
        if isinstance(value, dict):
            assert value == {"bounds": LATENCY_BOUNDS_S, "counts": (0,) * (len(LATENCY_BOUNDS_S) + 1), "sum": 0.0}
        else:
            assert value == 0, name


def test_stats_snapshot_names_every_counter_and_copies_its_value() -> None:
    stats = Stats()
    stats.lookups = 3
    stats.load_latency_s.observe(0.002)
    before = stats.snapshot()
    stats.lookups = 4
    stats.load_latency_s.observe(0.002)
    assert list(before) == [each.name for each in fields(Stats)]
    assert before["lookups"] == 3
    latency = before["load_latency_s"]
    assert isinstance(latency, dict)
    assert sum(latency["counts"]) == 1


def test_two_stats_share_no_histogram() -> None:
    first, second = Stats(), Stats()
    first.store_latency_s.observe(1.0)
    assert first.load_latency_s.count == 0
    assert second.store_latency_s.count == 0
