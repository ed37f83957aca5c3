"""Without a screen: one snapshot, the same as JSON, or a line for every answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from time import localtime, monotonic, strftime
from typing import Any

from forebay.cli.top.board import Board, Watched
from forebay.cli.top.canvas import Canvas, Look, clean
from forebay.cli.top.detail import Detail
from forebay.cli.top.scrape import Address, Scrapers
from forebay.cli.top.table import Table, state
from forebay.cli.top.view import ServerView, Summary

_LINES = 60
"""More than any server needs, but for its engines."""


def once(addresses: Sequence[Address], interval_s: float, look: Look, columns: int, *, as_json: bool) -> int:
    """Rates need two readings, an interval apart. Who has a problem is not asked again."""
    board = Board(addresses, interval_s)
    answers = [0] * len(addresses)
    with Scrapers(addresses, interval_s) as scrapers:
        while not all(map(_is_done, board.servers, answers)):
            answer = scrapers.answers.get()
            if not _is_done(board.servers[answer.server], answers[answer.server]):
                board.take(answer)
                answers[answer.server] += 1
    now_s = monotonic()
    if as_json:
        print(json.dumps([_object(server, now_s) for server in board.servers], indent=1))
    else:
        views = [server.view(now_s) for server in board.servers if server.history.problem is None]
        print("\n\n".join(_snapshot(view, look, columns) for view in views), end="\n" if views else "")
    problems = [(server.address, problem) for server in board.servers if (problem := server.history.problem)]
    for address, problem in problems:
        print(clean(f"forebay top: {address.url}: {problem}", look), file=sys.stderr)
    return 1 if problems else 0


def _is_done(server: Watched, answers: int) -> bool:
    return answers >= 2 or server.history.problem is not None


def lines(addresses: Sequence[Address], interval_s: float, look: Look, columns: int) -> int:
    """Until somebody ends it."""
    board = Board(addresses, interval_s)
    stamp = len("00:00:00 ")
    names = [address.name for address in addresses]
    head = Canvas(columns - stamp, 1, look)
    Table(head, names).head(0, "server")
    print(" " * stamp + head.lines()[0], flush=True)
    with Scrapers(addresses, interval_s) as scrapers:
        while True:
            answer = scrapers.answers.get()
            board.take(answer)
            view = board.servers[answer.server].view(monotonic())
            canvas = Canvas(columns - stamp, 1, look)
            Table(canvas, names).server(0, view, selected=False)
            # Nothing is left out of a line that nobody can make wider.
            line = f"  {clean(f'{view.name}  {state(view)[0]}', look)}" if view.problem else canvas.lines()[0]
            print(f"{strftime('%H:%M:%S', localtime())} {line}", flush=True)


def _snapshot(view: ServerView, look: Look, columns: int) -> str:
    canvas = Canvas(columns, _LINES + len(view.engines), look)
    Detail(canvas, view, column_s=0.0, charts=False).draw(0, canvas.height)
    return "\n".join(canvas.lines()).rstrip("\n")


def _object(server: Watched, now_s: float) -> dict[str, Any]:
    view, reading, problem = server.view(now_s), server.history.reading, server.history.problem
    status = "up" if problem is None else "no-metrics" if problem.answered else "down"
    found: dict[str, Any] = {"url": server.address.url, "status": status}
    found["problem"] = None if problem is None else problem.text
    if view.whole is not None and reading is not None:
        found["uptime_s"] = view.uptime_s
        found |= _summary(view.whole)
        found["engines"] = [
            {"model_name": engine.model, "engine": engine.engine, **_summary(summary)}
            for engine, summary in view.engines
        ]
    return found


def _summary(summary: Summary) -> dict[str, Any]:
    now = summary.now
    return {
        "occupancy": summary.cached,
        "seconds": now.seconds,
        "hit_share": now.hit_share(),
        "requests_per_s": now.rate("lookups"),
        "hit_tokens_per_s": now.rate("hit_tokens"),
        "stored_bytes_per_s": now.rate("stored_bytes"),
        "loaded_bytes_per_s": now.rate("loaded_bytes"),
        "evictions_per_s": now.rate("evictions"),
        "store_latency_p99_s": now.quantile("store_latency_s", 0.99),
        "load_latency_p99_s": now.quantile("load_latency_s", 0.99),
        "counters": {key: _whole(value) for key, value in summary.total.counts.items() if isinstance(key, str)},
        "gauges": {key: _whole(value) for key, value in summary.gauges.items()},
    }


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value
