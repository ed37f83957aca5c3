"""The manager's counters, step by step, through vLLM's own stats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from forebay.manager import OffloadManager
from forebay.stats import Histogram

_GAUGES = frozenset({"slots", "slots_ready", "slots_free", "slots_filling", "slots_cached", "slots_pinned"})


@dataclass
class ForebayStats(KVConnectorStats):
    """`data` has what was counted since the last time, and gauges as they are."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> ForebayStats:
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class StatsTaker:
    """Remembers what was counted already."""

    def __init__(self) -> None:
        self._before: dict[str, int | float] = {}

    def take(self, manager: OffloadManager) -> ForebayStats:
        """Empty unless something was counted since: engines step thousands of times without any of this."""
        now = _counters(manager)
        counted = {name: value - self._before.get(name, 0) for name, value in now.items()}
        self._before = now
        data: dict[str, Any] = {name: value for name, value in counted.items() if value}
        if data:
            pool = manager.pool
            data |= {
                "slots": pool.capacity,
                "slots_ready": pool.ready,
                "slots_free": pool.free,
                "slots_filling": pool.filling,
                "slots_cached": pool.cached,
                "slots_pinned": pool.pinned,
            }
        return ForebayStats(data=data)


def _counters(manager: OffloadManager) -> dict[str, int | float]:
    stats, counters = manager.stats, {}
    for name in stats.__slots__:
        value = getattr(stats, name)
        if isinstance(value, Histogram):
            counters[f"{name}_sum"] = value.total
            counters[f"{name}_count"] = value.count
        else:
            counters[name] = value
    counters["evictions"] = manager.pool.evictions
    return counters
