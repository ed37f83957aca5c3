"""What one scrape of a server says: of each of its engines, every number of `forebay.metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from forebay.cli.top.exposition import Sample
from forebay.metrics import METRICS, Kind

Count = str | tuple[str, float]
"""A counter, by its key in `forebay.metrics`; or of a histogram the key and the upper bound of a bucket."""

_COUNTERS = {metric.name: metric.key for metric in METRICS if metric.kind is Kind.COUNTER}
_GAUGES = {metric.name: metric.key for metric in METRICS if metric.kind is Kind.GAUGE}
_BUCKETS = {f"{metric.name}_bucket": metric.key for metric in METRICS if metric.kind is Kind.HISTOGRAM}
_STARTED = "process_start_time_seconds"
_MOST_DIGITS = 9

_Key = TypeVar("_Key")


class EngineId(NamedTuple):
    """The labels that vLLM gives an engine."""

    model: str
    engine: str


@dataclass(frozen=True, slots=True)
class Numbers:
    """Counts of buckets are cumulative, as Prometheus has them."""

    counters: dict[Count, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    at_s: float
    """On this machine's monotonic clock."""
    engines: Mapping[EngineId, Numbers]
    started_at: float | None = None
    """When the server's process began, in seconds since 1970, where it says so."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no reading."""

    at_s: float
    text: str
    answered: bool
    """Something answered, but not with Forebay's metrics."""

    def __str__(self) -> str:
        return f"{'no metrics' if self.answered else 'down'}: {self.text}"


def read(samples: Iterable[Sample], at_s: float) -> Reading | Problem:
    engines: dict[EngineId, Numbers] = {}
    started_at, is_vllm = None, False
    for name, labels, value in samples:
        if not name.startswith("forebay_"):
            is_vllm = is_vllm or name.startswith("vllm:")
            started_at = value if name == _STARTED else started_at
            continue
        if not math.isfinite(value):
            continue
        engine = EngineId(labels.get("model_name", ""), labels.get("engine", ""))
        numbers = engines.setdefault(engine, Numbers())
        if name in _COUNTERS:
            _add(numbers.counters, _COUNTERS[name], value)
        elif name in _BUCKETS:
            if (bound := _bound(labels)) is not None:
                _add(numbers.counters, (_BUCKETS[name], bound), value)
        elif name in _GAUGES:
            _add(numbers.gauges, _GAUGES[name], value)
    if any(numbers.counters for numbers in engines.values()):
        return Reading(at_s, dict(sorted(engines.items(), key=lambda item: _order(item[0]))), started_at)
    if is_vllm:
        text = "this vLLM runs without Forebay: see forebay config for its --kv-transfer-config"
    else:
        text = "none of Forebay's; a vLLM with --disable-log-stats has none"
    return Problem(at_s, text, answered=True)


def _add(numbers: dict[_Key, float], key: _Key, value: float) -> None:
    """Labels that are not known here may tell several series of an engine apart. They belong together."""
    numbers[key] = numbers.get(key, 0.0) + value


def _bound(labels: Mapping[str, str]) -> float | None:
    try:
        return float(labels["le"])
    except (KeyError, ValueError):
        return None


def _order(engine: EngineId) -> tuple[str, int, str]:
    """Engine 10 comes after engine 9."""
    is_number = engine.engine.isdecimal() and len(engine.engine) <= _MOST_DIGITS
    number = int(engine.engine) if is_number else -1
    return engine.model, number, engine.engine
