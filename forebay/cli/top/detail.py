"""Everything about one server, in as many lines as there are."""

from __future__ import annotations

import re
import textwrap

from forebay.amounts import counted, percent
from forebay.cli.top import units
from forebay.cli.top.canvas import Canvas, Ink, cut, width
from forebay.cli.top.plan import Plan, plan
from forebay.cli.top.rows import NUMBERS, NUMBERS_OF_A_SNAPSHOT, Row, rows
from forebay.cli.top.table import INKS, Table, state
from forebay.cli.top.view import TROUBLE, ServerView, Summary

_LABEL = 11
_NUMBER = 12
_SCALE = 10
_SCALE_FROM = 100
_MOST_SAID = 3
_ITEM = 26
_NEWS_S = 300.0
"""How long it is said that a server has begun anew."""
_BETWEEN = 3


class Detail:
    """Draws it line by line, each below the one before. Without a past, there are no charts."""

    def __init__(self, canvas: Canvas, view: ServerView, column_s: float, *, charts: bool = True) -> None:
        self._canvas = canvas
        self._charts = charts
        self._look = canvas.look
        self._view = view
        self._column_s = column_s
        self._y = 0

    def draw(self, top: int, bottom: int) -> None:
        self._y = top
        self._heading()
        self._state()
        summary = self._view.whole
        if summary is None:
            return
        per_line = max(1, self._canvas.width // _ITEM)
        chosen = plan(
            bottom - self._y,
            trouble_lines=-(-len(TROUBLE) // per_line),
            engines=len(self._view.engines),
            charts=self._charts,
        )
        self._y += chosen.gap_before_pool
        self._pool(summary)
        if chosen.slots:
            self._slots(summary)
        self._y += chosen.gap_before_rows
        self._rows(summary, chosen)
        self._y += chosen.gap_before_trouble
        self._trouble(summary, per_line, whole=chosen.all_trouble)
        if chosen.engines:
            self._y += 1
            self._engines(chosen.engines)

    def _heading(self) -> None:
        view, canvas = self._view, self._canvas
        right, ink = "", Ink.QUIET
        if view.restarted_s is not None and view.restarted_s < _NEWS_S and not view.problem:
            right, ink = f"restarted {units.ago(view.restarted_s)} ago", Ink.NOTICE
        elif view.uptime_s is not None:
            right = f"up {units.ago(view.uptime_s)}"
        room = canvas.width - (width(right) + _BETWEEN if right else 0)
        counts = self._counts()
        x = canvas.put(0, self._y, cut(view.name, room, self._look), Ink.STRONG) + _BETWEEN
        # Names of models are long, and the first to be cut.
        model = cut(", ".join(view.models), room - x - len(counts) - _BETWEEN, self._look)
        if model:
            x = canvas.put(x, self._y, model, Ink.PLAIN) + _BETWEEN
        if x < room:
            canvas.put(x, self._y, cut(counts, room - x, self._look), Ink.QUIET)
        canvas.put_right(canvas.width, self._y, right, ink)
        self._y += 1

    def _counts(self) -> str:
        """How many engines, and how many ranks they have together."""
        view = self._view
        if view.whole is None:
            return ""
        ranks = int(view.whole.gauges.get("ranks", 0))
        engines = counted(len(view.engines), "engine")
        return f"{engines}, {counted(ranks, 'rank')}" if ranks else engines

    def _state(self) -> None:
        text, ink = state(self._view)
        if not text and self._view.whole is not None and self._view.whole.cached is None:
            text, ink = "no step yet: with the first one, the host pool is known", Ink.QUIET
        for line in textwrap.wrap(text, self._canvas.width)[:_MOST_SAID]:
            self._canvas.put(0, self._y, line, ink)
            self._y += 1

    def _pool(self, summary: Summary) -> None:
        canvas, gauges = self._canvas, summary.gauges
        cached = summary.cached
        canvas.put(0, self._y, "host pool", Ink.PLAIN)
        if cached is None:
            canvas.put(_LABEL, self._y, self._look.none, Ink.QUIET)
            self._y += 1
            return
        capacity = gauges.get("host_capacity_bytes", 0.0)
        right = percent(cached).rjust(7)
        if capacity:
            right += f"  {units.size(cached * capacity)} of {units.size(capacity)}".rjust(22)
        room = max(0, canvas.width - _LABEL - 2 - width(right))
        slots = [gauges.get(f"slots_{name}", 0.0) for name in ("cached", "filling", "free")]
        x, sum_so_far = _LABEL, 0.0
        inks = (Ink.CHART, Ink.CHART, Ink.QUIET)
        for number, glyph, ink in zip(slots, self._look.pool, inks, strict=False):
            sum_so_far += number
            end = _LABEL + round(room * min(1.0, sum_so_far / gauges["slots"]))
            canvas.put(x, self._y, glyph * (end - x), ink)
            x = max(x, end)
        canvas.put_right(canvas.width, self._y, right, Ink.PLAIN)
        self._y += 1

    def _slots(self, summary: Summary) -> None:
        gauges = summary.gauges
        names = [("slots", "slots"), ("cached", "slots_cached"), ("filling", "slots_filling")]
        names += [("free", "slots_free"), ("pinned", "slots_pinned")]
        texts = [f"{name} {units.count(gauges.get(key, 0.0))}" for name, key in names]
        if missing := max(0.0, gauges.get("slots", 0.0) - gauges.get("slots_ready", 0.0)):
            texts.append(f"not ready {units.count(missing)}")
        texts.append(f"requests loading {units.count(gauges.get('requests_loading', 0.0))}")
        x = _LABEL
        for text in texts:
            if x + len(text) <= self._canvas.width:
                x = self._canvas.put(x, self._y, text, Ink.QUIET) + 3
        self._y += 1

    def _rows(self, summary: Summary, chosen: Plan) -> None:
        canvas, look = self._canvas, self._look
        there_are = NUMBERS if self._charts else NUMBERS_OF_A_SNAPSHOT
        numbers = [each for each in there_are if canvas.width >= each.from_width]
        x = _LABEL + len(numbers) * _NUMBER + 2
        scale = _SCALE if canvas.width >= _SCALE_FROM else 0
        room = max(0, canvas.width - x - scale) if self._charts else 0
        columns = self._view.columns[-room:] if room else ()
        if chosen.titles:
            for place, each in enumerate(numbers, 1):
                canvas.put_right(_LABEL + place * _NUMBER, self._y, each.title, Ink.QUIET)
            span = f"last {units.ago(room * self._column_s)}" if room else ""
            canvas.put(x, self._y, cut(span, room, look), Ink.QUIET)
            self._y += 1
        for row in rows(summary, columns, look.none):
            if row.label in chosen.rows:
                canvas.put(0, self._y, row.label, Ink.PLAIN)
                for place, each in enumerate(numbers, 1):
                    text = each.of(row)
                    ink = Ink.QUIET if self._view.problem or text == look.none else each.ink
                    canvas.put_right(_LABEL + place * _NUMBER, self._y, text, ink)
                self._chart(row, x, room, chosen.heights.get(row.label, 1), scale)

    def _chart(self, row: Row, x: int, room: int, height: int, scale: int) -> None:
        canvas = self._canvas
        if not row.values or not room:
            self._y += 1
            return
        top = row.top or units.nice(row.values)
        start = x + room - len(row.values)
        canvas.put(x, self._y + height - 1, self._look.unknown * room, Ink.QUIET)
        for offset, text in enumerate(units.chart(row.values, top, height, self._look.levels)):
            for known in re.finditer(r"\S+", text):
                canvas.put(start + known.start(), self._y + offset, known[0], row.ink)
        if scale:
            canvas.put_right(canvas.width, self._y, units.without_zeros(row.form(top)), Ink.QUIET)
            if height > 1:
                canvas.put_right(canvas.width, self._y + height - 1, "0", Ink.QUIET)
        self._y += height + (height > 1)

    def _trouble(self, summary: Summary, per_line: int, *, whole: bool) -> None:
        canvas, keys = self._canvas, list(TROUBLE)
        if whole:
            canvas.put(0, self._y, "trouble since the server's start", Ink.QUIET)
            self._y += 1
        else:
            keys = sorted(keys, key=lambda key: -summary.alarms[key])[:per_line]
        item = canvas.width // per_line
        for index, key in enumerate(keys):
            y, x = self._y + index // per_line, index % per_line * item
            alarm, value = summary.alarms[key], summary.total.counts.get(key, 0.0)
            ink = INKS[alarm] if alarm else Ink.PLAIN if value else Ink.QUIET
            canvas.put(x, y, f"{'!' if alarm else ' '} {key.replace('_', ' ')}", ink)
            canvas.put_right(x + item - 1, y, f" {units.short(value)}", ink)
        self._y += -(-len(keys) // per_line)

    def _engines(self, how_many: int) -> None:
        several, engines = len(self._view.models) > 1, list(self._view.engines)
        title = "engine"
        if how_many < len(engines):
            title = f"{how_many} of {len(engines)} engines"
            engines.sort(key=lambda each: -each[1].worst)  # those left out are well, if any is
        names = [f"{each.engine} {each.model}" if several else each.engine for each, _ in engines]
        table = Table(self._canvas, names)
        table.head(self._y, title)
        for name, (_, summary) in list(zip(names, engines, strict=True))[:how_many]:
            self._y += 1
            table.engine(self._y, name, summary)
