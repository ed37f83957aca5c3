"""What of a server is shown, by how many lines there are."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.cli.top.rows import NEEDED, WANTED, WITHOUT_CHART

_TALLEST = 8
_FEW_ENGINES = 4


@dataclass(slots=True)
class Plan:
    """The least there is, to begin with: the pool, the rows that are needed, and a line of trouble."""

    titles: bool = False
    """Above the numbers of rows."""
    all_trouble: bool = False
    """Every kind of it, below a title; otherwise one line."""
    gap_before_trouble: bool = False
    gap_before_rows: bool = False
    gap_before_pool: bool = False
    slots: bool = False
    engines: int = 0
    """How many have a line."""
    rows: set[str] = field(default_factory=lambda: set(NEEDED))
    heights: dict[str, int] = field(default_factory=dict)
    """Of rows whose charts are taller than a line. A blank line keeps them from the next."""


def plan(lines: int, *, trouble_lines: int, engines: int, charts: bool) -> Plan:
    """What matters more comes first. `trouble_lines` are those that all of it takes."""
    made = Plan()
    left = lines - 2 - len(made.rows)

    def take(wanted: int) -> bool:
        nonlocal left
        if wanted > left:
            return False
        left -= wanted
        return True

    made.titles = take(1)
    made.all_trouble = take(trouble_lines)  # its title, and one line less than it had
    made.gap_before_trouble = take(1)
    made.gap_before_rows = take(1)
    few = min(engines, _FEW_ENGINES)
    if engines > 1 and take(2 + few):  # a gap and titles
        made.engines = few
    made.slots = take(1)
    made.rows.update(label for label in WANTED if take(1))
    made.gap_before_pool = take(1)
    if made.engines and take(engines - few):
        made.engines = engines
    tall = [label for label in (*NEEDED, *WANTED) if charts and label in made.rows.difference(WITHOUT_CHART)]
    for height in range(2, _TALLEST + 1):
        for label in tall:
            if made.heights.get(label, 1) == height - 1 and take(2 if height == 2 else 1):
                made.heights[label] = height
    return made
