"""Screens made by hand, one as docs/cli.md shows it, and any others."""

from __future__ import annotations

import math
import unicodedata

from hypothesis import strategies as st

from forebay.cli.top.history import Counted
from forebay.cli.top.reading import EngineId, Problem
from forebay.cli.top.timeline import CHARTED, COLUMNS, Column
from forebay.cli.top.view import TROUBLE, Alarm, Screen, ServerView, Summary
from forebay.metrics import METRICS, Kind
from forebay.stats import LATENCY_BOUNDS_S
from tests.cli.top.fake import GAUGES

COUNTERS = [metric.key for metric in METRICS if metric.kind is Kind.COUNTER]
GAUGE_KEYS = [metric.key for metric in METRICS if metric.kind is Kind.GAUGE]


def cells(text: str) -> int:
    """How many columns of a terminal it takes at most, escape sequences left out."""
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


# --- one that is always the same ------------------------------------------------------------------------


def _counted(seconds: float, **rates: float) -> Counted:
    buckets = {
        (key, bound): seconds * 100 * min(1.0, bound / top)
        for key, top in (("store_latency_s", 0.025), ("load_latency_s", 0.01))
        for bound in (*LATENCY_BOUNDS_S, math.inf)
    }
    return Counted({**buckets, **{key: rate * seconds for key, rate in rates.items()}}, seconds)


def _columns(seconds: int = COLUMNS) -> tuple[Column, ...]:
    columns = []
    for index in range(seconds):
        wave = 0.5 + 0.5 * math.sin(index / 5)
        rates = (
            9000 * wave,
            9000 * (1 - wave) + 2000,
            2e9 * (1 - wave),
            8e9 * wave,
            40 * (1 - wave),
            12 + 4 * wave,
        )
        columns.append(Column(2.0, {key: 2 * rate for key, rate in zip(CHARTED, rates, strict=True)}))
    return tuple(columns)


def summary(**trouble: Alarm) -> Summary:
    rates = {
        "hit_tokens": 8120.0,
        "miss_tokens": 2310.0,
        "stored_bytes": 4.1e8,
        "loaded_bytes": 7.2e9,
        "evictions": 12.5,
        "lookups": 15.0,
    }
    total = {key: rate * 9000 for key, rate in rates.items()}
    counts = _counted(9000.0).counts
    total |= {"resets": 1.0, "abandoned_transfers": 17.0, **dict.fromkeys(trouble, 3.0)}
    alarms = {key: trouble.get(key, Alarm.NONE) for key in TROUBLE}
    lately = {key: rate * 0.83 for key, rate in rates.items()}
    return Summary(_counted(2.0, **rates), _counted(60.0, **lately), Counted({**counts, **total}), GAUGES, alarms)


def server(name: str = "gpu-1:8000", engines: int = 1, **trouble: Alarm) -> ServerView:
    ids = [EngineId("meta-llama/Llama-3.1-8B-Instruct", str(number)) for number in range(engines)]
    return ServerView(
        name,
        whole=summary(**trouble),
        engines=tuple((each, summary()) for each in ids),
        uptime_s=11_520.0,
        columns=_columns(),
    )


def down(name: str = "gpu-3:8000") -> ServerView:
    return ServerView(name, Problem(0.0, "connection refused", answered=False), 72.0)


def screen(*servers: ServerView, selected: int = 0) -> Screen:
    return Screen(servers, selected, 2.0, 2.0, "14:03:22")


# --- any other --------------------------------------------------------------------------------------------

_NUMBERS = st.one_of(
    st.sampled_from([0.0, 1.0, 0.004, 99.95, 999.5, 9_999.5, 99_999.5, 1e15, 1e30]),
    st.floats(0, 1e18),
    st.integers(0, 10**12).map(float),
)
# Wide letters, marks, letters from right to left, and what tells a terminal to do something.
_TEXT = st.one_of(
    st.text(max_size=30),
    st.text("模型éقא\u0301\u200d👩‍👧️\x1b[31m\x07\r\n\tab", max_size=60),
    st.sampled_from(["x" * 200, "模" * 90, "\x1b[2J\x1b]0;gone\x07", ""]),
)
_BUCKETS = st.sampled_from(
    [(key, bound) for key in ("store_latency_s", "load_latency_s") for bound in (0.001, 0.1, 10.0, math.inf)]
)
_COUNTS = st.dictionaries(st.one_of(st.sampled_from(COUNTERS), _BUCKETS), _NUMBERS, max_size=12)
_COUNTED = st.builds(Counted, _COUNTS, st.one_of(st.just(0.0), st.floats(0.1, 100)))
_ALARMS = st.fixed_dictionaries({key: st.sampled_from(Alarm) for key in TROUBLE})
_SUMMARIES = st.builds(
    Summary,
    _COUNTED,
    _COUNTED,
    _COUNTED,
    st.one_of(st.just(GAUGES), st.dictionaries(st.sampled_from(GAUGE_KEYS), _NUMBERS)),
    st.one_of(st.just(dict.fromkeys(TROUBLE, Alarm.NONE)), _ALARMS),
)
_COLUMN = st.builds(Column, st.sampled_from([0.0, 2.0]), st.dictionaries(st.sampled_from(CHARTED), _NUMBERS))
_PROBLEMS = st.builds(Problem, st.just(0.0), _TEXT, st.booleans())


@st.composite
def _servers(draw: st.DrawFn) -> ServerView:
    name, problem = draw(_TEXT), draw(st.none() | _PROBLEMS)
    waited = draw(st.sampled_from([0.0, 2.0, 5.0, 1e7]))
    if draw(st.integers(0, 4)) == 0:
        return ServerView(name, problem, waited, waited)
    engines = draw(st.lists(st.tuples(st.builds(EngineId, _TEXT, _TEXT), _SUMMARIES), min_size=1, max_size=3))
    engines *= draw(st.sampled_from([1, 1, 3]))
    columns = tuple(draw(st.lists(_COLUMN, max_size=6)))
    times = st.none() | st.sampled_from([0.0, 61.0, 4e7])
    return ServerView(
        name, problem, waited, waited, draw(_SUMMARIES), tuple(engines), draw(times), draw(times), columns
    )


@st.composite
def screens(draw: st.DrawFn) -> Screen:
    servers = draw(st.lists(_servers(), min_size=1, max_size=2)) * draw(st.sampled_from([1, 1, 1, 4]))
    selected = draw(st.integers(0, len(servers) - 1))
    interval = draw(st.sampled_from([0.2, 1.0, 2.0, 3600.0]))
    zoom = draw(st.sampled_from([1, 5, 180]))
    return Screen(tuple(servers), selected, interval, interval * zoom, "14:03:22")
