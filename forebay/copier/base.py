"""What moves the bytes on one rank."""

from __future__ import annotations

from typing import Protocol

from forebay.transfers import CopyOrder, Report


class Copier(Protocol):
    """One per rank. The manager never sees it: orders come from Step, reports go to OffloadManager.report().

    Every order submitted is reported exactly once, done or failed, whatever happens to the thread or the device
    that copies. "Done" means that every byte is where it belongs; "failed" that the copier will not read or write
    the memory of that order any more.
    """

    def submit(self, order: CopyOrder) -> None:
        """Start copying; returns without waiting for bytes. Stores read what was on the device when the step that
        ordered them began; loads write only after everything that could still read the old content has ended.
        The moves of an order read their source before anything of the same order is written."""

    def poll(self) -> list[Report]:
        """What has ended since the last call."""

    def close(self) -> None:
        """Wait for the bytes on their way and let go of the memory. May be called twice."""
