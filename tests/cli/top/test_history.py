"""Rates are of what was counted and seen: not of restarts, not of gaps, and nothing is lost or made up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.cli.top.history import WINDOW_S, Counted, History, Step
from forebay.cli.top.reading import EngineId, Numbers, Problem, Reading
from forebay.cli.top.timeline import COLUMNS, Timeline

ENGINES = [EngineId("small", "0"), EngineId("small", "1")]
KEYS = ("hit_tokens", "stored_bytes")
FIRST = EngineId("small", "0")


def reading(at_s: float, started_at: float | None = None, **counters: float) -> Reading:
    return Reading(at_s, {FIRST: Numbers(dict(counters), {"slots": 10, "slots_cached": 5})}, started_at)


def down(at_s: float) -> Problem:
    return Problem(at_s, "gone", answered=False)


def history_of(*outcomes: Reading | Problem) -> History:
    history = History()
    for outcome in outcomes:
        if isinstance(outcome, Reading):
            history.add(outcome)
        else:
            history.fail(outcome)
    return history


# --- one thing at a time ------------------------------------------------------------------------------


def test_a_rate_is_what_was_counted_by_the_time_it_took() -> None:
    history = history_of(reading(10, lookups=3), reading(12, lookups=9), reading(16, lookups=9))
    assert history.now().rate("lookups") == 0
    assert history.lately(16).rate("lookups") == 1
    assert history.total().counts["lookups"] == 9
    assert history.total().rate("lookups") is None


def test_one_reading_has_no_rates() -> None:
    history = history_of(reading(10, lookups=3))
    assert history.now().rate("lookups") is None
    assert history.lately(10).rate("lookups") is None
    assert not history.grew_lately("lookups", 10)


def test_one_counter_that_went_down_says_that_all_began_anew() -> None:
    history = history_of(reading(10, lookups=9, evictions=1), reading(12, lookups=2, evictions=4))
    assert history.restarted_s == 12
    assert history.now().counts == {"lookups": 2, "evictions": 4}


def test_another_start_of_the_process_is_a_restart_whatever_the_counters_say() -> None:
    history = history_of(reading(10, 100.0, lookups=3), reading(12, 111.0, lookups=5))
    assert history.restarted_s == 12
    assert history.now().counts == {"lookups": 5}
    assert history_of(reading(10, 100.0, lookups=3), reading(12, 100.0, lookups=5)).restarted_s is None


def test_what_was_counted_in_a_gap_is_in_no_rate_but_is_noticed() -> None:
    history = history_of(reading(10, lookups=3), reading(12, lookups=5), down(14), down(16))
    assert history.now().rate("lookups") is None
    assert history.lately(16).rate("lookups") == 1
    assert history.problem_since_s == 14
    history.add(reading(18, lookups=105))
    assert history.problem is None
    assert history.now().rate("lookups") is None
    assert history.lately(18).rate("lookups") == 1
    assert history.grew_lately("lookups", 18)
    history.add(reading(20, lookups=107))
    assert history.now().rate("lookups") == 1


def test_what_is_long_ago_is_not_lately() -> None:
    history = history_of(reading(10, lookups=3), reading(12, lookups=5))
    assert history.grew_lately("lookups", 12 + WINDOW_S - 1)
    assert not history.grew_lately("lookups", 12 + WINDOW_S)
    history.fail(down(14))
    assert history.lately(12 + WINDOW_S).rate("lookups") is None


def test_with_a_long_interval_the_last_step_counts_until_the_next() -> None:
    history = history_of(reading(0, lookups=0), reading(600, lookups=600))
    assert history.lately(1100).rate("lookups") == 1


def test_engines_are_added_up_and_can_be_asked_for_alone() -> None:
    history = History()
    for at_s, factor in ((0.0, 1.0), (2.0, 3.0)):
        numbers = {each: Numbers({"lookups": factor * of}, {"slots": 8}) for of, each in enumerate(ENGINES, 1)}
        history.add(Reading(at_s, numbers))
    assert history.now().rate("lookups") == 3
    assert [history.now(engine).rate("lookups") for engine in ENGINES] == [1, 2]
    assert history.total(ENGINES[1]).counts["lookups"] == 6
    assert history.gauges() == {"slots": 16}
    assert history.gauges(ENGINES[0]) == {"slots": 8}


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert Counted({}, 2.0).hit_share() is None
    assert Counted({"hit_tokens": 0.0, "miss_tokens": 4.0}).hit_share() == 0
    assert Counted({"hit_tokens": 3.0, "miss_tokens": 1.0}).hit_share() == 0.75


def _buckets(**counts: float) -> Counted:
    bounds = {"a": 0.1, "b": 0.2, "c": 0.4, "inf": math.inf}
    cumulative: dict[str | tuple[str, float], float] = {"other": 5.0}
    seen = 0.0
    for name, bound in bounds.items():
        seen += counts.get(name, 0.0)
        cumulative["load_latency_s", bound] = seen
    return Counted(cumulative, 1.0)


@pytest.mark.parametrize(
    ("counted", "which", "expected"),
    [
        (_buckets(), 0.5, None),
        (_buckets(a=10), 0.5, 0.05),
        (_buckets(b=10), 0.5, 0.15),
        (_buckets(a=5, c=5), 0.5, 0.1),
        (_buckets(a=5, c=5), 0.99, 0.396),
        (_buckets(a=1, inf=9), 0.99, 0.4),
    ],
)
def test_quantiles_are_those_of_prometheus(counted: Counted, which: float, expected: float | None) -> None:
    assert counted.quantile("load_latency_s", which) == (None if expected is None else pytest.approx(expected))


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 50)), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_that_has_it(counts: dict[str, int], which: float) -> None:
    bounds = [0.0, 0.1, 0.2, 0.4]
    found = _buckets(**counts).quantile("load_latency_s", which)
    values = sorted(
        bound for name, bound in zip("abc", bounds[1:], strict=True) for _ in range(counts.get(name, 0))
    )
    if not values:
        assert found is None
    else:
        high = values[max(0, math.ceil(which * len(values)) - 1)]
        assert found is not None
        assert bounds[bounds.index(high) - 1] <= found <= high * (1 + 1e-9)


# --- whatever happens to a server -----------------------------------------------------------------------


class WatchedServer(RuleBasedStateMachine):
    """A server that counts, stops, comes back and begins anew, and what is seen of it."""

    tells_its_start = True

    @initialize()
    def start(self) -> None:
        self.history = History()
        self.timelines = [Timeline(column_s) for column_s in (0.7, 2.0, 30.0)]
        self.past: list[dict[int, tuple[float, dict[str, float]]]] = [{} for _ in self.timelines]
        self.now_s = 1000.0
        self.counters: dict[tuple[EngineId, str], float] = {}
        self.unseen: dict[tuple[EngineId, str], float] = {}
        self.seen: dict[str, float] = dict.fromkeys(KEYS, 0.0)
        self.seconds = 0.0
        self.engines = 1
        self.starts = 1
        self.in_gap = True
        self.last_s = 0.0
        self.last: dict[tuple[EngineId, str], float] = {}
        self.gaps: list[tuple[float, float]] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        self.counters = {(engine, key): 0.0 for engine in ENGINES[: self.engines] for key in KEYS}
        self.unseen = dict.fromkeys(self.counters, 0.0)

    @rule(engine=st.sampled_from(ENGINES), key=st.sampled_from(KEYS), amount=st.integers(1, 10**9))
    def count(self, engine: EngineId, key: str, amount: int) -> None:
        if (engine, key) in self.counters:
            self.counters[engine, key] += amount
            self.unseen[engine, key] += amount

    @rule(engines=st.sampled_from([1, 2]))
    def restart(self, engines: int) -> None:
        self.engines = engines
        self.starts += 1
        self.begin_anew()

    @rule(seconds=st.one_of(st.floats(0.1, 5), st.floats(5, 4000)))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule()
    def fail(self) -> None:
        if not self.in_gap:
            self.gaps.append((self.last_s, math.inf))
        self.in_gap = True
        self.history.fail(down(self.now_s))
        assert self.history.now().rate(KEYS[0]) is None

    @rule(seconds=st.floats(0.1, 5))
    def scrape(self, seconds: float) -> None:
        self.now_s += seconds
        numbers = {
            engine: Numbers({key: self.counters[engine, key] for key in KEYS}, {"slots": 10, "slots_cached": 5})
            for engine in ENGINES[: self.engines]
        }
        step = self.history.add(Reading(self.now_s, numbers, float(self.starts) if self.tells_its_start else None))
        assert (step is None) == self.in_gap
        if step:
            self.check_step(step)
            for timeline in self.timelines:
                timeline.add(step)
        elif self.gaps:
            self.gaps[-1] = (self.gaps[-1][0], self.now_s)
        self.in_gap = False
        self.last_s, self.last = self.now_s, dict(self.counters)
        self.unseen = dict.fromkeys(self.counters, 0.0)

    def check_step(self, step: Step) -> None:
        assert (step.start_s, step.end_s) == (self.last_s, self.now_s)
        for (engine, key), unseen in self.unseen.items():
            assert step.increases[engine][key] == unseen
            self.seen[key] += unseen
        self.seconds += step.seconds

    @invariant()
    def nothing_is_negative(self) -> None:
        if not hasattr(self, "history"):
            return
        for counted in (self.history.now(), self.history.lately(self.now_s)):
            for key in KEYS:
                assert (counted.rate(key) or 0.0) >= 0

    @invariant()
    def columns_have_what_was_seen_and_stay_as_they_were(self) -> None:
        if not hasattr(self, "history"):
            return
        for timeline, past in zip(self.timelines, self.past, strict=True):
            columns = timeline.until(self.now_s)
            assert len(columns) == COLUMNS
            first = math.floor(self.now_s / timeline.column_s) - COLUMNS + 1
            seen = {first + index: column for index, column in enumerate(columns) if column.seconds}
            assert all(column.seconds <= timeline.column_s * (1 + 1e-9) for column in seen.values())
            if self.now_s - 1000.0 < timeline.column_s * (COLUMNS - 1):  # all is still there
                assert sum(column.seconds for column in seen.values()) == pytest.approx(self.seconds)
                for key in KEYS:
                    counted = sum(column.counts.get(key, 0.0) for column in seen.values())
                    assert counted == pytest.approx(self.seen[key])
            for start, end in self.gaps:
                low, high = (math.floor(each / timeline.column_s) for each in (start, min(end, self.now_s)))
                assert not any(low < index < high for index in seen), "something was seen in a gap"
            done = math.floor(self.last_s / timeline.column_s)
            now = {index: (column.seconds, dict(column.counts)) for index, column in seen.items() if index < done}
            assert all(now[index] == was for index, was in past.items() if index >= first)
            past.clear()
            past.update(now)


class ServerThatKeepsItsStartToItself(WatchedServer):
    """Then a restart shows in a counter that went down, or not at all."""

    tells_its_start = False

    def check_step(self, step: Step) -> None:
        went_down = any(value < self.last.get(place, 0.0) for place, value in self.counters.items())
        for (engine, key), unseen in self.unseen.items():
            increase = step.increases[engine][key]
            assert 0 <= increase <= unseen
            assert increase == unseen or not went_down
            self.seen[key] += increase
        self.seconds += step.seconds


TestWatchedServer = WatchedServer.TestCase
TestWatchedServer.settings = settings(max_examples=60, stateful_step_count=40)
TestServerThatKeepsItsStartToItself = ServerThatKeepsItsStartToItself.TestCase
TestServerThatKeepsItsStartToItself.settings = settings(max_examples=60, stateful_step_count=40)


# --- charts --------------------------------------------------------------------------------------------


def _timeline(column_s: float, *steps: tuple[float, float, float]) -> Timeline:
    timeline = Timeline(column_s)
    for start, end, count in steps:
        timeline.add(Step(start, end, {FIRST: {"stored_bytes": count}}))
    return timeline


def _rates(timeline: Timeline, now_s: float, last: int) -> list[float | None]:
    return [column.rate("stored_bytes") for column in timeline.until(now_s)[-last:]]


def test_a_step_is_spread_over_its_time() -> None:
    assert _rates(_timeline(2.0, (0, 2, 8), (2, 8, 6)), 7.9, 4) == [4, 1, 1, 1]


def test_a_gap_is_a_gap() -> None:
    assert _rates(_timeline(2.0, (0, 2, 8), (6, 8, 2)), 11, 6) == [4, None, None, 1, None, None]


def test_a_step_that_is_longer_than_all_columns_is_no_work() -> None:
    timeline = _timeline(0.2, (0, 10**9, 10**9))
    columns = timeline.until(10**9 - 0.1)
    assert [column.rate("stored_bytes") for column in columns[1:]] == pytest.approx([1] * (COLUMNS - 1))
