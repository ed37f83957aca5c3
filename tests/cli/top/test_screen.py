"""The command on a real terminal, with servers that come, go and hang. tests/vllm/test_top.py has a real one."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.top.fake import FakeServer, Traffic, engine_lines, page
from tests.cli.top.screens import cells
from tests.cli.top.tmux import Tmux, needs_tmux

pytestmark = needs_tmux

RATES = {
    "hit_tokens": 9000.0,
    "miss_tokens": 3000.0,
    "stored_bytes": 4.1e8,
    "loaded_bytes": 7.2e9,
    "evictions": 120.0,
    "lookups": 30.0,
}
FAST = ("--interval", "0.2")


class Lively:
    """Its counters grow; when it begins anew they begin at 0."""

    def __init__(self, engines: int = 1) -> None:
        self._engines = engines
        self.begin_anew()

    def begin_anew(self) -> None:
        self._traffic = Traffic(**RATES)
        self._started_at = time.time()

    def page(self) -> str:
        counters = self._traffic.counters()
        engines = [engine_lines(counters, engine=str(number)) for number in range(self._engines)]
        return page(*engines, started_at=self._started_at)


@pytest.fixture
def lively() -> Iterator[FakeServer]:
    with FakeServer(Lively().page) as server:
        yield server


def _is_moving(screen: str) -> bool:
    """Rates are known, and in a chart."""
    row = re.search(r"^to device +[\d.]+ GB/s(.*?)^evictions", screen, re.MULTILINE | re.DOTALL)
    return row is not None and re.search("[▂▃▄▅▆▇█]{3}", row[1]) is not None


@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50)])
def test_a_live_server_fills_the_screen(width: int, height: int) -> None:
    with FakeServer(Lively(engines=2).page) as server, Tmux(width, height) as terminal:
        terminal.top(server.url, *FAST)
        screen = terminal.wait_for(_is_moving)
        lines = screen.splitlines()
        assert len(lines) == height
        assert all(cells(line) <= width for line in lines)
        assert max(map(cells, lines)) == width
        assert re.match(r"forebay top +every 0.2 s +\d\d:\d\d:\d\d$", lines[0])
        assert re.search(r"^host pool .*72.3 % +92.6 GB of 128 GB$", screen, re.MULTILINE)
        assert re.search(r"^hit share +75.0 %", screen, re.MULTILINE)
        assert re.search(r"2 engines, 8 ranks", screen)
        assert re.search(r"  checksum mismatches +0", screen)
        assert lines[-1].startswith("q quit")
        assert "\x1b[36m" in terminal.screen(escapes=True)


def _check_left_as_it_was(terminal: Tmux, before: tuple[str, str]) -> None:
    terminal.wait_for_prompt()
    assert "hit share" not in terminal.screen(), "its screen was left behind"
    assert (terminal.flags(), terminal.ask("stty -a")) == before


@pytest.mark.parametrize("key", ["q", "C-c"])
def test_leaving_leaves_the_terminal_as_it_was(lively: FakeServer, key: str) -> None:
    with Tmux(80, 24) as terminal:
        before = (terminal.flags(), terminal.ask("stty -a"))
        shown = terminal.screen().rstrip()
        terminal.top(lively.url, *FAST)
        terminal.wait_for(_is_moving)
        assert terminal.flags() != before[0]
        terminal.press(key)
        terminal.wait_for_prompt()
        assert terminal.screen().startswith(shown), "what was on the screen before is gone"
        assert terminal.ask("echo $code") == "0"
        _check_left_as_it_was(terminal, before)


def test_a_signal_to_end_leaves_the_terminal_as_it_was(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        before = (terminal.flags(), terminal.ask("stty -a"))
        terminal.top(lively.url, *FAST)
        terminal.wait_for(_is_moving)
        os.kill(terminal.child(), signal.SIGTERM)
        terminal.wait_for_prompt()
        assert terminal.ask("echo $code") == "143"
        _check_left_as_it_was(terminal, before)


def test_it_can_be_stopped_and_go_on(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        before = (terminal.flags(), terminal.ask("stty -a"))
        terminal.top(lively.url, *FAST)
        terminal.wait_for(_is_moving)
        terminal.press("C-z")
        _check_left_as_it_was(terminal, before)
        terminal.type("fg")
        terminal.wait_for(_is_moving)
        terminal.press("q")
        _check_left_as_it_was(terminal, before)


def test_another_size_is_used_at_once(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, *FAST)
        terminal.wait_for(_is_moving)
        for width, height in ((160, 50), (60, 15), (40, 10), (100, 30)):
            terminal.resize(width, height)

            def fills(screen: str, width: int = width, height: int = height) -> bool:
                first, *_, last = lines = screen.splitlines()
                at_its_place = first.startswith("forebay top") and last.startswith("q quit")
                return at_its_place and len(lines) == height and max(map(cells, lines)) == width

            screen = terminal.wait_for(fills)
            assert screen.count("host pool") == screen.count("q quit") == 1


def test_a_server_goes_comes_back_and_begins_anew() -> None:
    lively = Lively()
    with FakeServer(lively.page) as server, Tmux(80, 24) as terminal:
        terminal.top(server.url, *FAST)
        terminal.wait_for(_is_moving)
        server.close()
        screen = terminal.wait_for(lambda screen: "connection refused" in screen)
        assert re.search(r"^down(?: for \d+ s)?: connection refused$", screen, re.MULTILINE)
        assert re.search(r"^host pool .*72.3 %", screen, re.MULTILINE), "what was known is not forgotten"
        lively.begin_anew()
        with FakeServer(lively.page, port=server.port):
            screen = terminal.wait_for(lambda screen: "restarted" in screen and "down" not in screen)
            screen = terminal.wait_for(_is_moving)
            assert "connection refused" not in screen
            # A counter that went down is no traffic, and certainly none in the other direction.
            assert not re.search(r"-\d", screen)


def test_a_slow_server_freezes_nothing(lively: FakeServer) -> None:
    let_go = threading.Event()

    def hang() -> str:
        let_go.wait(60)
        return page(engine_lines())

    with FakeServer(hang) as slow, Tmux(80, 24) as terminal:
        try:
            terminal.top(slow.url, lively.url, *FAST)
            terminal.wait_for(lambda screen: re.search(rf":{slow.port} +no answer for \d+ s", screen))
            terminal.wait_for(lambda screen: re.search(rf":{lively.port} .*7.20 GB/s", screen))
            before = lively.scrapes
            terminal.press("Down")
            terminal.wait_for(_is_moving)
            terminal.wait_for(lambda screen: lively.scrapes > before + 5)
            assert slow.scrapes == 1
            terminal.press("q")
            terminal.wait_for_prompt()
        finally:
            let_go.set()


def test_keys_choose_and_zoom() -> None:
    with FakeServer(Lively().page) as one, FakeServer(Lively(engines=2).page) as two, Tmux(80, 24) as terminal:
        terminal.top(one.url, two.url, *FAST)
        terminal.wait_for(lambda screen: "2 servers up" in screen and "1 engine, 4 ranks" in screen)
        for key, expected in (("Down", "2 engines"), ("Up", "1 engine,"), ("j", "2 engines"), ("k", "1 engine,")):
            terminal.press(key)
            terminal.wait_for(lambda screen, expected=expected: expected in screen)
        terminal.press("z")
        terminal.wait_for(lambda screen: "zoom: 1 s a column" in screen)


def test_what_others_write_on_the_screen_can_be_removed(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, *FAST)
        terminal.wait_for(_is_moving)
        Path(terminal.tty()).write_text("\x1b[23;1Hwall: the machine goes down\n")
        terminal.wait_for(lambda screen: "wall: the machine" in screen)
        terminal.press("C-l")
        terminal.wait_for(lambda screen: "wall:" not in screen and _is_moving(screen))


def test_whatever_is_done_a_server_is_asked_once_an_interval(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, "--interval", "3600")
        terminal.wait_for(lambda screen: "72.3 %" in screen)
        terminal.press("z", "j", "k", "x", "Up")
        terminal.resize(100, 30)
        terminal.wait_for(lambda screen: "5 h 0 min a column" in screen and len(screen.splitlines()[0]) == 100)
        assert lively.scrapes == 1


def test_what_runs_no_forebay_is_named(lively: FakeServer) -> None:
    with (
        FakeServer(lambda: "vllm:x 1\n") as other,
        FakeServer(lambda: "<html>") as somebody,
        Tmux(120, 30) as terminal,
    ):
        terminal.top(lively.url, other.url, somebody.url, *FAST)
        screen = terminal.wait_for(lambda screen: screen.count("no metrics") == 2 and "72.3 %" in screen)
        assert re.search(rf":{other.port} +no metrics.*: this vLLM runs without Forebay", screen)
        assert re.search(rf":{somebody.port} +no metrics.*/metrics is not a page of metrics", screen)
        assert "1 of 3 servers up" in screen


def test_without_colour_it_is_bold_at_most(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, *FAST, NO_COLOR="1")
        terminal.wait_for(_is_moving)
        codes = set(re.findall(r"\d+", " ".join(re.findall(r"\x1b\[[\d;]*m", terminal.screen(escapes=True)))))
        assert codes <= {"0", "1", "2", "39", "49"}, "39 and 49 are no colours, but none"
        assert "1" in codes


@pytest.mark.parametrize("name", ["dumb", ""])
def test_a_terminal_that_knows_nothing_is_given_lines(lively: FakeServer, name: str) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, *FAST, TERM=name)
        screen = terminal.wait_for(lambda screen: len(re.findall(r"7.20 GB/s  ok", screen)) > 3)
        assert re.search(r"^ +server +pool +hits +to host +to device", screen, re.MULTILINE)
        assert terminal.flags() == "0 1 1 0 0 0"
        terminal.press("C-c")
        terminal.wait_for_prompt()
        assert "Traceback" not in terminal.screen()


def test_a_simple_font_is_given_simple_letters(lively: FakeServer) -> None:
    with Tmux(80, 24) as terminal:
        terminal.top(lively.url, *FAST, TERM="linux")
        row = re.compile(r"^to device +[\d.]+ GB/s.*[-:=+*#]{3}", re.MULTILINE)
        screen = terminal.wait_for(row.search)
        assert screen.isascii()
