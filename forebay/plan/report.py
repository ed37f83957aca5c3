"""Everything that is told about a plan: to a terminal, as JSON or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.plan.advice import WORTH, Advice, Choice
from forebay.plan.results import Curve, Replay


@dataclass(frozen=True, slots=True)
class Totals:
    """What a trace holds."""

    name: str
    block_tokens: int
    requests: int
    input_tokens: int
    output_tokens: int
    longest_tokens: int
    """Of one request, in and out."""
    duration_s: float
    """0 if it has no times."""
    skipped_lines: int = 0
    notes: Sequence[str] = ()
    """What it was taken for, in words."""
    dropped_requests: int = 0
    """That a recording says it has not got."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What the trace is planned for."""

    model: str
    model_assumed: bool
    kv_bytes_per_token: int
    """Of all ranks together."""
    ranks: int
    device_blocks: int
    """Blocks of the trace that the device pool holds."""
    device_assumed: bool
    prefill_tokens_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Report:
    totals: Totals
    engine: Engine
    curve: Curve
    bound: Curve | None
    """Belady's."""
    advice: Advice
    sizes: Sequence[int]
    """Host memory that was looked at, in bytes, growing."""
    sizes_asked: bool
    """Whether the user named them."""
    replays: Sequence[Replay]
    """Of each size, in the order in which modes and policies were asked for. Empty for a curve only."""
    without: Replay | None = None
    """The device alone."""

    @property
    def block_bytes(self) -> int:
        return self.totals.block_tokens * self.engine.kv_bytes_per_token

    @property
    def device_bytes(self) -> int:
        return self.engine.device_blocks * self.block_bytes

    def of_size(self, num_bytes: int) -> list[Replay]:
        return [each for each in self.replays if each.host_bytes == num_bytes]

    def pays(self, choice: Choice) -> bool:
        """Whether a replay with this much or more finds a point more than one without. True if there is none."""
        run = self.best(choice)
        if run is None or self.without is None or run.host_bytes < choice.num_bytes:
            return True
        return run.hit_share - self.without.hit_share >= WORTH

    def best(self, choice: Choice) -> Replay | None:
        """The replay of this size, or of the next one that was asked for. Of several, the mode and policy named
        first stay unless others find a point more."""
        size = next((size for size in self.sizes if size >= choice.num_bytes), max(self.sizes, default=0))
        replays = self.of_size(size)
        if not replays:
            return None
        first, most = replays[0], max(replays, key=lambda each: each.hit_share)
        return most if most.hit_share - first.hit_share >= WORTH else first
