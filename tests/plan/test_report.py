"""What a report says to a terminal and as JSON."""

from __future__ import annotations

import json
import re

import pytest

from forebay.plan.document import as_document, thinned
from forebay.plan.report import Report
from forebay.plan.results import Speed
from forebay.plan.text import as_text
from forebay.plan.words import duration, memory, setting
from forebay.settings import ConnectorSettings
from tests.plan.reports import make_curve, make_replay, make_report

GB = 10**9


def said(report: Report) -> str:
    return " ".join(as_text(report).split())


def pasted(report: Report) -> list[dict[str, object]]:
    """What the text says to paste, as JSON."""
    return [json.loads(each) for each in re.findall(r'"kv_connector_extra_config": ({.*})', as_text(report))]


def test_it_says_how_much_in_gb_and_slots_and_what_to_paste() -> None:
    report = make_report(runs=[("eager", "lru")])
    assert "Give it 2,600 GB, the knee: 38,743 slots find 34.9 % of blocks" in said(report)
    assert pasted(report)[0] == {"cpu_bytes_to_use": "2600GB"}


def test_what_is_to_be_pasted_is_what_an_engine_takes() -> None:
    for report in (make_report(), make_report(target=0.2), make_report(sizes=[100 * GB])):
        for config in pasted(report):
            recommended = {each.num_bytes for each in (report.advice.knee, report.advice.target) if each}
            assert ConnectorSettings.parse(config).total_bytes in recommended


def test_the_table_has_a_line_for_each_size_and_names_those_that_count() -> None:
    report = make_report(runs=[("eager", "lru")])
    lines = [line for line in as_text(report).splitlines() if re.match(r"[\d,.]+ [GM]B ", line)]
    assert [line.split("  ")[0] for line in lines] == [memory(size) for size in report.sizes]
    [marked] = [line for line in lines if line.endswith("<- knee")]
    assert marked.startswith("2,600 GB")


def test_the_second_size_is_named_too() -> None:
    both = make_report(make_curve([1, 50, 800, 1600, 6400], [0.05, 0.2, 0.61, 0.66, 0.7]), device_blocks=0)
    assert "90 % of what is possible, 63.0 % of blocks, takes 110 GB: 1,639 slots." in said(both)
    assert [config["cpu_bytes_to_use"] for config in pasted(both)] == ["54GB", "110GB"]
    same = make_report()
    assert "90 % of what is possible, 32.9 % of blocks, is reached with that." in said(same)
    assert len(pasted(same)) == 1


def test_a_target_comes_first_if_it_was_asked_for() -> None:
    report = make_report(target=0.25, runs=[("eager", "lru")])
    assert "Give it 1,400 GB, the size that reaches the target: 20,861 slots" in said(report)
    assert "The knee is at 2,600 GB" in said(report)
    assert [config["cpu_bytes_to_use"] for config in pasted(report)] == ["1400GB", "2600GB"]


def test_a_target_out_of_reach_is_not_promised() -> None:
    report = make_report(target=0.5)
    assert "Give it 2,600 GB, the knee" in said(report)
    assert "The target, 50.0 % of blocks, is out of reach: a cache without bounds finds 36.6 %." in said(report)


def test_a_target_that_the_device_reaches_needs_no_memory() -> None:
    report = make_report(target=0.03)
    assert "The device is enough for the target: it finds 4.2 % of blocks alone" in said(report)
    assert "The knee is at 2,600 GB" in said(report)
    assert [config["cpu_bytes_to_use"] for config in pasted(report)] == ["2600GB"]


def test_traffic_that_does_not_repeat_gets_no_memory() -> None:
    report = make_report(make_curve([1, 100], [0.001, 0.004]))
    assert "No memory helps: 0.4 % of blocks ever repeat." in said(report)
    assert pasted(report) == []
    assert "<-" not in said(report)


def test_a_device_that_is_enough_gets_no_memory() -> None:
    report = make_report(make_curve([1, 100, 1000], [0.1, 0.5, 0.505]), device_blocks=100)
    assert "The device is enough: it finds 50.0 % of blocks alone, and a cache without bounds 50.5 %." in said(
        report
    )
    assert pasted(report) == []


