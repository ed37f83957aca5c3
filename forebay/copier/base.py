"""What moves the bytes on one rank."""

from __future__ import annotations

from typing import Protocol

from forebay.transfers import CopyOrder, Report


class Copier(Protocol):
    """One per rank. The manager never sees it: orders come from Step, reports go to OffloadManager.report().

    Every order submitted is reported exactly once, whatever happens to the thread or the device that copies.
    "Done" means that every byte is where it belongs; "failed" that the copier will not read or write the memory of
    that order any more. "Mismatch" is a failure with a cause: the bytes of a load are not those that were stored
    under its keys.
    """

    @property
    def slots(self) -> int:
        """How many this rank has, once all of them are ready."""

    @property
    def ready(self) -> int:
        """Slots 0 to ready - 1 can be copied to and from by now; never shrinks. An order that names another
        fails."""

    def submit(self, order: CopyOrder) -> None:
        """Start copying; returns without waiting for bytes. Stores read what was on the device when the step that
        ordered them began; loads write only after everything that could still read the old content has ended.
        The moves of an order read their source before anything of the same order is written."""

    def poll(self) -> list[Report]:
        """What has ended since the last call."""

    def close(self) -> None:
        """Wait for the bytes on their way and let go of the memory. May be called twice."""
