"""The results as one file for a browser: a table and a chart, nothing that has to be fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from demo.results import TITLES, Run, equal_answers, percentile, rows
from forebay.page import document, round_step, table

WIDTH, LEFT, RIGHT = 400, 72, 64  # as wide as a phone: on a larger screen all grows together
BAR, GAP, HEADING, FOOT = 16, 5, 26, 22

_STYLE = """
svg .turn { font-weight: 600; }
svg .over { paint-order: stroke; stroke: var(--ground); stroke-width: 5px; }
.late { stroke: var(--faint); stroke-width: 1.5; fill: none; }
.none { fill: var(--none); } .eager { fill: var(--eager); } .lazy { fill: var(--lazy); }
"""


def page(runs: Sequence[Run], workload: str, machine: str) -> str:
    first, *others = runs
    equal = min(equal_answers(run, first) for run in others)
    judgement = "Every answer is the same." if equal == 1 else "<strong>Answers differ, which is a bug.</strong>"
    waits = " or ".join(f"<strong>{_wait(run)}</strong> ({escape(run.name)})" for run in others)
    body = f"""<h1>Chats that do not fit on the device</h1>
<p class="big">Without offload a repeat turn waits <strong>{_wait(first)}</strong> for its first token,
with Forebay {waits}. {judgement}</p>
<p>{escape(workload)}</p>
<h2>Time to first token, by turn</h2>
{chart(runs)}
<p class="faint">Bars: half of the requests are at least this fast (p50). Thin lines reach to the slowest (p99).
In the first turn everything is new, and nothing can be loaded.</p>
<h2>All numbers</h2>
{table(rows(runs))}
<p class="faint">{escape(machine)}</p>"""
    return document("Forebay demo", body, _STYLE)


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
    step = round_step(longest)
    lines = []
    for number in range(int(longest / step) + 1):
        x = LEFT + number * step * scale
        lines.append(
            f'<path class="grid" d="M{x:.1f} {HEADING - 4}V{height - FOOT}"/>'
            f'<text class="faint" x="{x:.1f}" y="{height - 7}" text-anchor="middle">{number * step:g} s</text>'
        )
    return "\n".join(lines)


def _wait(run: Run) -> str:
    return f"{percentile(run.repeat_ttft_s, 50) * 1000:,.0f} ms"


def _of_turn(run: Run, turn: int) -> list[float]:
    return run.ttft_s(lambda each: each == turn)
