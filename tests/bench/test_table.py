"""What is printed follows from what was measured: medians, targets, and columns of engines that failed."""

from __future__ import annotations

from typing import Any

import pytest
from _table import Column, columns, measures, percentile, table, verdicts

GB = 1_000_000_000


def phase(seconds: float, share: float = 0.0, ttft: float = 0.1, token: float = 0.01) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "share_cached": share,
        "tokens_per_s": 1000 / seconds,
        "ttft_s": [ttft, 2 * ttft],
        "token_s": [token],
    }


def row(engine: str, kind: str, *, scale: float = 1.0, **more: Any) -> dict[str, Any]:
    """A run in which everything takes so many times as long as without offload."""
    share = 0.0 if kind == "none" else 0.999
    return {
        "engine": engine,
        "label": engine,
        "kind": kind,
        "problem": None,
        "start_s": 12.0,
        "resident_bytes": 2 * GB if kind == "none" else 62 * GB,
        "available_drop_bytes": 2 * GB if kind == "none" else 62 * GB,
        "came_back": None if kind == "none" else {"cached": 5_994, "right": 5_994},
        "workloads": {
            "documents": [phase(4.0), *[phase(4.0 * scale / 10, share), phase(3.0 * scale / 10, share)]],
            "chat": [phase(9.0), phase(10 * scale, share), phase(11 * scale, share)],
            "miss": [phase(2.0), phase(2.1), phase(1.9)],
            "fits": [phase(0.7), phase(0.7)],
        },
    } | more


def judged(ours: dict[str, Any], *others: dict[str, Any], full: bool = True) -> dict[str, bool | None]:
    every = columns([*others, ours])
    column = next(each for each in every if each.name == ours["engine"])
    found = verdicts(column, every, full=full, host_bytes=60 * GB)
    return {f"{each.what} {each.bound.partition(' (')[0]}": each.holds for each in found}


NONE, PEER = row("none", "none", scale=10), row("peer", "peer", scale=2)


@pytest.mark.parametrize(("percent", "expected"), [(50, 2), (99, 4), (25, 1), (100, 4), (51, 3)])
def test_a_percentile_is_one_of_the_values(percent: float, expected: float) -> None:
    assert percentile([4, 1, 3, 2], percent) == expected


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 50) is None


def test_without_offload_every_round_is_a_first_one() -> None:
    documents = {"documents": [phase(3.7), phase(3.9), phase(3.8)]}
    assert measures(row("none", "none", workloads=documents))["documents first"] == 3.8
    assert measures(row("ours", "forebay", workloads=documents))["documents first"] == 3.7


def test_the_slowest_repeat_and_the_least_share_count() -> None:
    found = measures(row("ours", "forebay"))
    assert (found["documents first"], found["documents repeat"], found["documents cached"]) == (4.0, 0.4, 0.999)
    assert (found["chat later"], found["miss"], found["chat later ttft p99"]) == (21.0, 2.0, 0.2)
    assert found["miss spread"] == pytest.approx(0.1)


def test_all_targets_can_be_reached() -> None:
    found = judged(row("ours", "forebay"), NONE, PEER)
    assert set(found.values()) == {True}
    assert len(found) == 15


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        ({"scale": 1.01}, "documents, slowest repeat <= 0.40 s"),
        ({"scale": 1.81}, "chat, later turns together <= 0.9 x best peer, peer"),
        ({"start_s": 14.1}, "start <= 12.00 s + 2 s"),
        ({"resident_bytes": 64 * GB}, "resident, above no offload <= 1.02 x asked"),
        (
            {"resident_bytes": 3 * GB, "available_drop_bytes": 64 * GB},
            "available drop, above no offload <= 1.02 x asked",
        ),
    ],
)
def test_a_target_that_is_missed_says_so(change: dict[str, Any], lost: str) -> None:
    assert judged(row("ours", "forebay", **change), NONE, PEER)[lost] is False


