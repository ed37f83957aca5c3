"""A real Prometheus scrapes a real server, and every question of the dashboard has an answer."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forebay.metrics import METRICS, Kind
from tests.test_metrics import DASHBOARD, queries
from tests.vllm.checkpoint import save_checkpoint
from tests.vllm.prometheus import Prometheus
from tests.vllm.server import Server, wait_for
from tools import install_prometheus

pytestmark = pytest.mark.timeout(600)  # a server takes 40 s to start on two cores that have nothing else to do

BLOCK_TOKENS = 32
BLOCK_BYTES = 4 * BLOCK_TOKENS * 2 * 4 * 32 * 4  # layers, tokens, K and V, heads, dim, float32
SLOTS = 100
ARGUMENTS = (
    *("--served-model-name", "small", "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "1000", "--max-num-seqs", "4", "--block-size", str(BLOCK_TOKENS)),
    *("--num-gpu-blocks-override", "40", "--shutdown-timeout", "20"),
)
OFFLOAD = {"cpu_bytes_to_use": SLOTS * BLOCK_BYTES}
PROMPT_TOKENS = 600
RATE_INTERVAL_S = 10
MOVE = {  # the panels that cannot be 0 all the time, whatever they ask
    *("Occupancy", "Hit share, by tokens", "Tokens", "Bytes per second", "Bytes per second of a transfer"),
    *("Store latency", "Load latency", "Host memory ready"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "small")


def _ask(server: Server, name: str) -> None:
    """Another name, another prompt, from the first token on."""
    body = {"model": "small", "prompt": f"{name} " + "x" * PROMPT_TOKENS, "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["choices"]


def push_out_and_come_back(server: Server) -> None:
    """Two prompts fill the device, five the host. What was pushed out comes back; later some leave the host."""
    for name in "abcaabcdefgh":
        _ask(server, name)


@dataclass(frozen=True)
class Scraped:
    server: Server
    prometheus: Prometheus
    since: float


@pytest.fixture(scope="module")
def program() -> Path:
    found = install_prometheus.installed()
    if found is None and not install_prometheus.can_be_had():
        pytest.skip("there is no Prometheus, and no Debian package of it can be had here: there is no apt-get")
    assert found, "there is no Prometheus: run tools/install_prometheus.py, as make test does"
    return found


@pytest.fixture(scope="module")
def scraped(model: str, program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    with ExitStack() as stack:
        server = stack.enter_context(Server(model, tmp_path_factory.mktemp("server"), *ARGUMENTS, offload=OFFLOAD))
        server.wait_until_ready()
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = stack.enter_context(Prometheus(program, folder, f"127.0.0.1:{server.port}"))
        prometheus.wait_until_ready()
        wait_for(lambda: prometheus.now("forebay_lookups_total") == [0], 30, "the first scrape", prometheus.log)
        since = time.time()
        push_out_and_come_back(server)
        wait_for(lambda: server.metric("forebay_slots_filling") == 0, 30, "the last store", server.log)
        counters = [metric.name for metric in METRICS if metric.kind is Kind.COUNTER]
        wait_for(
            lambda: all(prometheus.now(name) == [server.metric(name)] for name in counters),
            30,
            "the last scrape",
            prometheus.log,
        )
        yield Scraped(server, prometheus, since)


def test_the_numbers_are_those_of_what_happened(scraped: Scraped) -> None:
    value = scraped.server.metric
    assert value("forebay_lookups_total") == 12
    assert value("forebay_hit_tokens_total") == value("vllm:external_prefix_cache_hits_total") > 0
    assert value("forebay_loaded_bytes_total") == value("forebay_loaded_blocks_total") * BLOCK_BYTES > 0
    assert value("forebay_stored_bytes_total") == value("forebay_stored_blocks_total") * BLOCK_BYTES > 0
    assert value("forebay_evictions_total") > 0
    assert value("forebay_slots") == value("forebay_slots_ready") == SLOTS
    assert value("forebay_host_capacity_bytes") == value("forebay_host_ready_bytes") == SLOTS * BLOCK_BYTES
    states = [value(f"forebay_slots_{state}") for state in ("free", "filling", "cached")]
    assert sum(states) == SLOTS
    assert states[2] > 0.8 * SLOTS
    for direction in ("store", "load"):
        name = f"forebay_{direction}_latency_seconds"
        assert value(f"{name}_count") > 0
        assert 0 < value(f"{name}_sum") < 60
    [line] = scraped.server.lines("forebay: slots=")
    given = f"slots={SLOTS} bytes_per_rank={SLOTS * BLOCK_BYTES} ranks=1"
    assert line.endswith(f"forebay: {given} mode=eager policy=lru verify=all layout=engine")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_prometheus_has_what_the_server_shows(scraped: Scraped, metric: Any) -> None:
    parts = ("_sum", "_count", "_bucket") if metric.kind is Kind.HISTOGRAM else ("",)
    for part in parts:
        query = f'{metric.name}{part}{{job="vllm", model_name="small", engine="0"}}'
        found = scraped.prometheus.now(query)
        assert found, query
        assert sum(found) == pytest.approx(scraped.server.metric(f"{metric.name}{part}")), query


def _panels() -> list[Any]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [pytest.param(panel, id=panel["title"]) for panel in dashboard["panels"]]


@pytest.mark.parametrize("panel", _panels())
def test_every_question_of_the_dashboard_has_an_answer(scraped: Scraped, panel: dict[str, Any]) -> None:
    asked = [_substituted(query) for query in queries({"panels": [panel]})]
    assert asked
    for query in asked:
        found = scraped.prometheus.since(scraped.since, query)
        assert found, query
        assert max(found) > 0 or panel["title"] not in MOVE, query


def test_panels_that_move_are_there() -> None:
    assert {panel.id for panel in _panels()} > MOVE


def test_the_dashboard_can_choose_a_model(scraped: Scraped) -> None:
    [_, model] = json.loads(DASHBOARD.read_text())["templating"]["list"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", model["query"]["query"])
    assert found
    assert scraped.prometheus.label_values(found[2], found[1]) == ["small"]


def _substituted(query: str) -> str:
    """As Grafana does it, with all models chosen, of which there is one."""
    query = query.replace("$__rate_interval", f"{RATE_INTERVAL_S}s").replace("$model", "(small)")
    assert "$" not in query, query
    return query


def test_servers_with_two_frontends_or_without_stats(model: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    with ExitStack() as stack:
        two, silent = (
            stack.enter_context(
                Server(model, tmp_path_factory.mktemp("server"), *ARGUMENTS, *more, offload=OFFLOAD)
            )
            for more in (("--api-server-count", "2"), ("--disable-log-stats",))
        )
        for server in (two, silent):
            server.wait_until_ready()
            push_out_and_come_back(server)
            _ask(server, "a")
        assert silent.metric("forebay_lookups_total") == 0
        # Whichever of the two is asked, and whichever of them was told of a step.
        for _ in range(5):
            assert two.metric("forebay_lookups_total") == 13
            assert (
                two.metric("forebay_hit_tokens_total") == two.metric("vllm:external_prefix_cache_hits_total") > 0
            )
            assert two.metric("forebay_slots") == SLOTS
            assert two.metric("forebay_load_latency_seconds_count") > 0
