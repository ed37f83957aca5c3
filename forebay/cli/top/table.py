"""Servers, or the engines of one, below each other: a line each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from forebay.amounts import percent
from forebay.cli.top import units
from forebay.cli.top.canvas import Canvas, Ink, cut, width
from forebay.cli.top.view import Alarm, ServerView, Summary

INKS = {Alarm.NONE: Ink.PLAIN, Alarm.NOTICE: Ink.NOTICE, Alarm.TROUBLE: Ink.TROUBLE}
SLOW_S = 3.0
"""After which it is said that a scrape has not been answered."""
_MARK = 2
_GAP = 2
_TROUBLE = len("trouble")
_NAMES = range(20, 41)
"""How wide their column may be where there is room."""


@dataclass(frozen=True, slots=True)
class _Column:
    title: str
    width: int
    from_width: int
    """Of the screen. On a narrower one it is left out."""
    value: Callable[[Summary], float | None]
    form: Callable[[float], str]


_COLUMNS = (
    _Column("pool", 8, 0, lambda of: of.cached, percent),
    _Column("hits", 8, 0, lambda of: of.lately.hit_share(), percent),
    _Column("to host", 11, 56, lambda of: of.now.rate("stored_bytes"), units.bytes_per_second),
    _Column("to device", 11, 56, lambda of: of.now.rate("loaded_bytes"), units.bytes_per_second),
    _Column("evictions", 11, 72, lambda of: of.now.rate("evictions"), units.per_second),
)


class Table:
    """Where its columns are on a screen."""

    def __init__(self, canvas: Canvas, names: Iterable[str]) -> None:
        self._canvas = canvas
        self._columns = [column for column in _COLUMNS if canvas.width >= column.from_width]
        taken = _MARK + sum(column.width for column in self._columns)
        longest = max(width(name) for name in names) + _GAP
        self._name = min(max(longest, _NAMES[0]), _NAMES[-1], canvas.width - taken - _GAP - _TROUBLE)
        self._first = _MARK + self._name
        self._trouble = taken + self._name + _GAP

    def head(self, y: int, title: str) -> None:
        self._put_name(y, title, Ink.QUIET)
        x = self._first
        for column in self._columns:
            x += column.width
            self._canvas.put_right(x, y, column.title, Ink.QUIET)
        self._canvas.put(self._trouble, y, "trouble", Ink.QUIET)

    def server(self, y: int, view: ServerView, selected: bool) -> None:
        canvas = self._canvas
        if selected:
            canvas.put(0, y, "▸" if canvas.look.unicode else ">", Ink.STRONG)
        self._put_name(y, view.name, Ink.STRONG if selected else Ink.PLAIN)
        said, ink = state(view)
        if view.whole is None or view.problem:
            canvas.put(self._first + 2, y, cut(said, canvas.width - self._first - 2, canvas.look), ink)
        else:
            self._numbers(y, view.whole, said)

    def engine(self, y: int, name: str, summary: Summary) -> None:
        self._put_name(y, name, Ink.PLAIN)
        self._numbers(y, summary, "")

    def _put_name(self, y: int, name: str, ink: Ink) -> None:
        self._canvas.put(_MARK, y, cut(name, self._name - 1, self._canvas.look), ink)

    def _numbers(self, y: int, summary: Summary, said: str) -> None:
        canvas, x = self._canvas, self._first
        for column in self._columns:
            x += column.width
            value = column.value(summary)
            canvas.put_right(x, y, units.shown(value, column.form, canvas.look.none), _ink(value))
        room = canvas.width - self._trouble
        if said:
            canvas.put(self._trouble, y, said if len(said) <= room else "slow", Ink.NOTICE)
        elif summary.worst is Alarm.NONE:
            canvas.put(self._trouble, y, "ok", Ink.QUIET)
        else:
            canvas.put(self._trouble, y, cut(_alarms(summary, room), room, canvas.look), INKS[summary.worst])


def state(view: ServerView) -> tuple[str, Ink]:
    """What is to be said of a server that does not answer as it should, or nothing."""
    if view.problem:
        kind = "no metrics" if view.problem.answered else "down"
        how_long = f" for {units.ago(view.problem_s)}" if view.problem_s >= 1 else ""
        return f"{kind}{how_long}: {view.problem.text}", Ink.TROUBLE
    if view.waiting_s >= SLOW_S:
        return f"no answer for {units.ago(view.waiting_s)}", Ink.NOTICE
    return ("asked, no answer yet", Ink.QUIET) if view.whole is None else ("", Ink.PLAIN)


def _ink(value: float | None) -> Ink:
    """Nothing is quiet."""
    return Ink.PLAIN if value else Ink.QUIET


def _alarms(summary: Summary, room: int) -> str:
    """Each by its name, as many as there is room for; or how many there were in all."""
    worst = {
        key: summary.total.counts.get(key, 0.0) for key, alarm in summary.alarms.items() if alarm is summary.worst
    }
    text, *more = (f"{units.short(value)} {key.replace('_', ' ')}" for key, value in worst.items())
    if len(text) + 2 > room:
        return f"! {units.short(sum(worst.values()))}"
    for each in more:
        if len(text) + len(each) + 4 <= room:
            text += f", {each}"
    return f"! {text}"
