"""Numbers as people read them: three digits and a unit, so that columns stay where they are."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence

_SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))
_COUNTS = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_MOST_WRITTEN_OUT = 99_999.5


def shown(value: float | None, form: Callable[[float], str], none: str) -> str:
    return none if value is None else form(value)


def digits(value: float) -> str:
    """Three of them: 1.23, 12.3, 123."""
    places = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{places}f}"


def size(num_bytes: float) -> str:
    for unit, one in _SIZES:
        if num_bytes >= 0.9995 * one:
            return f"{digits(num_bytes / one)} {unit}"
    return "0 B" if num_bytes <= 0 else "1 B"


def bytes_per_second(number: float) -> str:
    return f"{size(number)}/s"


def count(number: float) -> str:
    """Whole numbers are written out as long as that is short."""
    if number < _MOST_WRITTEN_OUT:
        return f"{number:,.0f}"
    unit, one = next((unit, one) for unit, one in _COUNTS if number >= 0.9995 * one)
    return f"{digits(number / one)} {unit}"


def per_second(number: float) -> str:
    if 0 < number < 99.95:
        return f"{max(number, 0.01):.2f}/s" if number < 9.995 else f"{number:.1f}/s"
    return f"{count(number)}/s"


def duration(seconds: float) -> str:
    """A latency."""
    if seconds < 0.9995:
        return f"{digits(seconds * 1e3)} ms"
    return f"{digits(seconds)} s"


def ago(seconds: float) -> str:
    """How long something has lasted, in its two largest units."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def without_zeros(text: str) -> str:
    """For the ends of scales, which are round: 20 GB/s, not 20.0."""
    return re.sub(r"\.0+(?=\D)", "", text)


def nice(values: Iterable[float | None]) -> float:
    """The least of 1, 2, 5, 10, 20, ... that none of them is above: a scale that changes seldom."""
    most = max((value for value in values if value is not None), default=0.0)
    if not 0 < most < math.inf:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next((power * step for step in (1, 2, 5) if power * step >= most), power * 10)


def chart(values: Sequence[float | None], scale: float, rows: int, levels: str) -> list[str]:
    """The rows of an area, top first. What is not known is blank, 0 the lowest level, and all else above that."""
    most = rows * len(levels)
    heights = [None if each is None else _height(each / scale, most) for each in values]
    return ["".join(_cell(height, row, levels) for height in heights) for row in reversed(range(rows))]


def _height(share: float, most: int) -> int:
    return min(max(round(share * most), 2), most) if share > 0 else 1


def _cell(height: int | None, row: int, levels: str) -> str:
    filled = 0 if height is None else min(max(height - row * len(levels), 0), len(levels))
    return levels[filled - 1] if filled else " "


def short(number: float) -> str:
    """In four cells, up to a million millions."""
    if number < 9_999.5:
        return f"{number:.0f}"
    unit, one = next((unit, one) for unit, one in _COUNTS if number >= 0.9995 * one)
    return f"{number / one:.1f}{unit}" if number < 9.95 * one else f"{number / one:.0f}{unit}"
