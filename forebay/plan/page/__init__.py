"""The report as one page for a browser. It opens offline: nothing is fetched, and no script runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from forebay.amounts import percent
from forebay.page import document, table
from forebay.plan import words
from forebay.plan.assumptions import assumptions
from forebay.plan.document import thinned
from forebay.plan.page import curve, hits, svg
from forebay.plan.page.style import STYLE
from forebay.plan.report import Report
from forebay.plan.results import Replay
from forebay.plan.text import rows

__all__ = ["page"]

# Drawn twice, for a phone and for a screen; the style shows one of them. Letters keep their size that way.
_NARROW, _WIDE = 368, 1120
_TABLE_POINTS = 24


def page(report: Report) -> str:
    title = f"How much host memory? {report.totals.name}"
    return document(title, "\n".join(_sections(report)), STYLE)


def _sections(report: Report) -> Iterator[str]:
    yield "<h1>How much host memory?</h1>"
    yield f'<p class="faint"><strong>{escape(report.totals.name)}</strong>: {escape(words.totals(report))}.</p>'
    yield from _answer(report)
    yield "<h2>What each size finds</h2>"
    yield from _legend(report)
    yield curve.chart(report, svg.Frame(_WIDE, 400), "wide")
    yield curve.chart(report, svg.Frame(_NARROW, 340), "narrow")
    yield _details("The curve as a table", table(_points(report)))
    chosen = report.advice.recommended
    run = report.best(chosen) if chosen is not None else next(reversed(report.replays), None)
    if run is not None and run.moments:
        yield from _over_time(report, run)
    if report.sizes:
        yield from _what_if(report)
    yield "<h2>What this rests on</h2>"
    yield "<ul>" + "".join(f"<li>{_options(escape(each))}</li>" for each in assumptions(report)) + "</ul>"


def _answer(report: Report) -> Iterator[str]:
    advice = report.advice
    yield f'<p class="big">{escape(words.headline(report))}</p>'
    yield from _tiles(report)
    lines = list(words.remarks(report))
    if advice.recommended is not None:
        yield _pasted(words.pasted(report, advice.recommended))
    if (second := words.second(report)) is not None:
        lines.append(second)
    yield from (f"<p>{escape(line)}</p>" for line in lines)
    if (other := words.other_choice(report)) is not None:
        yield _pasted(words.pasted(report, other))


def _pasted(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def _tiles(report: Report) -> Iterator[str]:
    advice, curve = report.advice, report.curve
    tiles = [("the device alone", percent(advice.device_share), words.memory(report.device_bytes))]
    names = {"knee": "the knee", "target": words.target_name(report)}
    for name, choice in advice.named.items():
        tiles.append((names[name], percent(choice.hit_share), words.memory(choice.num_bytes)))
    everything = words.memory(curve.distinct_blocks * report.block_bytes)
    tiles.append(("without bounds", percent(curve.unbounded_share), f"{everything} in all"))
    inside = "".join(
        f"<div><dt>{escape(name)}</dt><dd><strong>{share}</strong> of blocks</dd><dd>{size}</dd></div>"
        for name, share, size in tiles
    )
    yield f'<dl class="tiles">{inside}</dl>'


def _legend(report: Report) -> Iterator[str]:
    sampled = "" if report.curve.sampled == 1 else ", sampled"
    items = [_key('<path class="lru" d="M0 8H26"/>', f"one cache, least recently used{sampled}")]
    if report.bound is not None:
        items.append(_key('<path class="bound" d="M0 8H26"/>', "best possible"))
    runs = {(each.mode, each.policy): None for each in report.replays}
    items += [_key(svg.mark(13, 8, mode, policy), f"replayed: {mode}, {policy}") for mode, policy in runs]
    yield f'<ul class="legend">{"".join(items)}</ul>'


def _key(drawing: str, name: str) -> str:
    return f'<li><svg viewBox="0 0 26 16" aria-hidden="true">{drawing}</svg>{escape(name)}</li>'


def _points(report: Report) -> list[list[str]]:
    # Where both curves are known. The bound has fewer sizes than the other, and all of its sizes are there too.
    sizes, _ = thinned(report.curve if report.bound is None else report.bound, _TABLE_POINTS)
    names = ["host memory", "slots", "LRU"] + (["best possible"] if report.bound is not None else [])
    table = [names]
    for size in sizes:
        row = [words.memory(size * report.block_bytes), f"{size:,}", percent(report.curve.share_at(size))]
        table.append(row + ([percent(report.bound.share_at(size))] if report.bound is not None else []))
    return table


def _over_time(report: Report, run: Replay) -> Iterator[str]:
    yield "<h2>Hits over time</h2>"
    with_what = f"With {words.memory(run.host_bytes)}, {run.mode} and {run.policy}, of the tokens asked for."
    yield f'<p class="faint">{escape(with_what)}</p>'
    items = [
        _key('<rect class="on-device" width="26" height="12" y="2"/>', "found on the device"),
        _key('<rect class="on-host" width="26" height="12" y="2"/>', "found on the host"),
        _key('<path class="filled" d="M0 8H26"/>', "slots in use"),
    ]
    yield f'<ul class="legend">{"".join(items)}</ul>'
    duration = report.totals.duration_s
    yield hits.chart(run, duration, svg.Frame(_WIDE, 280, bottom=44), "wide")
    yield hits.chart(run, duration, svg.Frame(_NARROW, 240, bottom=44), "narrow")
    lines = [["begins", "tokens asked for", "on device", "on host", "slots in use", "evicted"]]
    for each in run.moments:
        asked = max(1, each.input_tokens)
        shares = [percent(each.device_tokens / asked), percent(each.host_tokens / asked)]
        counts = [f"{each.occupied_slots:,}", f"{each.evictions:,}"]
        lines.append([words.duration(each.time_s), f"{each.input_tokens:,}", *shares, *counts])
    yield _details("Hits over time as a table", table(lines))


def _what_if(report: Report) -> Iterator[str]:
    yield "<h2>What if</h2>"
    chosen = report.advice.recommended
    lines = rows(report)
    marked = {number for number, row in enumerate(lines) if chosen and row[0] == words.memory(chosen.num_bytes)}
    yield _scroll("What if", table(lines, marked))
    if report.replays:
        yield (
            '<p class="faint">Found: tokens of prompts that need not be computed, on the device or on the host. '
            "Prefill saved: tokens that come from the host. Loaded and stored: bytes from the host to the device, "
            "and back.</p>"
        )


def _options(text: str) -> str:
    """Names of options are not broken at the end of a line."""
    return re.sub(r"--[a-z-]+", r"<code>\g<0></code>", text)


def _details(name: str, inside: str) -> str:
    return f"<details><summary>{escape(name)}</summary>{_scroll(name, inside)}</details>"


def _scroll(name: str, inside: str) -> str:
    """What may be wider than the page, and is reached with keys too."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{inside}</div>'