def test_sizes_that_were_asked_for_are_judged() -> None:
    assert "The smallest size asked for, 4,000 GB, is enough." in said(make_report(sizes=[4000 * GB, 8000 * GB]))
    assert "More than the largest size asked for, 32 GB, would still pay." in said(make_report(sizes=[32 * GB]))
    assert "asked for," not in said(make_report(sizes=[32 * GB, 4000 * GB]))


def test_the_better_mode_and_policy_are_pasted_if_they_are_a_point_better() -> None:
    report = make_report(runs=[("eager", "lru")])
    size = 2600 * GB
    for share, expected in ((0.345, {}), (0.37, {"lazy_offload": True, "eviction_policy": "s3fifo"})):
        replays = [make_replay(size, 0.34), make_replay(size, share, mode="lazy", policy="s3fifo")]
        [config] = pasted(
            Report(
                report.totals,
                report.engine,
                report.curve,
                report.bound,
                report.advice,
                [size],
                True,
                replays,
            )
        )
        assert config == {"cpu_bytes_to_use": "2600GB"} | expected


def test_a_bus_that_is_too_slow_is_named() -> None:
    keeps_up = make_report(speeds=True, runs=[("eager", "lru")])
    assert "The bus keeps up: busy 62.0 % of the time. TTFT p50 410 ms instead of 780 ms" in said(keeps_up)
    slow = Speed(0.41, 9.3, 0.78, 31.0, 1.4)
    replays = [make_replay(size, 0.3, speed=slow) for size in keeps_up.sizes]
    late = Report(
        keeps_up.totals,
        keeps_up.engine,
        keeps_up.curve,
        None,
        keeps_up.advice,
        keeps_up.sizes,
        False,
        replays,
    )
    assert "The bus does not keep up: asked for 1.4 times what it moves." in said(late)
    assert "too slow, 1.4 x" in said(late)


def test_lines_are_not_longer_than_a_terminal() -> None:
    for report in (make_report(runs=[("eager", "lru")]), make_report(runs=[])):
        assert max(map(len, as_text(report).splitlines())) <= 110


# --- JSON -------------------------------------------------------------------------------------------------


def test_the_document_is_json_and_has_what_the_text_has() -> None:
    report = make_report(speeds=True)
    document = json.loads(json.dumps(as_document(report)))
    assert document["schema"] == "forebay-plan/1"
    recommended = document["advice"]["recommended"]
    assert recommended["kv_connector_extra_config"] == pasted(report)[0]
    assert (recommended["num_bytes"], recommended["slots"]) == (2600 * GB, 38_743)
    assert document["sizes_bytes"] == list(report.sizes)
    assert len(document["replays"]) == len(report.sizes) * 3
    assert [curve["name"] for curve in document["curves"]] == ["lru", "best possible"]
    first = document["replays"][0]
    assert first["input_tokens"] == first["computed_tokens"] + first["device_tokens"] + first["host_tokens"]
    assert document["assumptions"]


def test_a_document_without_advice_has_the_same_keys() -> None:
    full, empty = as_document(make_report()), as_document(make_report(make_curve([1], [0.001]), runs=[]))
    assert full.keys() == empty.keys()
    assert full["advice"].keys() == empty["advice"].keys()
    assert empty["advice"]["recommended"] is None


def test_long_curves_are_thinned_without_changing_them() -> None:
    curve = make_curve(range(1, 100_001), [size / 200_000 for size in range(1, 100_001)])
    sizes, shares = thinned(curve)
    assert len(sizes) <= 2000
    assert (sizes[0], sizes[-1]) == (1, 100_000)
    assert shares == [size / 200_000 for size in sizes]


# --- amounts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_bytes", "shown", "typed"),
    [
        (2600 * GB, "2,600 GB", "2600GB"),
        (54 * GB, "54 GB", "54GB"),
        (12_300_000_000, "12.3 GB", "12.3GB"),
        (60 << 30, "64.4 GB", 60 << 30),
        (850_000_000, "850 MB", "850MB"),
        (1100, "1.1 KB", "1.1KB"),
        (7, "7 bytes", 7),
    ],
)
def test_memory_is_shown_short_and_typed_exactly(num_bytes: int, shown: str, typed: str | int) -> None:
    assert memory(num_bytes) == shown
    assert setting(num_bytes) == typed
    assert ConnectorSettings.parse({"cpu_bytes_to_use": typed}).total_bytes == num_bytes


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0 seconds"), (59, "59 seconds"), (3537, "59 minutes"), (7200, "2 hours"), (200_000, "2.31 days")],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
