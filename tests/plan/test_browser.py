"""The page in a real Chromium: it is silent, it fits, and its chart can be seen and read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.plan.page import page
from tests.browser import CHROMIUM, Browser
from tests.plan.test_page import REPORTS

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

WIDTHS = (400, 1400)

# Texts of the charts that are shown, with the boxes that they really have.
_TEXTS = """
(() => {
  const box = element => element.getBoundingClientRect().toJSON();
  const size = text => parseFloat(getComputedStyle(text).fontSize);
  const read = text => ({words: text.textContent, size: size(text), ...box(text)});
  return [...document.querySelectorAll("svg.wide, svg.narrow")].filter(svg => box(svg).width).map(svg => ({
    frame: box(svg),
    texts: [...svg.querySelectorAll("text")].map(read),
    curve: box(svg.querySelector("path.lru, path.on-host")),
  }));
})()
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as each:
        yield each


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    found = {name: folder / f"{name}.html" for name in REPORTS}
    for name, report in REPORTS.items():
        found[name].write_text(page(report))
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_it_is_silent_and_fits(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width)
    requests = [told["request"]["url"] for method, told in browser.heard if method == "Network.requestWillBeSent"]
    assert requests == [pages[name].as_uri()]
    assert [each for each in browser.heard if each[0] != "Network.requestWillBeSent"] == []
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_charts_can_be_read(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width)
    charts: list[dict[str, Any]] = browser.value(_TEXTS)
    assert len(charts) == (2 if REPORTS[name].replays else 1)
    for chart in charts:
        assert chart["frame"]["width"] > width * 0.75
        if name != "nothing-repeats":
            assert chart["curve"]["width"] > chart["frame"]["width"] / 3
            assert chart["curve"]["height"] > 20
        texts = chart["texts"]
        scale = chart["frame"]["width"] / (1120 if width == 1400 else 368)
        assert all(text["size"] * scale >= 10.5 for text in texts)
        for number, one in enumerate(texts):
            assert chart["frame"]["left"] - 1 <= one["left"], one
            assert one["right"] <= chart["frame"]["right"] + 1, one
            for other in texts[number + 1 :]:
                apart = (
                    one["right"] <= other["left"]
                    or other["right"] <= one["left"]
                    or one["bottom"] <= other["top"] + 3  # boxes have room for letters with tails
                    or other["bottom"] <= one["top"] + 3
                )
                assert apart, (one["words"], other["words"])


def test_light_and_dark_are_different(browser: Browser, pages: dict[str, Path]) -> None:
    colours = []
    for dark in (False, True):
        browser.open(pages["usual"], width=1400, dark=dark)
        style = "getComputedStyle(document.body)"
        ink = browser.value(f"{style}.color")
        ground = browser.value(f"{style}.backgroundColor")
        curve = browser.value('getComputedStyle(document.querySelector("path.lru")).stroke')
        assert curve == ink
        colours.append((ink, ground))
    (light_ink, light_ground), (dark_ink, dark_ground) = colours
    assert light_ground == "rgb(255, 255, 255)"
    assert _brightness(light_ink) < 80 < 180 < _brightness(dark_ink)
    assert _brightness(dark_ground) < 40


def _brightness(colour: str) -> float:
    return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(","))) / 3


def test_on_paper_nothing_is_cut_off(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["speeds"], width=720, media="print")
    assert browser.value('[...document.querySelectorAll(".scroll")].every(each => each.scrollWidth <= innerWidth)')
    assert browser.value('document.querySelector("svg.narrow").getBoundingClientRect().width') > 400
