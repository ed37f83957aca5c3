"""What the manager tells others: counters, events for routers, and a few lines in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from forebay.events import Cleared, Event, Removed, Stored
from forebay.ids import Key
from forebay.stats import Stats
from forebay.transfers import Direction, Late, Report, State, Transfer

logger = logging.getLogger("forebay")


class Journal:
    def __init__(self, bytes_per_block: int, *, events_on: bool) -> None:
        self.stats = Stats()
        self.events_on = events_on
        self._bytes_per_block = bytes_per_block
        self._events: list[Event] = []
        self._warned: set[str] = set()

    # --- events ------------------------------------------------------------------------------------

    def stored(self, events: Sequence[Stored]) -> None:
        self._events += events

    def removed(self, keys: Sequence[Key]) -> None:
        if keys and self.events_on:
            self._events.append(Removed(keys))

    def cleared(self) -> None:
        """Everything is gone, also what was announced but not fetched yet."""
        self.stats.resets += 1
        self._events = [Cleared()] if self.events_on else []

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    # --- counters ----------------------------------------------------------------------------------

    def ended(self, transfer: Transfer, took_s: float) -> None:
        stats, blocks = self.stats, len(transfer.order.slots)
        match transfer.direction, transfer.state:
            case Direction.STORE, State.DONE:
                stats.stored_blocks += blocks
                stats.stored_bytes += blocks * self._bytes_per_block
                stats.store_latency_s.observe(took_s)
            case Direction.LOAD, State.DONE:
                stats.loaded_blocks += blocks
                stats.loaded_bytes += blocks * self._bytes_per_block
                stats.load_latency_s.observe(took_s)
            case Direction.STORE, State.FAILED:
                stats.store_failures += 1
            case Direction.LOAD, State.FAILED:
                stats.load_failures += 1

    def ignored(self, report: Report, why: Late) -> None:
        if why in (Late.UNKNOWN_TRANSFER, Late.UNKNOWN_RANK):
            self.stats.unknown_reports += 1
        else:
            self.stats.late_reports += 1
        self.warn_once(
            why.value,
            f"a report was ignored: {why.value} (transfer {report.transfer_id}, rank {report.rank})",
        )

    def mismatch(self, report: Report) -> None:
        self.stats.checksum_mismatches += 1
        self.warn_once(
            "mismatch",
            f"a load was refused: its bytes on rank {report.rank} are not those that were stored under its keys "
            f"(transfer {report.transfer_id})",
        )

    def overdue(self, transfer: Transfer) -> None:
        self.stats.overdue_transfers += 1
        ranks = ", ".join(map(str, sorted(transfer.waiting_on)))
        self.warn_once(
            f"overdue {transfer.direction.value}",
            f"a {transfer.direction.value} has passed its deadline without a report from rank {ranks}; "
            f"its memory stays reserved",
        )

    def warn_once(self, kind: str, message: str) -> None:
        """A fault that repeats a thousand times a second is counted a thousand times and logged once."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("%s (counted from now on, not logged again)", message)
