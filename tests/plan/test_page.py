"""The page, as a browser gets it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest

from forebay.plan.page import page
from forebay.plan.page.svg import LETTER
from forebay.plan.report import Report
from tests.pages import assert_every_element_is_closed, assert_nothing_is_fetched
from tests.plan.reports import make_curve, make_report

FEW = make_curve(
    [1, 50, 100, 200, 400, 800, 1600, 3200, 6400], [0.05, 0.2, 0.32, 0.45, 0.55, 0.61, 0.66, 0.69, 0.7]
)
LOOP = make_curve([1, 99, 100, 1000], [0.0, 0.0, 0.9, 0.9])
REPORTS = {
    "usual": make_report(),
    "speeds": make_report(speeds=True),
    "target": make_report(target=0.25, runs=[("eager", "lru")]),
    "two-sizes": make_report(FEW, device_blocks=30, bound=False),
    "loop": make_report(LOOP, device_blocks=10, runs=[("lazy", "arc"), ("eager", "my.module:Policy")]),
    "curve-only": make_report(runs=[]),
    "no-device": make_report(FEW, device_blocks=0),
    "nothing-repeats": make_report(make_curve([1], [0.002]), runs=[]),
    "tiny": make_report(make_curve([1, 2, 3], [0.3, 0.4, 0.5]), device_blocks=1),
}
each_report = pytest.mark.parametrize("report", REPORTS.values(), ids=REPORTS.keys())


def pictures(html: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg class=.*?</svg>", html, re.DOTALL)]


@each_report
def test_nothing_is_fetched_and_nothing_runs(report: Report) -> None:
    assert_nothing_is_fetched(page(report))


@each_report
def test_every_element_is_closed(report: Report) -> None:
    assert_every_element_is_closed(page(report))


def test_it_answers_and_says_what_to_paste_and_what_it_rests_on() -> None:
    html = page(REPORTS["usual"])
    assert "Give it 2,600 GB, the knee" in html
    assert "&quot;cpu_bytes_to_use&quot;: &quot;2600GB&quot;" in html
    assert "<h2>What each size finds</h2>" in html
    assert "<h2>Hits over time</h2>" in html
    assert "<h2>What if</h2>" in html
    assert "<code>--device-memory</code> says otherwise" in html


def test_names_from_outside_are_text() -> None:
    html = page(make_report(name="<b>&\"'.jsonl"))
    assert "<b>&" not in html
    assert "&lt;b&gt;&amp;" in html


def test_the_table_has_every_run_and_the_charts_have_tables_too() -> None:
    report = REPORTS["speeds"]
    html = page(report)
    [what_if] = re.findall(r'aria-label="What if">(.*?)</div>', html, re.DOTALL)
    assert what_if.count("<tr") == 2 + len(report.replays)  # names, and the device alone
    assert what_if.count('class="marked"') == 3
    assert "TTFT p50" in what_if
    assert html.count("<details>") == 2


@each_report
def test_pictures_are_named_and_stay_in_their_frame(report: Report) -> None:
    found = pictures(page(report))
    assert len(found) == (4 if report.replays else 2)
    for svg in found:
        assert svg.attrib["aria-label"]
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for left, top, right, bottom, words in boxes(svg):
            assert left >= 0, words
            assert right <= width + 1, words
            assert top >= 0, words
            assert bottom <= height, words
        for shape in [*svg.iter("rect"), *svg.iter("path")]:
            numbers = [float(each) for each in re.findall(r"-?[\d.]+", shape.attrib.get("d", ""))]
            assert all(-20 <= each <= max(width, height) for each in numbers)


@each_report
def test_labels_do_not_lie_on_each_other(report: Report) -> None:
    for svg in pictures(page(report)):
        labels = list(boxes(svg))
        for number, one in enumerate(labels):
            for other in labels[number + 1 :]:
                apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
                assert apart, (one, other)


def boxes(svg: ElementTree.Element) -> Iterator[tuple[float, float, float, float, str]]:
    """About where each text is: left, top, right, bottom."""
    for text in svg.iter("text"):
        words = text.text or ""
        size = 11 if "faint" in text.attrib.get("class", "") else 12
        width = len(words) * LETTER * 0.92 * size / 12
        x, y = float(text.attrib["x"]), float(text.attrib["y"])
        left = {"start": x, "middle": x - width / 2, "end": x - width}[text.attrib["text-anchor"]]
        yield left, y - size * 0.75, left + width, y + size * 0.2, words


def test_each_run_has_its_mark_at_its_size() -> None:
    report = REPORTS["usual"]
    wide, narrow, *_ = pictures(page(report))
    for svg in (wide, narrow):
        marks = [each for each in svg.iter("path") if each.attrib["class"].startswith("mark")]
        assert len(marks) == len(report.replays)
        places = [float(re.findall(r"[\d.]+", each.attrib["transform"])[0]) for each in marks[::3]]
        assert places == sorted(places)
        assert "210 GB, eager, lru: " in (marks[0][0].text or "")


def test_the_curve_rises_where_more_is_found() -> None:
    wide = pictures(page(REPORTS["two-sizes"]))[0]
    [lru] = [each for each in wide.iter("path") if each.attrib["class"] == "lru"]
    points = [tuple(map(float, each.split())) for each in lru.attrib["d"][1:].split("L")]
    assert len(points) > 5
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    heights = [y for _, y in points]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[-1] > 100
