"""Every number that operators are given, in one table: Prometheus, the log and docs/metrics.md are made from it.

A name in Prometheus never changes its meaning; `key` is what the log calls the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"  # of seconds, with the bounds of stats.LATENCY_BOUNDS_S


class Section(Enum):
    """Where docs/metrics.md has it."""

    ADMISSIONS = "admissions"
    TRANSFERS = "transfers"
    TROUBLE = "trouble"
    POOL = "pool"
    PREDICTED = "predicted"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    """In Prometheus."""
    key: str
    """In vLLM's stats and log."""
    kind: Kind
    unit: str
    section: Section
    source: str | None
    """Where a manager has it: `stats.lookups` is `manager.stats.lookups`. None: only an adapter knows it."""
    help: str
    look: str = ""
    """When an operator should look into it."""


def _counter(field: str, unit: str, section: Section, text: str, look: str = "") -> Metric:
    return Metric(f"forebay_{field}_total", field, Kind.COUNTER, unit, section, f"stats.{field}", text, look)


def _latency(direction: str, text: str) -> Metric:
    name, field = f"forebay_{direction}_latency_seconds", f"{direction}_latency_s"
    return Metric(name, field, Kind.HISTOGRAM, "seconds", Section.TRANSFERS, f"stats.{field}", text)


def _slots(key: str, field: str, text: str) -> Metric:
    return Metric(f"forebay_{key}", key, Kind.GAUGE, "slots", Section.POOL, f"pool.{field}", text)


def _predicted(field: str, words: str) -> Metric:
    name, text = (
        f"predicted_hit_share_{field}",
        f"blocks found on the device or the host, with {words} host memory",
    )
    return Metric(f"forebay_{name}", name, Kind.GAUGE, "share", Section.PREDICTED, f"predicted.{field}", text)


def _of_engine(key: str, unit: str, text: str) -> Metric:
    return Metric(f"forebay_{key}", key, Kind.GAUGE, unit, Section.ENGINE, None, text)


_ADMISSIONS, _TRANSFERS, _TROUBLE = Section.ADMISSIONS, Section.TRANSFERS, Section.TROUBLE

METRICS = (
    _counter("lookups", "requests", _ADMISSIONS, "requests admitted"),
    _counter(
        "hit_tokens",
        "tokens",
        _ADMISSIONS,
        "tokens that the engine accepted from Forebay and for which a load was planned",
    ),
    _counter("hit_blocks", "blocks", _ADMISSIONS, "blocks that those loads copy"),
    _counter("moved_blocks", "blocks", _ADMISSIONS, "of `hit_blocks`: moved within the device, to bridge a gap"),
    _counter(
        "miss_tokens",
        "tokens",
        _ADMISSIONS,
        "tokens neither on the device nor accepted from Forebay; the last token of a prompt is always one",
    ),
    _counter("miss_blocks", "blocks", _ADMISSIONS, "whole blocks neither on the device nor accepted from Forebay"),
    _counter("not_yet_answers", "answers", _ADMISSIONS, "times a request was told to ask again in the next step"),
    _counter("waits_given_up", "waits", _ADMISSIONS, "waits that passed `wait_deadline_s`"),
    _counter("stored_blocks", "blocks", _TRANSFERS, "blocks that arrived on the host"),
    _counter("loaded_blocks", "blocks", _TRANSFERS, "blocks that arrived on the device; moves are not among them"),
    _counter("stored_bytes", "bytes", _TRANSFERS, "bytes of `stored_blocks`"),
    _counter("loaded_bytes", "bytes", _TRANSFERS, "bytes of `loaded_blocks`"),
    _latency("store", "of a store: from handing out the order to the last rank's report"),
    _latency("load", "of a load: from handing out the order to the last rank's report"),
    _counter("store_failures", "transfers", _TROUBLE, "stores that some rank reported as failed", "it grows"),
    _counter(
        "load_failures",
        "transfers",
        _TROUBLE,
        "loads that some rank reported as failed, mismatches included",
        "it grows",
    ),
    _counter(
        "checksum_mismatches",
        "reports",
        _TROUBLE,
        "reports of a rank that a load's bytes are not those that were stored under their keys",
        "it is not 0: memory is failing, or a bug",
    ),
    _counter(
        "loads_refused",
        "requests",
        _TROUBLE,
        "the engine accepted what cannot be had, for instance a length it was not offered",
        "it is not 0 on a model without windows and states",
    ),
    _counter(
        "recomputes",
        "requests",
        _TROUBLE,
        "requests told to compute what they were promised: failed, refused, late, or reset",
        "it grows without resets",
    ),
    _counter(
        "abandoned_transfers",
        "transfers",
        _TROUBLE,
        "transfers that ran when nobody wanted them any more: abort, preemption, reset, deadline",
    ),
    _counter(
        "overdue_transfers",
        "transfers",
        _TROUBLE,
        "transfers past `load_deadline_s` or `store_deadline_s`; their memory stays reserved",
        "it is not 0",
    ),
    _counter(
        "stores_without_room",
        "blocks",
        _TROUBLE,
        "blocks not stored for want of a slot, counted at every try",
        "it grows fast: the host pool is small",
    ),
    _counter(
        "unknown_reports",
        "reports",
        _TROUBLE,
        "reports about a transfer or a rank that does not exist",
        "it is not 0: a bug in an adapter",
    ),
    _counter(
        "late_reports",
        "reports",
        _TROUBLE,
        "reports about a transfer that had ended, or a rank that had reported",
        "it is not 0: a bug in a copier",
    ),
    _counter("resets", "calls", _TROUBLE, "calls of `reset()`"),
    _slots("slots", "capacity", "slots"),
    _slots("slots_ready", "ready", "slots that can be used by now; the others are still being prepared"),
    _slots("slots_free", "free", "slots without content"),
    _slots("slots_filling", "filling", "slots that a copy holds and whose key cannot be found"),
    _slots("slots_cached", "cached", "slots whose key can be found"),
    _slots("slots_pinned", "pinned", "slots that something holds"),
    Metric(
        "forebay_evictions_total",
        "evictions",
        Kind.COUNTER,
        "keys",
        Section.POOL,
        "pool.evictions",
        "keys that left to make room",
    ),
    _predicted("half", "half of the"),
    _predicted("same", "the"),
    _predicted("twice", "twice the"),
    _predicted("four_times", "four times the"),
    _predicted("eight_times", "eight times the"),
    _of_engine("host_capacity_bytes", "bytes", "bytes of all slots, on all ranks together"),
    _of_engine("host_ready_bytes", "bytes", "of them, those of slots that can be used by now"),
    _of_engine("requests_loading", "requests", "requests that wait for a load"),
    _of_engine("ranks", "ranks", "ranks of the engine, each of which copies its own part of every block"),
)

BY_KEY = MappingProxyType({metric.key: metric for metric in METRICS})
