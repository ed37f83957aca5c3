"""What given speeds make of a replay: a simple queue, not a measurement.

One server computes prompts in the order in which they came, at a steady speed. Before its turn, a request's blocks
come over the bus, which also serves one after another, at its own speed, and which nothing else slows down.
Answers cost nothing. So it shows what saved prefill and a slow bus do to waiting times, and neither batching nor
decoding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import ceil, floor, inf, log

from forebay.errors import ConfigError

_BASE = 1.01  # waiting times are kept within a percent
_SHORTEST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Speeds:
    prefill_tokens_per_s: float
    bus_bytes_per_s: float = inf
    """Of one rank, in each direction."""

    def __post_init__(self) -> None:
        for setting in ("prefill_tokens_per_s", "bus_bytes_per_s"):
            if not getattr(self, setting) > 0:
                raise ConfigError(setting, getattr(self, setting), "a number above 0")


class Queue:
    """The server, the bus, and how long everybody waited for the first token."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._server_free_s = self._bus_free_s = 0.0
        self._waits: Counter[int] = Counter()  # by the exponent of _BASE

    def add(self, time_s: float, computed_tokens: int, loaded_bytes: int) -> None:
        """The next request."""
        ready_s = time_s
        if loaded_bytes:
            self._bus_free_s = max(self._bus_free_s, time_s) + loaded_bytes / self._speeds.bus_bytes_per_s
            ready_s = self._bus_free_s
        done_s = max(self._server_free_s, ready_s) + computed_tokens / self._speeds.prefill_tokens_per_s
        self._server_free_s = done_s
        self._waits[floor(log(max(_SHORTEST_S, done_s - time_s), _BASE))] += 1

    def ttft_s(self, share: float) -> float:
        """So many of all requests had their first token by then."""
        left = max(1, ceil(share * self._waits.total()))
        for exponent in sorted(self._waits):
            left -= self._waits[exponent]
            if left <= 0:
                return float(_BASE ** (exponent + 0.5))
        return 0.0
