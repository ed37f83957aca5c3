"""The table of metrics is complete, its names are in order, and the page and the dashboard agree with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import fields
from operator import attrgetter
from typing import Any

import pytest

from forebay import FullAttention, KVLayout, OffloadConfig, Stats
from forebay.ghost import Predicted
from forebay.metrics import BY_KEY, METRICS, Kind, Metric
from forebay.pool import HostPool
from forebay.stats import LATENCY_BOUNDS_S, Histogram
from forebay.testing import TinyEngine
from tests.test_readme import ROOT
from tools import metrics_page

DASHBOARD = ROOT / "ops" / "grafana" / "forebay.json"


def test_every_counter_and_every_gauge_is_in_the_table() -> None:
    sources = [metric.source for metric in METRICS if metric.source]
    assert len(set(sources)) == len(sources)
    properties = {name for name, value in vars(HostPool).items() if isinstance(value, property)}
    pool = {f"pool.{name}" for name in properties | {"evictions"}}
    predicted = {f"predicted.{field}" for field in Predicted._fields}
    assert set(sources) == {f"stats.{field.name}" for field in fields(Stats)} | pool | predicted


def test_a_manager_has_what_the_table_says() -> None:
    layout = KVLayout((FullAttention(4),), tokens_per_hash=4, bytes_per_block=16)
    manager = TinyEngine(layout, OffloadConfig(capacity_bytes=16 * 32), num_blocks=64).manager
    for metric in METRICS:
        if metric.source:
            value = attrgetter(metric.source)(manager)
            kind = float if metric.unit == "share" else Histogram if metric.kind is Kind.HISTOGRAM else int
            assert isinstance(value, kind), metric


def test_names_are_used_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(BY_KEY) == len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.key)
def test_names_are_in_the_style_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"forebay_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") is (metric.kind is Kind.COUNTER)
    plain = metric.name.removesuffix("_total")
    for unit in ("bytes", "seconds", "tokens", "blocks"):
        assert plain.endswith(f"_{unit}") is (metric.unit == unit) or metric.key == "stores_without_room"
    assert metric.help
    assert metric.help[-1] not in ".\n"
    assert "|" not in metric.help + metric.look


def test_the_page_has_the_tables_that_the_code_says() -> None:
    page = metrics_page.PAGE.read_text()
    assert metrics_page.filled(page) == page, "run tools/metrics_page.py"
    command = [sys.executable, ROOT / "tools" / "metrics_page.py", "--check"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_page_that_says_something_else_is_noticed() -> None:
    page = metrics_page.PAGE.read_text()
    for wrong in (page.replace("requests admitted", "requests"), page.replace("| `resets` |", "| `reset` |")):
        assert wrong != page
        assert metrics_page.filled(wrong) == page
    with pytest.raises(ValueError, match="one table for each of admissions, transfers"):
        metrics_page.filled(page.replace("<!-- table: pool -->", ""))


def test_the_page_has_the_bounds_of_the_histograms() -> None:
    bounds = ", ".join(f"{bound:g}" for bound in LATENCY_BOUNDS_S)
    assert f"buckets, in seconds: {bounds}." in " ".join(metrics_page.PAGE.read_text().split())


# --- the dashboard ----------------------------------------------------------------------------------


def series() -> set[str]:
    """Names as queries have them: a histogram has three."""
    names = {metric.name for metric in METRICS if metric.kind is not Kind.HISTOGRAM}
    for metric in METRICS:
        if metric.kind is Kind.HISTOGRAM:
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return names


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_asks_only_for_what_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    asked = set(
        re.findall(r"\bforebay_\w+", "\n".join([*queries(dashboard), json.dumps(dashboard["templating"])]))
    )
    assert asked
    assert asked <= series()
    # What went wrong is seen by those who look.
    assert {metric.name for metric in METRICS if metric.look} <= asked


def test_the_dashboard_is_what_grafana_imports() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 36
    assert dashboard["id"] is None
    [source, *_] = dashboard["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": f"${{{source['name']}}}"}
        assert panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    places = [(x, y) for panel in panels for x, y in _cells(**panel["gridPos"])]
    assert len(set(places)) == len(places), "panels lie over one another"


def _cells(x: int, y: int, w: int, h: int) -> list[tuple[int, int]]:
    return [(column, row) for column in range(x, x + w) for row in range(y, y + h)]
