from __future__ import annotations

import io

import pytest

from forebay.plan import progress as module
from forebay.plan.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_terminal_gets_a_bar_that_goes_away(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(stream, "forebay plan")
    clock[0] += 1
    progress.show("replays", 0.5)
    assert stream.getvalue() == "\r\033[Kreplays            [###############...............]  50%"
    progress.clear()
    assert stream.getvalue().endswith("\r\033[K")


def test_a_bar_is_not_drawn_more_often_than_it_can_be_seen(clock: list[float]) -> None:
    stream = Terminal()
    progress = Progress(stream, "forebay plan")
    for _ in range(100):
        clock[0] += 0.011
        progress.show("replays", 0.5)
    assert 5 <= stream.getvalue().count("replays") <= 10


def test_elsewhere_a_line_now_and_then(clock: list[float]) -> None:
    stream = io.StringIO()
    progress = Progress(stream, "forebay plan")
    for step in range(100):
        clock[0] += 0.25
        progress.show("reading", step / 100)
    progress.clear()
    assert stream.getvalue() == "forebay plan: reading, 39%\nforebay plan: reading, 79%\n"


def test_what_takes_no_time_says_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(stream, "forebay plan")
    progress.show("reading", 0.5)
    progress.clear()
    assert stream.getvalue() == ""
