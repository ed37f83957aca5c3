"""Amounts as people read and type them, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, name: str) -> str:
    """As `1 block` and `2,600 blocks`: the name is that of one, and its plural ends in s."""
    return f"{number:,} {name}{'' if number == 1 else 's'}"


def shown(num_bytes: int) -> str:
    """In units of 1000, for people."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 1000)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return counted(num_bytes, "byte")


def typed(num_bytes: int) -> str:
    """Not more than that, as a setting."""
    return f"{num_bytes // 10**9}GB" if num_bytes >= 10**9 else f"{max(1, num_bytes // 10**6)}MB"


def percent(share: float) -> str:
    """Never 100 % unless it is all."""
    return f"{share:.0%}".replace("%", " %") if share in (0, 1) else f"{min(share, 0.999):.1%}".replace("%", " %")


def as_columns(table: Sequence[Sequence[str]], *, least: int = 0) -> str:
    """The first column to the left, the others to the right and at least so wide, a line below the first row."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for label, *values in table:
        cells = [label.ljust(widths[0])]
        cells += [value.rjust(max(width, least)) for value, width in zip(values, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
