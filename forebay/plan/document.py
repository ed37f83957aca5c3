"""The report as JSON. docs/how-much-memory.md names every key; what is there stays as it is."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import asdict
from typing import Any

from forebay.plan import words
from forebay.plan.advice import Choice
from forebay.plan.assumptions import assumptions
from forebay.plan.report import Report
from forebay.plan.results import Curve, Replay

SCHEMA = "forebay-plan/1"
_MOST_POINTS = 2000  # of a curve: more cannot be seen either


def as_document(report: Report) -> dict[str, Any]:
    advice = report.advice
    return {
        "schema": SCHEMA,
        "trace": asdict(report.totals),
        "engine": {
            **asdict(report.engine),
            "block_bytes": report.block_bytes,
            "device_bytes": report.device_bytes,
        },
        "advice": {
            "verdict": advice.verdict.value,
            "words": [words.headline(report), words.target(report), *words.remarks(report)],
            "unbounded_share": report.curve.unbounded_share,
            "device_share": advice.device_share,
            "target_share": advice.target_share,
            "recommended": _choice(report, advice.recommended),
            "knee": _choice(report, advice.knee),
            "target": _choice(report, advice.target),
        },
        "curves": [_curve(each) for each in (report.curve, report.bound) if each is not None],
        "sizes_bytes": list(report.sizes),
        "without": None if report.without is None else _replay(report.without),
        "replays": [_replay(each) for each in report.replays],
        "assumptions": list(assumptions(report)),
    }


def _choice(report: Report, choice: Choice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    return {**asdict(choice), "kv_connector_extra_config": words.extra_config(choice, report.best(choice))}


def _curve(curve: Curve) -> dict[str, Any]:
    sizes, shares = thinned(curve)
    found = {**asdict(curve), "sizes_blocks": sizes, "hit_share": shares}
    del found["sizes"]
    return found


def _replay(replay: Replay) -> dict[str, Any]:
    return {
        **asdict(replay),
        "computed_tokens": replay.computed_tokens,
        "host_share": replay.host_share,
        "hit_share": replay.hit_share,
    }


def thinned(curve: Curve, most: int = _MOST_POINTS) -> tuple[list[int], list[float]]:
    """Sizes and shares, at most so many, evenly on a scale of factors; the first and the last are kept. They are
    sizes of the curve: at others it only knows a smaller one's share."""
    if len(curve.sizes) <= most:
        return list(curve.sizes), list(curve.hit_share)
    first, last = max(1, curve.sizes[0]), curve.sizes[-1]
    wanted = (round(first * (last / first) ** (number / (most - 1))) for number in range(most))
    numbers = sorted({min(bisect_left(curve.sizes, size), len(curve.sizes) - 1) for size in wanted})
    return [curve.sizes[each] for each in numbers], [curve.hit_share[each] for each in numbers]
