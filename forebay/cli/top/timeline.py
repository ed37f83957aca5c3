"""The past of one server, in columns of equal time: what charts are drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from forebay.cli.top.history import Step, added, share

CHARTED = ("hit_tokens", "miss_tokens", "stored_bytes", "loaded_bytes", "evictions", "lookups")
COLUMNS = 400
"""How many are kept."""


@dataclass(slots=True)
class Column:
    seconds: float = 0.0
    """How much of its time was seen."""
    counts: dict[str, float] = field(default_factory=dict)

    def rate(self, key: str) -> float | None:
        return self.counts.get(key, 0.0) / self.seconds if self.seconds > 0 else None

    def hit_share(self) -> float | None:
        return share(self.counts.get("hit_tokens", 0.0), self.counts.get("miss_tokens", 0.0))


_UNSEEN = Column()


class Timeline:
    """Columns begin at multiples of `column_s`, so that one that has passed stays as it is. A step's counts are
    spread evenly over its time; what nobody has seen is in no column."""

    def __init__(self, column_s: float) -> None:
        self.column_s = column_s
        self._columns: dict[int, Column] = {}
        self._last = 0

    def add(self, step: Step) -> None:
        counts = added(step.increases.values())
        self._last = self._index(step.end_s)
        # All that is older than the columns that are kept is not worth a column.
        for index in range(max(self._index(step.start_s), self._last - COLUMNS + 1), self._last + 1):
            start = max(step.start_s, index * self.column_s)
            seconds = min(step.end_s, (index + 1) * self.column_s) - start
            if seconds > 0:
                column = self._columns.setdefault(index, Column())
                column.seconds += seconds
                for key in CHARTED:
                    part = counts.get(key, 0.0) * seconds / step.seconds
                    column.counts[key] = column.counts.get(key, 0.0) + part
        for index in [index for index in self._columns if index <= self._last - COLUMNS]:
            del self._columns[index]

    def until(self, now_s: float) -> list[Column]:
        """As many as are kept, oldest first; the last one has this moment in it."""
        last = self._index(now_s)
        return [self._columns.get(index, _UNSEEN) for index in range(last - COLUMNS + 1, last + 1)]

    def _index(self, at_s: float) -> int:
        return math.floor(at_s / self.column_s)
