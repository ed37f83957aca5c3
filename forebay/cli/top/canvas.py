"""A screen of cells. Whatever is put on it, no line becomes wider than the screen."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import Enum, auto


class Ink(Enum):
    """What a text is to the reader."""

    PLAIN = auto()
    STRONG = auto()
    QUIET = auto()
    CHART = auto()
    GOOD = auto()
    NOTICE = auto()
    TROUBLE = auto()


class Style(Enum):
    """How inks are told apart."""

    NONE = auto()
    MONO = auto()
    COLOUR = auto()


# The codes that a terminal is given. What has none looks like plain text.
_SHADES = {Ink.STRONG: "1", Ink.QUIET: "2", Ink.NOTICE: "1", Ink.TROUBLE: "1"}
_COLOURS = {Ink.CHART: "36", Ink.GOOD: "32", Ink.NOTICE: "33", Ink.TROUBLE: "1;31"}
_CODES: dict[Style, dict[Ink, str]] = {
    Style.NONE: {},
    Style.MONO: _SHADES,
    Style.COLOUR: _SHADES | _COLOURS,
}


@dataclass(frozen=True, slots=True)
class Look:
    """What the terminal can show."""

    style: Style = Style.COLOUR
    unicode: bool = True

    @property
    def levels(self) -> str:
        """Of a chart, from nothing to a whole cell."""
        return "▁▂▃▄▅▆▇█" if self.unicode else "_.-:=+*#"

    @property
    def pool(self) -> str:
        """Cached, filling, free, not ready."""
        return "█▓░ " if self.unicode else "#+. "

    @property
    def none(self) -> str:
        return "\u2013" if self.unicode else "-"

    @property
    def cut(self) -> str:
        return "…" if self.unicode else "~"

    @property
    def unknown(self) -> str:
        """The ground of a chart, where nothing is known."""
        return "·" if self.unicode else " "

    @property
    def rule(self) -> str:
        return "─" if self.unicode else "-"


# Marks and signs that terminals draw over, beside or not at all, each in its own way. And what is no character.
_UNSAFE = {"Cc", "Cf", "Cn", "Co", "Cs", "Mc", "Me", "Mn", "Zl", "Zp"}
_OTHER_HALF = ""
"""Of a wide character: the cell behind it."""


def clean(text: str, look: Look) -> str:
    """Text of others, of which every character takes one cell or two."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if _is_safe(each) and (look.unicode or each.isascii()) else "?"
        for each in unicodedata.normalize("NFC", text)
    )


def _is_safe(character: str) -> bool:
    # Right-to-left letters are turned around by some terminals, together with what is next to them.
    turned = unicodedata.bidirectional(character) in ("R", "AL", "AN")
    return not turned and unicodedata.category(character) not in _UNSAFE


def cells(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width(text: str) -> int:
    return len(text) if text.isascii() else sum(map(cells, text))


def cut(text: str, most: int, look: Look) -> str:
    """Not wider than `most`, with a mark where something is missing."""
    if width(text) <= most:
        return text
    kept, used = [], 0
    for each in text:
        used += cells(each)
        if used > most - 1:
            break
        kept.append(each)
    return ("".join(kept) + look.cut)[: max(0, most)]


class Canvas:
    def __init__(self, width: int, height: int, look: Look) -> None:
        self.width = width
        self.height = height
        self.bottom = height
        """The line from which on nothing is put."""
        self.look = look
        self._rows: list[list[tuple[str, Ink]]] = [[(" ", Ink.PLAIN)] * width for _ in range(height)]

    def put(self, x: int, y: int, text: str, ink: Ink = Ink.PLAIN) -> int:
        """Writes over what is there. What does not fit is left out. Returns where the text ends."""
        for character in clean(text, self.look):
            room = cells(character)
            if 0 <= y < self.bottom and x >= 0 and x + room <= self.width:
                row = self._rows[y]
                self._break(row, x, x + room)
                row[x] = (character, ink)
                if room == 2:
                    row[x + 1] = (_OTHER_HALF, ink)
            x += room
        return x

    def put_right(self, x: int, y: int, text: str, ink: Ink = Ink.PLAIN) -> None:
        """So that it ends before `x`."""
        text = clean(text, self.look)
        self.put(x - width(text), y, text, ink)

    def lines(self) -> list[str]:
        return [self._line(row) for row in self._rows]

    def _break(self, row: list[tuple[str, Ink]], start: int, end: int) -> None:
        """Half of a wide character cannot stay."""
        if row[start][0] == _OTHER_HALF:
            row[start - 1] = (" ", Ink.PLAIN)
        if end < self.width and row[end][0] == _OTHER_HALF:
            row[end] = (" ", Ink.PLAIN)

    def _line(self, row: list[tuple[str, Ink]]) -> str:
        codes = _CODES[self.look.style]
        last = max((x for x, (character, _) in enumerate(row) if character != " "), default=-1)
        parts, before = [], ""
        for character, ink in row[: last + 1]:
            code = codes.get(ink, "")
            if code != before and character != " ":  # a blank looks the same in every ink
                parts.append(f"\033[0;{code}m" if code else "\033[0m")
                before = code
            parts.append(character)
        return "".join(parts) + ("\033[0m" if before else "")
