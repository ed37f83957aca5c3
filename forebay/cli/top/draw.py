"""The whole screen as lines: nothing but what it is given decides how it looks."""

from __future__ import annotations

from forebay.cli.top import units
from forebay.cli.top.canvas import Canvas, Ink, Look, cut
from forebay.cli.top.detail import Detail
from forebay.cli.top.table import Table
from forebay.cli.top.view import Alarm, Screen

_RULE_FROM = 16
"""Lines that a screen must have for one of them to be a rule."""


def frame(screen: Screen, width: int, height: int, look: Look) -> list[str]:
    """At most `height` lines, none wider than `width`. From 40 x 10 on, all that matters is on it."""
    canvas = Canvas(width, height, look)
    _title(canvas, screen)
    top, bottom = 1, height - 1
    if len(screen.servers) > 1:
        top = _servers(canvas, screen, top)
    if height >= _RULE_FROM:
        canvas.put(0, top, look.rule * width, Ink.QUIET)
        top += 1
    canvas.bottom = bottom
    Detail(canvas, screen.servers[screen.selected], screen.column_s).draw(top, bottom)
    canvas.bottom = height
    _footer(canvas, screen)
    return canvas.lines()


def _title(canvas: Canvas, screen: Screen) -> None:
    right = f"every {screen.interval_s:g} s   {screen.clock}"
    x = canvas.put(0, 0, "forebay top", Ink.STRONG) + 3
    many, said = len(screen.servers), []
    up = sum(view.whole is not None and view.problem is None for view in screen.servers)
    if many > 1:
        has_problem = any(view.problem for view in screen.servers)
        text = f"{many} servers up" if up == many else f"{up} of {many} servers up"
        said.append((text, Ink.TROUBLE if has_problem else Ink.QUIET))
    troubled = sum(view.whole is not None and view.whole.worst is Alarm.TROUBLE for view in screen.servers)
    if troubled:
        said.append(("! trouble" if many == 1 else f"! trouble on {troubled}", Ink.TROUBLE))
    for text, ink in said:
        x = canvas.put(x, 0, cut(text, canvas.width - x, canvas.look), ink) + 3
    if x + len(right) <= canvas.width:
        canvas.put_right(canvas.width, 0, right, Ink.QUIET)


def _servers(canvas: Canvas, screen: Screen, top: int) -> int:
    """Around the one that is chosen, if there are more than fit. Returns the line after the last."""
    table, many = Table(canvas, [view.name for view in screen.servers]), len(screen.servers)
    lines = min(many, max(2, (canvas.height - 3) // 3))
    first = min(max(0, screen.selected - lines // 2), many - lines)
    table.head(top, "server" if lines == many else f"{first + 1} to {first + lines} of {many}")
    for offset, view in enumerate(screen.servers[first : first + lines]):
        table.server(top + 1 + offset, view, first + offset == screen.selected)
    return top + 1 + lines


def _footer(canvas: Canvas, screen: Screen) -> None:
    arrows = "↑↓" if canvas.look.unicode else "j k"
    keys = [("q", "quit"), ("z", f"zoom: {units.ago(screen.column_s)} a column")]
    if screen.column_s < 1:
        keys[1] = ("z", f"zoom: {screen.column_s:g} s a column")
    if len(screen.servers) > 1:
        keys.insert(1, (arrows, "server"))
    x, y = 0, canvas.height - 1
    for key, meaning in keys:
        if x + len(key) + len(meaning) + 1 <= canvas.width:
            x = canvas.put(x, y, key, Ink.STRONG) + 1
            x = canvas.put(x, y, cut(meaning, canvas.width - x, canvas.look), Ink.QUIET) + 3
