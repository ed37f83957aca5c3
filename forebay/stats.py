"""What happened, in numbers. Counters only ever grow; gauges are read from the pool when asked for."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields

LATENCY_BOUNDS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)


class Histogram:
    """Counts by upper bound; the last bucket takes what is above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def snapshot(self) -> dict[str, object]:
        return {"bounds": self.bounds, "counts": tuple(self.counts), "sum": self.total}


def _latency() -> Histogram:
    return Histogram(LATENCY_BOUNDS_S)


@dataclass(slots=True)
class Stats:
    # Admissions. A request is counted when the engine admits it, not each time it asks.
    lookups: int = 0
    hit_tokens: int = 0  # had from Forebay: loaded, or moved within the device
    hit_blocks: int = 0
    moved_blocks: int = 0  # of hit_blocks: device → device, bridging a gap
    miss_tokens: int = 0  # neither on the device nor had from Forebay
    miss_blocks: int = 0
    not_yet_answers: int = 0
    waits_given_up: int = 0  # a wait for another copy passed its deadline

    # Transfers that were published, by direction.
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    store_latency_s: Histogram = field(default_factory=_latency)
    load_latency_s: Histogram = field(default_factory=_latency)

    # What did not go as planned.
    store_failures: int = 0
    load_failures: int = 0
    checksum_mismatches: int = 0  # reports of a rank that bytes were not those stored under their key
    loads_refused: int = 0  # the engine accepted a length that cannot be had
    recomputes: int = 0  # requests told to compute what was promised
    abandoned_transfers: int = 0
    overdue_transfers: int = 0
    stores_without_room: int = 0  # blocks left unstored for want of a slot; tried again later
    unknown_reports: int = 0  # reports for a transfer or rank that does not exist
    late_reports: int = 0  # reports for a transfer or rank that had ended already
    resets: int = 0

    def snapshot(self) -> dict[str, object]:
        values: dict[str, object] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            values[each.name] = value.snapshot() if isinstance(value, Histogram) else value
        return values
