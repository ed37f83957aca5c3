"""Numbers in, Prometheus' samples out, through vLLM's hook for connectors. test_metrics.py has a server."""

from __future__ import annotations

import os
import subprocess
import sys
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.metrics import METRICS, Kind
from forebay.stats import LATENCY_BOUNDS_S, Histogram
from tests.vllm.driving import vllm_config

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["small", "0"], 1: ["small", "1"]}


def _hook(engines: dict[int, list[object]] = ENGINES) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

    transfers = KVTransferConfig(
        kv_connector="SimpleCPUOffloadConnector", kv_connector_module_path="forebay.vllm", kv_role="kv_both"
    )
    return KVConnectorProm(vllm_config(kv_transfer_config=transfers), LABELS, engines)


def _samples() -> dict[tuple[str, str], float]:
    """By name and engine, of all that is Forebay's; buckets have their bound in the name."""
    from prometheus_client import REGISTRY

    found: dict[tuple[str, str], float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name.startswith("forebay_") and not sample.name.endswith("_created"):
                assert sample.labels["model_name"] == "small"
                bound = sample.labels.get("le")
                name = sample.name if bound is None else f"{sample.name} {bound}"
                found[name, sample.labels["engine"]] = sample.value
    return found


def _latencies(*seconds: float) -> dict[str, Any]:
    histogram = Histogram(LATENCY_BOUNDS_S)
    for each in seconds:
        histogram.observe(each)
    return {"counts": histogram.counts, "sum": histogram.total}


@pytest.mark.compat
def test_each_engine_has_its_own_numbers() -> None:
    hook = _hook()
    hook.observe({"stored_blocks": 3, "slots_free": 9, "load_latency_s": _latencies(0.0007, 0.003, 99)}, 0)
    hook.observe({"stored_blocks": 4, "slots_free": 7, "load_latency_s": _latencies(0.003)}, 1)
    hook.observe({"stored_blocks": 5, "slots_free": 1, "load_latency_s": _latencies(0.004)}, 1)
    found = _samples()
    assert [found["forebay_stored_blocks_total", engine] for engine in "01"] == [3, 9]
    assert [found["forebay_slots_free", engine] for engine in "01"] == [9, 1]
    name = "forebay_load_latency_seconds"
    for bound, *counts in (("0.0005", 0, 0), ("0.001", 1, 0), ("0.005", 2, 2), ("10.0", 2, 2), ("+Inf", 3, 2)):
        assert [found[f"{name}_bucket {bound}", engine] for engine in "01"] == counts, bound
    assert [found[f"{name}_count", engine] for engine in "01"] == [3, 2]
    assert [found[f"{name}_sum", engine] for engine in "01"] == pytest.approx([99.0037, 0.007])


def test_counters_begin_at_0_and_gauges_when_they_are_known() -> None:
    hook = _hook()
    found = _samples()
    for metric in METRICS:
        name = f"{metric.name}_count" if metric.kind is Kind.HISTOGRAM else metric.name
        assert found.get((name, "1")) == (None if metric.kind is Kind.GAUGE else 0), name
    hook.observe({metric.key: 1 for metric in METRICS if metric.kind is Kind.GAUGE}, 1)
    assert {name for name, _ in _samples().keys() - found.keys()} == {
        metric.name for metric in METRICS if metric.kind is Kind.GAUGE
    }


def test_one_engine_may_follow_another() -> None:
    """vLLM takes its own metrics out of the registry when it starts again in the same process."""
    _hook().observe({"lookups": 1, "slots": 8})
    hook = _hook({0: ["small", "0"]})
    assert _samples()["forebay_lookups_total", "0"] == 0
    assert ("forebay_lookups_total", "1") not in _samples()
    hook.observe({"lookups": 1})
    assert _samples()["forebay_lookups_total", "0"] == 1


def test_a_release_without_metrics_of_connectors_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.vllm import compat

    monkeypatch.setattr(compat, "HAS_CONNECTOR_METRICS", False)
    hook = _hook()
    assert hook.prom_metrics is None
    hook.observe({"lookups": 1})


# --- histograms ---------------------------------------------------------------------------------------

_SECONDS = st.one_of(
    st.floats(0, 100, allow_subnormal=False),
    st.sampled_from([0.0, *LATENCY_BOUNDS_S]),
    st.sampled_from(LATENCY_BOUNDS_S).map(lambda bound: bound * (1 + 1e-15)),
)


@given(st.lists(_SECONDS, max_size=30))
def test_buckets_and_sum_are_those_of_the_measured_values(seconds: list[float]) -> None:
    from prometheus_client import Histogram as PrometheusHistogram

    from forebay.vllm.prometheus import stand_ins

    measured = _latencies(*seconds)
    direct, through = (PrometheusHistogram("some", "", registry=None, buckets=LATENCY_BOUNDS_S) for _ in "12")
    for each in seconds:
        direct.observe(each)
    for each in stand_ins(measured["counts"], measured["sum"], LATENCY_BOUNDS_S):
        through.observe(each)
    [expected], [got] = direct.collect(), through.collect()
    for one, other in zip(expected.samples, got.samples, strict=True):
        if not one.name.endswith("_created"):
            assert (other.name, other.labels) == (one.name, one.labels)
            assert other.value == pytest.approx(one.value, rel=1e-9, abs=1e-12)


def test_a_sum_that_rounding_has_changed_moves_nothing_to_another_bucket() -> None:
    from forebay.vllm.prometheus import stand_ins

    counts = [0] * (len(LATENCY_BOUNDS_S) + 1)
    counts[4] = 3
    for total in (0.0, 3 * LATENCY_BOUNDS_S[3], 3 * LATENCY_BOUNDS_S[4] * (1 + 1e-12)):
        places = Counter(
            bisect_left(LATENCY_BOUNDS_S, each) for each in stand_ins(counts, total, LATENCY_BOUNDS_S)
        )
        assert places == {4: 3}


# --- other places than one process with one registry ----------------------------------------------------


class _RaysWords:
    """The methods and parameters that vLLM's wrappers of Ray's metrics have, and no others."""

    made: dict[str, Any]

    def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
        self.made[name] = self
        self.said: list[tuple[object, float]] = []

    def labels(self, *values: object) -> Any:
        child = type("Child", (), {})()
        for verb in ("inc", "set", "observe"):
            setattr(child, verb, lambda value, values=values: self.said.append((values, value)))
        return child


class _RaysGauge(_RaysWords):
    def __init__(self, name: str, documentation: str, labelnames: list[str], multiprocess_mode: str) -> None:
        super().__init__(name, documentation, labelnames)


class _RaysHistogram(_RaysWords):
    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: list[float]) -> None:
        super().__init__(name, documentation, labelnames)


