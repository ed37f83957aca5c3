"""Forebay's numbers on the /metrics page of vLLM's server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf, nextafter
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics

from forebay.metrics import BY_KEY, METRICS, Kind, Metric
from forebay.stats import LATENCY_BOUNDS_S

_CLASSES = {Kind.COUNTER: Counter, Kind.GAUGE: Gauge, Kind.HISTOGRAM: Histogram}
_registered: list[Any] = []


class ForebayPromMetrics(KVConnectorPromMetrics):
    """`metric_types` says what to make instead of prometheus_client's own classes: with Ray they are Ray's, which
    have the same methods and know less."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        _unregister_earlier()
        self._parents = {each.key: _made(each, metric_types[_CLASSES[each.kind]], labelnames) for each in METRICS}
        _registered.extend(self._parents.values())
        self._children: dict[tuple[int, str], Any] = {}
        for engine in per_engine_labelvalues:
            for each in METRICS:
                # What counts is there from the start, at 0: otherwise Prometheus would not see the first increase.
                # A gauge is there once its value is known.
                if each.kind is not Kind.GAUGE:
                    self._child(engine, each.key)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for key, value in transfer_stats_data.items():
            child = self._child(engine_idx, key)
            match BY_KEY[key].kind:
                case Kind.COUNTER:
                    child.inc(value)
                case Kind.GAUGE:
                    child.set(value)
                case Kind.HISTOGRAM:
                    for seconds in stand_ins(value["counts"], value["sum"], LATENCY_BOUNDS_S):
                        child.observe(seconds)

    def _child(self, engine: int, key: str) -> Any:
        child = self._children.get((engine, key))
        if child is None:
            child = self._parents[key].labels(*self.per_engine_labelvalues[engine])
            self._children[engine, key] = child
        return child


def _made(metric: Metric, kind: type, labelnames: list[str]) -> Any:
    extra: dict[str, Any] = {}
    if metric.kind is Kind.GAUGE:
        extra["multiprocess_mode"] = "mostrecent"  # of several API servers, the one that was told last
    elif metric.kind is Kind.HISTOGRAM:
        extra["buckets"] = list(LATENCY_BOUNDS_S)
    text = metric.help.replace("`", "")
    return kind(name=metric.name, documentation=f"{text} ({metric.unit})", labelnames=labelnames, **extra)


def _unregister_earlier() -> None:
    """One engine may follow another in a process. vLLM then takes back what is named `vllm:`, and a name that is
    registered twice is an error."""
    while _registered:
        with suppress(KeyError):  # Ray's are not there, and somebody may have cleared it
            REGISTRY.unregister(_registered.pop())


def stand_ins(counts: Sequence[int], total: float, bounds: Sequence[float]) -> Iterator[float]:
    """So many values in each bucket, `total` together. What was measured comes from another process as counts and
    a sum. prometheus_client has no way to add counts, nor has Ray: what they take is values, one by one.

    Each bucket is filled at the same share of its width, which is the one that leads to `total`.
    """
    edges = [0.0, *bounds, max(total, nextafter(bounds[-1], inf))]  # no value was above all of them together
    least = sum(count * low for count, low in zip(counts, edges, strict=False))
    most = sum(count * high for count, high in zip(counts, edges[1:], strict=True))
    share = min(max((total - least) / (most - least), 0.0), 1.0) if most > least else 0.0
    for count, (low, high) in zip(counts, pairwise(edges), strict=True):
        # A bucket has its upper bound and not its lower one, but for the first, which has 0.
        value = min(max(low + share * (high - low), nextafter(low, inf) if low else 0.0), high)
        for _ in range(count):
            yield value
