"""The manager's counters, step by step, through vLLM's own stats."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from forebay.manager import OffloadManager
from forebay.metrics import BY_KEY, METRICS, Kind

_READ = tuple((metric.key, attrgetter(metric.source)) for metric in METRICS if metric.source is not None)
_HISTOGRAMS = tuple(metric.key for metric in METRICS if metric.kind is Kind.HISTOGRAM)
_glance = attrgetter(
    "predicted",
    *(
        f"{metric.source}.total" if metric.kind is Kind.HISTOGRAM else metric.source
        for metric in METRICS
        if metric.source is not None and not metric.source.startswith("predicted.")
    ),
)
"""All that can change, at the price of one call."""


@dataclass
class ForebayStats(KVConnectorStats):
    """`data` has what was counted since the last time, and gauges as they are. All of it is numbers, but for
    histograms: `{"counts": [...], "sum": ...}`. It goes from process to process, so it is plain."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        for key, value in other.data.items():
            before = self.data.get(key)
            if before is None or BY_KEY[key].kind is Kind.GAUGE:
                self.data[key] = value
            elif BY_KEY[key].kind is Kind.HISTOGRAM:
                counts = [one + more for one, more in zip(before["counts"], value["counts"], strict=True)]
                self.data[key] = {"counts": counts, "sum": before["sum"] + value["sum"]}
            else:
                self.data[key] = before + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log: of a histogram, how many and their sum."""
        numbers: dict[str, int | float] = {}
        for key, value in self.data.items():
            if isinstance(value, dict):
                numbers[f"{key}_sum"] = value["sum"]
                numbers[f"{key}_count"] = sum(value["counts"])
            else:
                numbers[key] = value
        return numbers

    def is_empty(self) -> bool:
        return not self.data


class AdapterView(NamedTuple):
    """What the manager does not know."""

    slot_bytes: int
    """Of one slot, on all ranks together."""
    requests_loading: int
    ranks: int


class _Counts(NamedTuple):
    counts: tuple[int, ...]
    total: float

    def since(self, before: _Counts) -> dict[str, Any] | None:
        if self.counts == before.counts:
            return None
        counts = [now - then for now, then in zip(self.counts, before.counts, strict=True)]
        return {"counts": counts, "sum": self.total - before.total}


class StatsTaker:
    """Remembers what was counted already."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._glance: tuple[Any, ...] = ()

    def take(self, manager: OffloadManager, adapter: AdapterView) -> ForebayStats:
        """Empty unless something has changed: engines step thousands of times without any of this."""
        glance = (adapter, _glance(manager))
        if glance == self._glance:
            return ForebayStats(data={})
        before, now = self._before, _values(manager, adapter)
        data: dict[str, Any] = {}
        for key, value in now.items():
            if BY_KEY[key].kind is Kind.GAUGE:
                counted = value
            elif isinstance(value, _Counts):
                counted = value.since(before.get(key, _Counts((0,) * len(value.counts), 0.0)))
            else:
                counted = value - before.get(key, 0) or None
            if counted is not None:
                data[key] = counted
        self._before, self._glance = now, glance
        return ForebayStats(data=data)


def _values(manager: OffloadManager, adapter: AdapterView) -> dict[str, Any]:
    values = {key: read(manager) for key, read in _READ}
    for key in _HISTOGRAMS:
        values[key] = _Counts(tuple(values[key].counts), values[key].total)
    # The manager counts bytes of one rank, as the engine told it; ranks may differ, and do not copy padding.
    for blocks, of_all_ranks in (("stored_blocks", "stored_bytes"), ("loaded_blocks", "loaded_bytes")):
        values[of_all_ranks] = values[blocks] * adapter.slot_bytes
    values["host_capacity_bytes"] = manager.pool.capacity * adapter.slot_bytes
    values["host_ready_bytes"] = manager.pool.ready * adapter.slot_bytes
    values["requests_loading"] = adapter.requests_loading
    values["ranks"] = adapter.ranks
    return values
