"""Times in traces: in which unit, and as text."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from forebay.errors import ConfigError

UNITS: Mapping[str, float] = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NAMES = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
# Times since 1970 lie in these ranges from 1973 to 5138, whatever the unit, and do not overlap.
_SINCE_1970 = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8))


def unit_of(first_time: float, usual: str, given: str | None) -> tuple[str, str]:
    """The unit of a trace's times, and how it is known, in words."""
    if given is not None:
        if given not in UNITS:
            raise ConfigError("time_unit", given, f"one of {', '.join(UNITS)}")
        return given, f"timestamps are in {_NAMES[given]}, as given"
    for unit, least in _SINCE_1970:
        if first_time >= least:
            return unit, f"timestamps are in {_NAMES[unit]} since 1970, by their size"
    return usual, f"timestamps are in {_NAMES[usual]}, as usual for this format"


def seconds_of(text: str) -> float | None:
    """Since 1970, of a date and time in ISO 8601; in UTC if it does not say. None if it is not one."""
    try:
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
