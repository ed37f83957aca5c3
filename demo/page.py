"""The results as one file for a browser: a table and a chart, nothing that has to be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from demo.results import TITLES, Run, equal_answers, percentile, rows

WIDTH, LEFT, RIGHT = 400, 72, 64  # as wide as a phone: on a larger screen all grows together
BAR, GAP, HEADING, FOOT = 16, 5, 26, 22

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2126; --faint: #5b6670; --line: #d9dee3;
  --none: #8a949e; --eager: #1f6fd0; --lazy: #0f8a6a; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181c; --ink: #e8ecef; --faint: #a3adb6; --line: #333b43;
  --none: #86919b; --eager: #5fa8f5; --lazy: #3fc39a; } }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; }
.big { font-size: 1.15rem; }
.faint { color: var(--faint); font-size: .875rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 0 .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: bottom; }
th:first-child { padding-left: 0; text-align: left; font-weight: normal; }
thead th { font-weight: 600; }
td { white-space: nowrap; }
svg { display: block; width: 100%; max-width: 40rem; height: auto; fill: var(--ink); font-size: 12px; }
svg .faint { fill: var(--faint); font-size: 11px; }
svg .turn { font-weight: 600; }
svg .over { paint-order: stroke; stroke: var(--ground); stroke-width: 5px; }
.grid { stroke: var(--line); }
.late { stroke: var(--faint); stroke-width: 1.5; fill: none; }
.none { fill: var(--none); } .eager { fill: var(--eager); } .lazy { fill: var(--lazy); }
@media (max-width: 30rem) { table { font-size: .8125rem; } th, td { padding-left: .4rem; } }
"""


def page(runs: Sequence[Run], workload: str, machine: str) -> str:
    first, *others = runs
    equal = min(equal_answers(run, first) for run in others)
    judgement = "Every answer is the same." if equal == 1 else "<strong>Answers differ, which is a bug.</strong>"
    waits = " or ".join(f"<strong>{_wait(run)}</strong> ({escape(run.name)})" for run in others)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Forebay demo</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Chats that do not fit on the device</h1>
<p class="big">Without offload a repeat turn waits <strong>{_wait(first)}</strong> for its first token,
with Forebay {waits}. {judgement}</p>
<p>{escape(workload)}</p>
<h2>Time to first token, by turn</h2>
{chart(runs)}
<p class="faint">Bars: half of the requests are at least this fast (p50). Thin lines reach to the slowest (p99).
In the first turn everything is new, and nothing can be loaded.</p>
<h2>All numbers</h2>
{_table(rows(runs))}
<p class="faint">{escape(machine)}</p>
</main>
</body>
</html>
"""


def chart(runs: Sequence[Run]) -> str:
    """Lying bars, a group for each turn."""
    turns = sorted({answer.turn for answer in runs[0].answers})
    longest = max(percentile(_of_turn(run, turn), 99) for run in runs for turn in turns)
    scale = (WIDTH - LEFT - RIGHT) / longest
    group = HEADING + len(runs) * (BAR + GAP)
    height = len(turns) * group + FOOT
    parts = [_axis(longest, scale, height)]
    for turn in turns:
        top = turn * group
        said = "everything is new" if turn == 0 else "all but a question was there before"
        parts.append(
            f'<text class="over" x="0" y="{top + 18}"><tspan class="turn">turn {turn + 1}</tspan>'
            f'<tspan class="faint" dx="8">{said}</tspan></text>'
        )
        for number, run in enumerate(runs):
            parts.append(_bar(run, turn, top + HEADING + number * (BAR + GAP), scale))
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Time to first token by turn, for each run">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def _bar(run: Run, turn: int, top: int, scale: float) -> str:
    values = _of_turn(run, turn)
    half, most = percentile(values, 50), percentile(values, 99)
    middle, end = top + BAR / 2, LEFT + most * scale
    return (
        f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{TITLES[run.name]}</text>'
        f'<rect class="{run.name}" x="{LEFT}" y="{top}" width="{half * scale:.1f}" height="{BAR}" rx="2"/>'
        f'<path class="late" d="M{LEFT + half * scale:.1f} {middle}H{end:.1f}m0 -4v8"/>'
        f'<text x="{end + 7:.1f}" y="{middle + 4}">{half * 1000:,.0f} ms</text>'
    )


def _axis(longest: float, scale: float, height: int) -> str:
    step = _round_step(longest)
    lines = []
    for number in range(int(longest / step) + 1):
        x = LEFT + number * step * scale
        lines.append(
            f'<path class="grid" d="M{x:.1f} {HEADING - 4}V{height - FOOT}"/>'
            f'<text class="faint" x="{x:.1f}" y="{height - 7}" text-anchor="middle">{number * step:g} s</text>'
        )
    return "\n".join(lines)


def _round_step(longest: float) -> float:
    """1, 2 or 5 of some unit, so that there are at most five."""
    step = 0.001
    for factor in (2, 2.5, 2) * 6:
        if longest / step <= 5:
            break
        step *= factor
    return round(step, 6)


def _wait(run: Run) -> str:
    return f"{percentile(run.repeat_ttft_s, 50) * 1000:,.0f} ms"


def _of_turn(run: Run, turn: int) -> list[float]:
    return run.ttft_s(lambda each: each == turn)


def _table(table: Sequence[Sequence[str]]) -> str:
    names, *others = table
    lines = ["<table>", "<thead><tr>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in names)]
    lines.append("</tr></thead>\n<tbody>")
    for label, *values in others:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{escape(label)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])