def test_metrics_of_ray_are_told_the_same() -> None:
    import prometheus_client

    from forebay.vllm import SimpleCPUOffloadConnector

    _RaysWords.made = {}
    types = {
        prometheus_client.Counter: _RaysWords,
        prometheus_client.Gauge: _RaysGauge,
        prometheus_client.Histogram: _RaysHistogram,
    }
    config = vllm_config(kv_transfer_config=None)
    for _ in range(2):
        metrics = SimpleCPUOffloadConnector.build_prom_metrics(config, types, LABELS, ENGINES)
    metrics.observe({"lookups": 2, "slots": 8, "store_latency_s": _latencies(0.003, 0.003)}, 1)
    made = _RaysWords.made
    assert made["forebay_lookups_total"].said == [(("small", "1"), 2)]
    assert made["forebay_slots"].said == [(("small", "1"), 8)]
    assert [value for _, value in made["forebay_store_latency_seconds"].said] == pytest.approx([0.003, 0.003])


_SEVERAL_SERVERS = """
import os, sys
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from tests.vllm.test_prometheus import _hook, _latencies

hook = _hook()
if (child := os.fork()) == 0:
    hook.observe({"lookups": 2, "slots_free": 9, "load_latency_s": _latencies(0.003)})
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
hook.observe({"lookups": 3, "slots_free": 4, "load_latency_s": _latencies(0.003, 0.3)})
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
sys.stdout.write(generate_latest(registry).decode())
"""


def test_several_api_servers_are_added_up(tmp_path: Path) -> None:
    """prometheus_client decides when it is imported whether it writes files, so this is a process of its own."""
    from prometheus_client.parser import text_string_to_metric_families

    run = subprocess.run(
        [sys.executable, "-c", _SEVERAL_SERVERS],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    text = run.stdout[run.stdout.index("# HELP") :]
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels["engine"] == "0" and "pid" not in sample.labels
    }
    assert found["forebay_lookups_total", None] == 5
    assert found["forebay_slots_free", None] == 4
    assert found["forebay_load_latency_seconds_bucket", "0.005"] == 2
    assert found["forebay_load_latency_seconds_count", None] == 3
    assert found["forebay_load_latency_seconds_sum", None] == pytest.approx(0.306)
