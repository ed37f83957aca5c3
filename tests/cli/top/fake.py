"""Pages of metrics made by hand, and a server that shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from forebay.metrics import METRICS, Kind
from forebay.stats import LATENCY_BOUNDS_S

CAPACITY_BYTES = 64e9
SLOTS = 15_625
GAUGES = {
    "slots": SLOTS,
    "slots_ready": SLOTS,
    "slots_free": 4_310,
    "slots_filling": 12,
    "slots_cached": 11_303,
    "slots_pinned": 40,
    "host_capacity_bytes": CAPACITY_BYTES,
    "host_ready_bytes": CAPACITY_BYTES,
    "requests_loading": 2,
    "ranks": 4,
}


def labels(**values: str) -> str:
    escaped = {
        name: value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n") for name, value in values.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in escaped.items())


def engine_lines(
    counters: Mapping[str, float] = {},
    gauges: Mapping[str, float] = GAUGES,
    *,
    model: str = "small",
    engine: str = "0",
    latencies: Mapping[str, Mapping[float, float]] = {},
) -> list[str]:
    """Of one engine, as vLLM has them: every counter, and gauges if there was a step. `latencies` has for a
    histogram how many values each bucket has."""
    lines = []
    here = labels(engine=engine, model_name=model)
    for metric in METRICS:
        if metric.kind is Kind.COUNTER:
            lines.append(f"{metric.name}{{{here}}} {float(counters.get(metric.key, 0))}")
            lines.append(f"{metric.name.removesuffix('_total')}_created{{{here}}} 1.79e+09")
        elif metric.kind is Kind.GAUGE and metric.key in gauges:
            lines.append(f"{metric.name}{{{here}}} {float(gauges[metric.key])}")
        elif metric.kind is Kind.HISTOGRAM:
            values, seen = latencies.get(metric.key, {}), 0.0
            for bound in (*LATENCY_BOUNDS_S, float("inf")):
                seen += values.get(bound, 0.0)
                le = "+Inf" if bound == float("inf") else str(bound)
                lines.append(f'{metric.name}_bucket{{{here},le="{le}"}} {seen}')
            lines.append(f"{metric.name}_count{{{here}}} {seen}")
            lines.append(f"{metric.name}_sum{{{here}}} 1.0")
    return lines


def page(*engines: list[str], started_at: float | None = None) -> str:
    start = [] if started_at is None else [f"process_start_time_seconds {started_at}"]
    rest = ["# HELP vllm:num_requests_running requests", 'vllm:num_requests_running{engine="0"} 1.0']
    return "\n".join([*start, *rest, *(line for lines in engines for line in lines)]) + "\n"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Who asked is gone. That is what tests do."""


class FakeServer:
    """`page` is called for every scrape. An answer may be text, or bytes that are sent as they are."""

    def __init__(self, page: Callable[[], str | bytes], *, port: int = 0) -> None:
        self.scrapes = 0
        self.page = page
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.scrapes += 1
                answer = fake.page() if self.path == "/metrics" else b"HTTP/1.1 404 Not Found\r\n\r\n"
                if isinstance(answer, bytes):
                    self.wfile.write(answer)
                    return
                body = answer.encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Traffic:
    """Counters that grow with time, by so much a second."""

    def __init__(self, **rates: float) -> None:
        self._rates = rates
        self._start = time.monotonic()

    def counters(self) -> dict[str, float]:
        passed = time.monotonic() - self._start
        return {key: float(int(rate * passed)) for key, rate in self._rates.items()}
