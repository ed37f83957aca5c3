from __future__ import annotations

from xml.etree import ElementTree

import pytest

from demo.page import chart, page
from tests.demo.builders import make_run, make_runs
from tests.pages import assert_every_element_is_closed, assert_nothing_is_fetched


def text() -> str:
    return page(make_runs(), "2 chats & more", "on <some> machine")


def test_nothing_is_fetched() -> None:
    assert_nothing_is_fetched(text())


def test_every_element_is_closed() -> None:
    assert_every_element_is_closed(text())


def test_it_says_what_was_measured_for_light_and_dark_and_for_small_screens() -> None:
    html = text()
    assert "<strong>1,200 ms</strong>" in html
    assert "<strong>100 ms</strong> (eager) or <strong>300 ms</strong> (lazy)" in html
    assert "Every answer is the same." in html
    assert "2 chats &amp; more" in html
    assert "on &lt;some&gt; machine" in html
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html


def test_answers_that_differ_are_not_hidden() -> None:
    none, eager, _ = make_runs()
    other = make_run("lazy", 1.0, 1.0, 1.0, tokens=(1, 2))
    assert "Answers differ" in page([none, eager, other], "", "")


@pytest.mark.parametrize("scale", [0.001, 1.0, 70.0])
@pytest.mark.parametrize("turns", [2, 10])
def test_the_chart_has_a_bar_for_each_run_and_turn_and_stays_inside(scale: float, turns: int) -> None:
    runs = [make_run(name, *[scale * (turn + 1) for turn in range(turns)]) for name in ("none", "eager", "lazy")]
    svg = ElementTree.fromstring(chart(runs))
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    bars = list(svg.iter("rect"))
    assert len(bars) == 3 * turns
    for bar in bars:
        assert float(bar.attrib["x"]) + float(bar.attrib["width"]) <= width
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    ticks = [each for each in svg.iter("text") if each.text and each.text.endswith(" s")]
    assert 2 <= len(ticks) <= 6