@pytest.mark.parametrize(
    ("workload", "index", "change", "lost"),
    [
        ("documents", 0, {"seconds": 4.05}, "documents, first round <= 1.01 x no offload"),
        ("documents", 2, {"share_cached": 0.997}, "documents, share cached >= 0.998"),
        ("chat", 0, {"seconds": 9.2}, "chat, turn 1 <= 1.02 x no offload"),
        ("chat", 1, {"share_cached": 0.9}, "chat, share cached, turn 2 >= best peer, peer"),
        ("fits", 0, {"seconds": 0.8}, "fits, median of slices <= 1.02 x no offload"),
        ("fits", 0, {"token_s": [0.02, 0.02]}, "fits, time per token <= 1.02 x no offload"),
    ],
)
def test_a_phase_that_is_too_slow_says_so(workload: str, index: int, change: dict[str, Any], lost: str) -> None:
    ours = row("ours", "forebay")
    ours["workloads"][workload][index] |= change
    assert judged(ours, NONE, PEER)[lost] is False


def test_nobody_is_compared_with_an_engine_that_brings_back_other_bytes() -> None:
    fast = row("fast", "peer", scale=0.1, came_back={"cached": 5_952, "right": 3_000})
    ours = row("forebay", "forebay")
    assert judged(ours, NONE, PEER, fast)["documents, slowest repeat <= 1 x best peer, peer"] is True
    assert "fast: brings back other bytes than were computed, so nothing is compared with it" in table(
        columns([NONE, PEER, fast, ours])
    )
    once = columns([NONE, PEER, *[fast | {"came_back": {"cached": 9, "right": 9}}] * 2, fast, ours])
    assert not next(each for each in once if each.name == "fast").is_right, "wrong once of three times"
    right = fast | {"came_back": {"cached": 5_952, "right": 5_952}}
    assert judged(ours, NONE, PEER, right)["documents, slowest repeat <= 1 x best peer, fast"] is False


def test_time_per_token_does_not_jump_with_one_request() -> None:
    """Half of the requests of a slice decode slowly, give or take one, whoever serves them."""
    none, ours = row("none", "none", scale=10), row("ours", "forebay")
    for of in ours["workloads"]["miss"]:
        of["token_s"] = [0.0104] * 30 + [0.0089] * 29
    for of in none["workloads"]["miss"]:
        of["token_s"] = [0.0104] * 29 + [0.0089] * 30
    assert measures(ours)["miss per token"] == pytest.approx(0.00966, abs=1e-5)
    assert judged(ours, none, PEER)["miss, time per token <= 1.02 x no offload"] is True


def test_if_nothing_came_back_that_is_a_failure_of_ours_only() -> None:
    nothing = {"cached": 0, "right": 0}
    assert measures(row("peer", "peer", came_back=nothing))["came back"] is None
    assert judged(row("ours", "forebay", came_back=nothing), NONE, PEER)["blocks back as computed >= 1.0"] is False


def test_why_bytes_are_not_proven_is_said() -> None:
    lines = table(columns([NONE, row("odd", "peer", came_back=None, not_proven="ValueError('no blocks')")]))
    assert "odd: not known whether its bytes are right: ValueError('no blocks')" in lines


def test_what_was_not_measured_is_neither_reached_nor_missed() -> None:
    found = judged(row("ours", "forebay"))
    assert found["chat, turn 1 <= 1.02 x no offload"] is None
    assert found["documents, slowest repeat <= 0.40 s"] is True
    assert False not in found.values()


def test_absolute_targets_are_for_the_full_shape() -> None:
    assert "documents, slowest repeat <= 0.40 s" not in judged(row("ours", "forebay"), NONE, PEER, full=False)


def test_an_engine_that_failed_is_a_column_that_says_so() -> None:
    failed = {"engine": "bad", "label": "Bad", "kind": "peer", "problem": "failed in start: KeyError: 'x'"}
    half = row("half", "peer", problem="late: killed after 150 s in chat", workloads={"documents": [phase(4.0)]})
    every = columns([failed, half, NONE, {"engine": "none", "label": "none", "kind": "cold", "problem": None}])
    lines = table(every)
    assert [each.name for each in every] == ["none", "bad", "half"]
    first = next(line for line in lines if line.startswith("documents first"))
    assert first.split()[2:] == ["4.00", "s", "-", "4.00", "s"]
    assert "Bad: failed in start: KeyError: 'x'" in lines
    assert "half: late: killed after 150 s in chat" in lines


def test_runs_of_one_engine_become_their_median_without_those_that_failed() -> None:
    runs = [row("none", "none", start_s=start) for start in (10.0, 30.0, 12.0)]
    bad = {"engine": "none", "label": "none", "kind": "none", "problem": "late", "start_s": 99.0}
    (column,) = columns([*runs, bad])
    assert isinstance(column, Column)
    assert (column["start"], column.runs, column.problem) == (12.0, 3, "late")
