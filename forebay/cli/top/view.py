"""What is known of servers at one moment: all that drawing is given. And what of it is trouble."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from forebay.cli.top.history import Counted, History
from forebay.cli.top.reading import EngineId, Problem
from forebay.cli.top.timeline import Column
from forebay.metrics import METRICS, Section


class Alarm(IntEnum):
    NONE = 0
    NOTICE = 1  # worth a look
    TROUBLE = 2  # something is wrong


# When a counter is an alarm. One that should stay at 0 is one for as long as the server runs; one that should not
# grow is one for a while.
_NEVER = {"checksum_mismatches", "overdue_transfers", "unknown_reports", "late_reports"}
_GROWING = {
    "store_failures": Alarm.TROUBLE,
    "load_failures": Alarm.TROUBLE,
    "recomputes": Alarm.TROUBLE,
    "loads_refused": Alarm.NOTICE,
    "stores_without_room": Alarm.NOTICE,
    "waits_given_up": Alarm.NOTICE,
}
_FIRST = ("store_failures", "load_failures", "checksum_mismatches", "recomputes")
TROUBLE = (
    *_FIRST,
    *(each.key for each in METRICS if each.section is Section.TROUBLE and each.key not in _FIRST),
    "waits_given_up",
)
"""In the order in which it is shown."""


def alarm_of(key: str, total: float, grew_lately: bool) -> Alarm:
    if key in _NEVER:
        return Alarm.TROUBLE if total > 0 else Alarm.NONE
    return _GROWING.get(key, Alarm.NONE) if grew_lately else Alarm.NONE


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a server, or of one of its engines."""

    now: Counted
    lately: Counted
    total: Counted
    gauges: Mapping[str, float]
    alarms: Mapping[str, Alarm]

    @property
    def cached(self) -> float | None:
        """The share of slots whose key can be found. None before the engine's first step."""
        slots = self.gauges.get("slots", 0.0)
        return self.gauges.get("slots_cached", 0.0) / slots if slots > 0 else None

    @property
    def worst(self) -> Alarm:
        return max(self.alarms.values(), default=Alarm.NONE)

    @classmethod
    def of(cls, history: History, now_s: float, engine: EngineId | None = None) -> Summary:
        total = history.total(engine)
        grew = {key: history.grew_lately(key, now_s, engine) for key in TROUBLE}
        if grew["resets"]:
            grew["recomputes"] = False  # somebody asked for them
        alarms = {key: alarm_of(key, total.counts.get(key, 0.0), grew[key]) for key in TROUBLE}
        return cls(history.now(engine), history.lately(now_s, engine), total, history.gauges(engine), alarms)


@dataclass(frozen=True, slots=True)
class ServerView:
    name: str
    problem: Problem | None = None
    problem_s: float = 0.0
    """For how long there was no reading."""
    waiting_s: float = 0.0
    """For how long a scrape has not been answered."""
    whole: Summary | None = None
    """None if there never was a reading."""
    engines: tuple[tuple[EngineId, Summary], ...] = ()
    uptime_s: float | None = None
    restarted_s: float | None = None
    """How long ago it was seen to have begun anew."""
    columns: tuple[Column, ...] = ()
    """For charts, oldest first."""

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(engine.model for engine, _ in self.engines))


@dataclass(frozen=True, slots=True)
class Screen:
    servers: tuple[ServerView, ...]
    selected: int
    interval_s: float
    column_s: float
    clock: str
