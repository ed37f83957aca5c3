"""What readings of one server add up to: what was counted lately, when it was not heard of, when it began anew."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.cli.top.reading import Count, EngineId, Numbers, Problem, Reading

WINDOW_S = 60.0
"""What "1 min" and "lately" mean."""


@dataclass(frozen=True, slots=True)
class Counted:
    """What was counted in some time. Without seconds, as since the start of a server, there are no rates."""

    counts: Mapping[Count, float] = field(default_factory=dict)
    seconds: float = 0.0

    def rate(self, key: str) -> float | None:
        return self.counts.get(key, 0.0) / self.seconds if self.seconds > 0 else None

    def hit_share(self) -> float | None:
        """Of the prompt tokens that the device did not have. None if there were none."""
        return share(self.counts.get("hit_tokens", 0.0), self.counts.get("miss_tokens", 0.0))

    def quantile(self, key: str, which: float) -> float | None:
        """Of a histogram, estimated as Prometheus does it: values lie evenly in a bucket. None without values."""
        buckets = sorted(
            (name[1], count) for name, count in self.counts.items() if isinstance(name, tuple) and name[0] == key
        )
        whole = buckets[-1][1] if buckets else 0.0
        if not whole > 0:
            return None
        low, below = 0.0, 0.0
        for bound, count in buckets:
            if count >= which * whole and count > below:
                # Above all bounds nothing is known but that it is above them.
                return (
                    low if math.isinf(bound) else low + (bound - low) * (which * whole - below) / (count - below)
                )
            low, below = bound, max(below, count)
        return low


def share(part: float, rest: float) -> float | None:
    return part / (part + rest) if part + rest > 0 else None


class Step(NamedTuple):
    """From one reading to the next."""

    start_s: float
    end_s: float
    increases: Mapping[EngineId, Mapping[Count, float]]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def added(many: Iterable[Mapping[Count, float]]) -> dict[Count, float]:
    total: dict[Count, float] = {}
    for each in many:
        for key, value in each.items():
            total[key] = total.get(key, 0.0) + value
    return total


class History:
    """Of one server. Between a problem and the next reading nothing is known, and nothing is made up: what was
    counted meanwhile is in no rate."""

    def __init__(self) -> None:
        self.reading: Reading | None = None
        """The last one. It stays when the server goes."""
        self.problem: Problem | None = None
        """Why the last scrape brought none."""
        self.problem_since_s = 0.0
        self.restarted_s: float | None = None
        """When it was first seen to have begun anew."""
        self._steps: deque[Step] = deque()
        self._last: Step | None = None
        self._grown_s: dict[tuple[EngineId, Count], float] = {}

    def fail(self, problem: Problem) -> None:
        if self.problem is None:
            self.problem_since_s = problem.at_s
        self.problem = problem

    def add(self, reading: Reading) -> Step | None:
        """The step that it ends, if it follows a reading without a gap."""
        before, after_gap = self.reading, self.problem is not None
        self.reading, self.problem = reading, None
        if before is None or reading.at_s <= before.at_s:
            return None
        anew = _began_anew(before, reading)
        if anew:
            self.restarted_s = reading.at_s
        increases = {
            engine: _increases(None if anew else before.engines.get(engine), numbers)
            for engine, numbers in reading.engines.items()
        }
        for engine, each in increases.items():
            self._grown_s.update(((engine, key), reading.at_s) for key, value in each.items() if value > 0)
        while self._steps and self._steps[0].end_s <= reading.at_s - WINDOW_S:
            self._steps.popleft()
        self._last = None if after_gap else Step(before.at_s, reading.at_s, increases)
        if self._last:
            self._steps.append(self._last)
        return self._last

    def grew_lately(self, key: str, now_s: float, engine: EngineId | None = None) -> bool:
        """Whether it was seen to grow; also across a gap, and by a server that has begun anew."""
        engines = self.reading.engines if self.reading else ()
        return any(
            now_s - self._grown_s.get((each, key), -math.inf) < WINDOW_S
            for each in engines
            if engine is None or each == engine
        )

    def now(self, engine: EngineId | None = None) -> Counted:
        """What the last step has counted, of all engines or of one. Nothing while the server is not heard of."""
        return _counted([self._last] if self._last and not self.problem else [], engine)

    def lately(self, now_s: float, engine: EngineId | None = None) -> Counted:
        if self.reading and not self.problem:
            now_s = self.reading.at_s  # with long intervals, the last step counts until the next
        return _counted([step for step in self._steps if step.end_s > now_s - WINDOW_S], engine)

    def total(self, engine: EngineId | None = None) -> Counted:
        """Since the server's start."""
        engines = self.reading.engines if self.reading else {}
        return Counted(added(each.counters for each in _chosen(engines, engine)))

    def gauges(self, engine: EngineId | None = None) -> dict[str, float]:
        engines = self.reading.engines if self.reading else {}
        gauges: dict[str, float] = {}
        for numbers in _chosen(engines, engine):
            for key, value in numbers.gauges.items():
                gauges[key] = gauges.get(key, 0.0) + value
        return gauges


def _chosen(engines: Mapping[EngineId, Numbers], engine: EngineId | None) -> list[Numbers]:
    return [numbers for each, numbers in engines.items() if engine is None or each == engine]


def _counted(steps: list[Step], engine: EngineId | None) -> Counted:
    increases = (
        counts for step in steps for each, counts in step.increases.items() if engine is None or each == engine
    )
    return Counted(added(increases), sum(step.seconds for step in steps))


def _began_anew(before: Reading, after: Reading) -> bool:
    """One counter that went down says it for all of them: others may have passed their old value again."""
    if None not in (before.started_at, after.started_at) and before.started_at != after.started_at:
        return True
    return any(
        value < numbers.counters[key]
        for engine, numbers in before.engines.items()
        if engine in after.engines
        for key, value in after.engines[engine].counters.items()
        if key in numbers.counters
    )


def _increases(before: Numbers | None, after: Numbers) -> dict[Count, float]:
    """An engine that was not there before has counted since it is there."""
    earlier = before.counters if before else {}
    return {key: max(0.0, value - earlier.get(key, 0.0)) for key, value in after.counters.items()}
