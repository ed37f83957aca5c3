"""The report for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace

from forebay.amounts import as_columns, percent, shown
from forebay.plan import words
from forebay.plan.report import Report
from forebay.plan.results import Replay

_COLUMNS = 100


def as_text(report: Report) -> str:
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    yield from _wrapped(f"{report.totals.name}: {words.totals(report)}")
    yield from _wrapped(f"model:  {words.model(report)}{_say(report.engine.model_assumed, '--model')}")
    yield from _wrapped(f"device: {words.device(report)}{_say(report.engine.device_assumed, '--device-memory')}")
    for line in words.guesses(report):
        yield from _wrapped(line)
    yield ""
    if report.sizes:
        yield as_columns(_marked(report))
        yield ""
    yield from _wrapped(words.headline(report))
    for line in words.remarks(report):
        yield from _wrapped(line)
    choice = report.advice.recommended
    if choice is not None:
        yield from ("", f"    {words.pasted(report, choice)}", "")
    if (second := words.second(report)) is not None:
        yield from _wrapped(second)
    if (other := words.other_choice(report)) is not None:
        yield from ("", f"    {words.pasted(report, other)}")


def _marked(report: Report) -> list[list[str]]:
    """The table, and which of its sizes are worth naming."""
    table = rows(report, whole=False)
    marks = {words.memory(choice.num_bytes): f"<- {name:<6}" for name, choice in report.advice.named.items()}
    return [[*row, marks.get(row[0], "")] for row in table]


def _say(assumed: bool, option: str) -> str:
    return f" (see {option})" if assumed else ""


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _COLUMNS, break_long_words=False, break_on_hyphens=False)


def rows(report: Report, *, whole: bool = True) -> list[list[str]]:
    """Of sizes and what was run with them; the first row has names. Not whole, it fits a terminal."""
    speeds = any(each.speed for each in report.replays)
    names = ["host memory", "slots", "LRU curve"]
    names += ["best possible"] if report.bound is not None else []
    if report.replays:
        names += ["mode", "policy"]
        names += ["on device", "on host", "found", "prefill saved"] if whole else ["on host", "found"]
        names += ["loaded", "stored", *(["evicted"] if whole else [])]
    if speeds:
        names += ["TTFT p50", "p99", "bus"]
    table = [names]
    if report.without is not None:
        begin = ["none", "0", percent(report.advice.device_share)] + ([""] if report.bound is not None else [])
        cells = _replayed(replace(report.without, policy=""), whole=whole, speeds=speeds)
        table.append(begin + cells + [""] * (len(names) - len(begin) - len(cells)))
    for size in report.sizes:
        slots = size // report.block_bytes
        begin = [words.memory(size), f"{slots:,}", percent(report.curve.share_at(slots))]
        begin += [percent(report.bound.share_at(slots))] if report.bound is not None else []
        runs: Sequence[Replay | None] = report.of_size(size) or [None]
        for run in runs:
            cells = [] if run is None else _replayed(run, whole=whole, speeds=speeds)
            table.append(begin + cells + [""] * (len(names) - len(begin) - len(cells)))
            begin = begin if whole else [""] * len(begin)  # said once
    return table


def _replayed(run: Replay, *, whole: bool, speeds: bool) -> list[str]:
    device_share = run.device_tokens / run.input_tokens if run.input_tokens else 0.0
    cells = [run.mode, run.policy, *([percent(device_share)] if whole else [])]
    cells += [percent(run.host_share), percent(run.hit_share)]
    cells += [words.count(run.host_tokens)] if whole else []
    cells += [shown(run.bytes_loaded), shown(run.bytes_stored), *([f"{run.evictions:,}"] if whole else [])]
    if speeds and run.speed is not None:
        busy = run.speed.bus_busy_share
        keeps = f"{percent(busy)} busy" if busy <= 1 else f"too slow, {busy:.1f} x"
        cells += [words.seconds(run.speed.ttft_p50_s), words.seconds(run.speed.ttft_p99_s), keeps]
    return cells
