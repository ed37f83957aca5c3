"""What the planner finds out, before it is a table, JSON or a page."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Curve:
    """Share of blocks found, by the size of one cache in blocks of the trace."""

    name: str
    """"lru", or "best possible" for Belady's bound."""
    sizes: Sequence[int]
    """In blocks, growing."""
    hit_share: Sequence[float]
    """Of all blocks asked for, one for each size."""
    sampled: float
    """1.0 if exact, else the share of blocks that were looked at in the end."""
    unbounded_share: float
    num_blocks: int
    """Asked for in all."""
    distinct_blocks: int
    """An estimate if sampled."""

    def share_at(self, blocks: int) -> float:
        """What a cache of this size finds. Between two sizes of the curve it is that of the smaller."""
        number = bisect_right(self.sizes, blocks)
        return self.hit_share[number - 1] if number else 0.0

    def size_for(self, share: float) -> int | None:
        """The smallest size that finds so much; None if none does."""
        return next((size for size, found in zip(self.sizes, self.hit_share, strict=True) if found >= share), None)


@dataclass(frozen=True, slots=True)
class Moment:
    """A part of the trace, for hits over time."""

    time_s: float
    """When it begins."""
    input_tokens: int
    device_tokens: int
    host_tokens: int
    occupied_slots: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Speed:
    """What the given speeds make of a replay."""

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_p50_without_s: float
    """Without any host memory."""
    ttft_p99_without_s: float
    bus_busy_share: float
    """Of the time in which requests came; above 1 the bus does not keep up."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One run of the whole trace through the real manager."""

    mode: str
    policy: str
    device_blocks: int
    slots: int
    host_bytes: int
    requests: int
    input_tokens: int
    device_tokens: int
    """Found on the device."""
    host_tokens: int
    """Loaded from the host."""
    bytes_loaded: int
    bytes_stored: int
    evictions: int
    occupied_slots: int
    """At the end."""
    moments: Sequence[Moment] = field(default=())
    speed: Speed | None = None
    refused: int = 0
    """Of the requests: longer than the device. Their tokens are not counted."""

    @property
    def computed_tokens(self) -> int:
        return self.input_tokens - self.device_tokens - self.host_tokens

    @property
    def host_share(self) -> float:
        return self.host_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def hit_share(self) -> float:
        return 1 - self.computed_tokens / self.input_tokens if self.input_tokens else 0.0
