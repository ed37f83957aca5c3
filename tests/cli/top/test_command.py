"""The command without a screen: once, as JSON, line by line; and what it says of a wrong command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.builders import ROOT, forebay
from tests.cli.top.fake import GAUGES, FakeServer, engine_lines, page

FAST = ("--interval", "0.2")
LATENCIES = {"load_latency_s": {0.01: 100}, "store_latency_s": {0.025: 100}}


class Steps:
    """Each scrape finds so much more, in each of two engines."""

    def __init__(self) -> None:
        self._scrapes = 0

    def page(self) -> str:
        self._scrapes += 1
        counters = {"hit_tokens": 300, "miss_tokens": 100, "stored_bytes": 5e8, "loaded_bytes": 2e9, "lookups": 4}
        now = {key: value * self._scrapes for key, value in counters.items()} | {"checksum_mismatches": 2}
        seen = {
            key: {bound: count * self._scrapes for bound, count in counts.items()}
            for key, counts in LATENCIES.items()
        }
        engines = [engine_lines(now, engine=number, latencies=seen) for number in "01"]
        return page(*engines, started_at=1.7e9)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer(Steps().page) as server:
        yield server


@pytest.fixture
def nobody() -> str:
    with FakeServer(lambda: "") as server:
        return server.url


def test_once_prints_what_two_scrapes_say(server: FakeServer) -> None:
    run = forebay("top", "--once", *FAST, server.url)
    assert (run.returncode, run.stderr) == (0, "")
    assert server.scrapes == 2
    assert "\x1b" not in run.stdout
    assert re.search(r"^127\.0\.0\.1:\d+   small   2 engines, 8 ranks +up \d+ d \d+ h$", run.stdout, re.MULTILINE)
    assert re.search(r"^host pool .*72\.3 % +92\.6 GB of 128 GB$", run.stdout, re.MULTILINE)
    assert re.search(r"^hit share +75\.0 % +75\.0 %$", run.stdout, re.MULTILINE)
    assert re.search(r"^to device +\d+\.\d GB/s +8\.00 GB$", run.stdout, re.MULTILINE)
    assert re.search(r"^load p99 +9\.95 ms +9\.95 ms$", run.stdout, re.MULTILINE)
    assert re.search(r"! checksum mismatches +4", run.stdout)
    assert re.search(r"^  1 +72\.3 % +75\.0 %", run.stdout, re.MULTILINE)


def test_a_server_that_cannot_be_read_is_one_line_and_others_are_shown(server: FakeServer, nobody: str) -> None:
    run = forebay("top", "--once", *FAST, nobody, server.url)
    assert run.returncode == 1
    assert run.stderr == f"forebay top: {nobody}/metrics: down: connection refused\n"
    assert "hit share" in run.stdout
    assert nobody.partition("//")[2] not in run.stdout


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("vllm:x 1.0\n", "no metrics: this vLLM runs without Forebay"),
        ("<html>", "no metrics: URL/metrics is not a page of metrics: line 1: "),
        (b"HTTP/1.1 404 \x1b[31mred\r\n\r\n", "no metrics: URL/metrics answers HTTP 404 ?[31mred"),
    ],
)
def test_what_is_not_a_server_with_forebay_is_one_line(answer: str | bytes, said: str) -> None:
    with FakeServer(lambda: answer) as other:
        run = forebay("top", "--once", *FAST, other.url)
        assert (run.returncode, run.stdout) == (1, "")
        assert run.stderr.startswith(f"forebay top: {other.url}/metrics: {said.replace('URL', other.url)}")
        assert run.stderr.count("\n") == 1
        assert other.scrapes == 1, "it was asked again for nothing"


def test_json_has_the_same_for_scripts(server: FakeServer, nobody: str) -> None:
    run = forebay("top", "--json", *FAST, server.url, nobody)
    assert run.returncode == 1
    up, down = json.loads(run.stdout)
    assert down == {"url": f"{nobody}/metrics", "status": "down", "problem": "connection refused"}
    assert (up["url"], up["status"], up["problem"]) == (f"{server.url}/metrics", "up", None)
    assert up["occupancy"] == GAUGES["slots_cached"] / GAUGES["slots"]
    assert up["hit_share"] == 0.75
    assert up["loaded_bytes_per_s"] * up["seconds"] == pytest.approx(4e9)
    assert up["stored_bytes_per_s"] * up["seconds"] == pytest.approx(1e9)
    assert up["load_latency_p99_s"] == pytest.approx(0.00995)
    assert up["counters"]["checksum_mismatches"] == 4
    assert up["gauges"]["ranks"] == 8
    assert [(each["model_name"], each["engine"]) for each in up["engines"]] == [("small", "0"), ("small", "1")]
    assert all(engine["counters"]["loaded_bytes"] == 4e9 for engine in up["engines"])


def test_the_same_server_is_asked_once(server: FakeServer) -> None:
    run = forebay("top", "--json", *FAST, server.url, f"{server.url}/metrics", server.url.partition("//")[2])
    assert len(json.loads(run.stdout)) == 1
    assert server.scrapes == 2


@pytest.fixture
def piped(server: FakeServer, nobody: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "error", "-m", "forebay.cli", "top", *FAST, server.url, nobody]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_where_there_is_no_screen_every_answer_is_a_line(piped: subprocess.Popen[str], nobody: str) -> None:
    assert piped.stdout
    assert piped.stderr
    assert piped.stdout.readline().split() == [
        *("server", "pool", "hits", "to", "host", "to", "device", "evictions", "trouble")
    ]
    lines = [piped.stdout.readline() for _ in range(8)]
    assert all(re.match(r"\d\d:\d\d:\d\d   127\.0\.0\.1:\d+ ", line) for line in lines)
    assert sum(nobody.partition("//")[2] in line and "down" in line for line in lines) > 1
    assert any(re.search(r"72\.3 % +75\.0 % .* GB/s +0/s  ! 4 checksum mismatches$", line) for line in lines)
    piped.send_signal(signal.SIGINT)
    assert piped.wait(30) == 130
    assert piped.stderr.read() == ""


def test_who_reads_may_have_seen_enough(piped: subprocess.Popen[str]) -> None:
    assert piped.stdout
    assert piped.stderr
    piped.stdout.readline()
    piped.stdout.close()
    assert piped.wait(30) == 0
    assert piped.stderr.read() == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: URL (--help lists what there is)"),
        (["ftp://x"], "URL: expected the address of a server, such as http://localhost:8000, got 'ftp://x'"),
        (["x:8000", "--interval", "0"], "argument --interval: expected 0.2 to 3600 seconds, got '0'"),
        (["x:8000", "--interval", "nan"], "argument --interval: expected 0.2 to 3600 seconds, got 'nan'"),
        (["x:8000", "--interval", "2s"], "argument --interval: expected 0.2 to 3600 seconds, got '2s'"),
    ],
)
def test_a_wrong_command_line_is_named_before_anybody_is_asked(arguments: list[str], said: str) -> None:
    run = forebay("top", *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"forebay top: {said}")
    assert run.stderr.count("\n") == 1


def test_it_runs_without_vllm_and_without_prometheus(server: FakeServer) -> None:
    refused = ("vllm", "torch", "numpy", "prometheus_client", "curses", "xxhash")
    assert forebay("top", "--once", *FAST, server.url, without=refused).returncode == 0
