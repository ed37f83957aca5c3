"""What the manager tells others: counters, events for routers, and a few lines in the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.events import Cleared, Event, Removed, Stored
from forebay.ids import Key
from forebay.stats import Stats
from forebay.transfers import Direction, Late, Report, State, Transfer
from forebay.warner import Warner


class Journal:
    def __init__(self, bytes_per_block: int, clock: Callable[[], float], *, events_on: bool) -> None:
        self.stats = Stats()
        self.events_on = events_on
        self._bytes_per_block = bytes_per_block
        self._events: list[Event] = []
        self._warner = Warner(clock)

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

    # --- warnings ----------------------------------------------------------------------------------

    def ignored(self, report: Report, why: Late) -> None:
        if why in (Late.UNKNOWN_TRANSFER, Late.UNKNOWN_RANK):
            self.stats.unknown_reports += 1
        else:
            self.stats.late_reports += 1
        line = "a report was ignored: %s (transfer %s, rank %s)"
        self._warner.warn(why.value, line, why.value, report.transfer_id, report.rank)

    def mismatch(self, report: Report) -> None:
        self.stats.checksum_mismatches += 1
        line = (
            "a load was refused: its bytes on rank %s are not those that were stored under its keys (transfer %s)"
        )
        self._warner.warn("mismatch", line, report.rank, report.transfer_id)

    def overdue(self, transfer: Transfer) -> None:
        self.stats.overdue_transfers += 1
        direction, ranks = transfer.direction.value, ", ".join(map(str, sorted(transfer.waiting_on)))
        line = "a %s has passed its deadline without a report from rank %s; its memory stays reserved"
        self._warner.warn(f"overdue {direction}", line, direction, ranks)

    def refused(self, why: object) -> None:
        self.stats.loads_refused += 1
        self._warner.warn("refused", "a load was refused and is recomputed: %s", why)
