"""Warnings that traffic can cause again and again: the first of a kind at once, then at most one in an interval.

A fault that repeats a thousand times a second is counted a thousand times. The log has it once a minute, with how
many there were.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from threading import Lock

logger = logging.getLogger("forebay")

INTERVAL_S = 60.0


class Warner:
    """May be called from any thread. Kinds are few: one for each thing that can go wrong, none for a request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, interval_s: float = INTERVAL_S) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._lock = Lock()
        self._logged_at: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}  # by kind: since its last line

    def warn(self, kind: str, message: str, *values: object, exc_info: bool = False) -> None:
        """Log `message % values`, or count that it was not. A line after a silence says how many it stands for."""
        with self._lock:
            now, before = self._clock(), self._logged_at.get(kind)
            if before is not None and now - before < self._interval_s:
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return
            self._logged_at[kind] = now
            unsaid = self._unsaid.pop(kind, 0)
        if unsaid:
            message, values = f"{message} (and %d more since the last such line)", (*values, unsaid)
        logger.warning(message, *values, exc_info=exc_info)
