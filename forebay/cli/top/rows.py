"""The numbers of a server that move: what each was, and how its chart is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.amounts import percent
from forebay.cli.top import units
from forebay.cli.top.canvas import Ink
from forebay.cli.top.timeline import Column
from forebay.cli.top.view import Summary

NEEDED = ("hit share", "to host", "to device", "evictions")
WANTED = ("requests", "load p99", "store p99", "hit tokens")
"""Where there is room, in this order."""
WITHOUT_CHART = ("store p99", "load p99")


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    now: str
    lately: str
    total: str
    values: Sequence[float | None] = ()
    """For a chart; none of a row that has no chart."""
    top: float = 0.0
    """The end of the chart's scale, or 0 if it is to be found."""
    form: Callable[[float], str] = percent
    ink: Ink = Ink.CHART


def rows(summary: Summary, columns: Sequence[Column], none: str) -> list[Row]:
    """In the order in which they are shown. `none` stands for what is not known."""
    spans = (summary.now, summary.lately, summary.total)

    def rate(label: str, key: str, form: Callable[[float], str], whole: Callable[[float], str]) -> Row:
        now, lately = (units.shown(each.rate(key), form, none) for each in spans[:2])
        total = whole(summary.total.counts.get(key, 0.0))
        return Row(label, now, lately, total, [column.rate(key) for column in columns], 0.0, form)

    def latency(label: str, key: str) -> Row:
        now, lately, total = (units.shown(each.quantile(key, 0.99), units.duration, none) for each in spans)
        return Row(label, now, lately, total)

    shares = [units.shown(each.hit_share(), percent, none) for each in spans]
    of_columns = [column.hit_share() for column in columns]
    return [
        Row("hit share", shares[0], shares[1], shares[2], of_columns, 1.0, ink=Ink.GOOD),
        rate("hit tokens", "hit_tokens", units.per_second, units.count),
        rate("to host", "stored_bytes", units.bytes_per_second, units.size),
        rate("to device", "loaded_bytes", units.bytes_per_second, units.size),
        rate("evictions", "evictions", units.per_second, units.count),
        rate("requests", "lookups", units.per_second, units.count),
        latency("store p99", "store_latency_s"),
        latency("load p99", "load_latency_s"),
    ]


@dataclass(frozen=True, slots=True)
class Number:
    """A column of numbers beside the labels."""

    title: str
    of: Callable[[Row], str]
    from_width: int
    """Of the screen. On a narrower one it is left out."""
    ink: Ink


NUMBERS = (
    Number("now", lambda row: row.now, 0, Ink.STRONG),
    Number("1 min", lambda row: row.lately, 56, Ink.PLAIN),
    Number("total", lambda row: row.total, 72, Ink.QUIET),
)
NUMBERS_OF_A_SNAPSHOT = (NUMBERS[0], NUMBERS[2])  # of which the last minute is no more than now
