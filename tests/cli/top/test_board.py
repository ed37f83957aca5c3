"""What is known of a server at a moment: while it answers, when it has gone, before it ever came."""

from __future__ import annotations

import time

import pytest

from forebay.cli.top.board import ZOOMS, Board
from forebay.cli.top.reading import Problem, Reading
from forebay.cli.top.scrape import Address, Answer
from forebay.cli.top.terminal import Key
from forebay.cli.top.view import Alarm, Screen, ServerView
from tests.cli.top.test_history import down, reading

INTERVAL_S = 2.0


def board_of(*outcomes: Reading | Problem) -> Board:
    board = Board([Address.parse("gpu-1:8000")], INTERVAL_S)
    for outcome in outcomes:
        board.take(Answer(0, outcome))
    return board


def view_of(board: Board, now_s: float) -> ServerView:
    return board.servers[0].view(now_s)


def rates(view: ServerView) -> list[float | None]:
    return [column.rate("lookups") for column in view.columns]


def test_while_a_server_answers_its_chart_ends_with_the_last_answer() -> None:
    """Otherwise its end would be blank half of the time."""
    board = board_of(reading(10, lookups=0), reading(12, lookups=2), reading(13.5, lookups=5))
    assert [rates(view_of(board, now_s))[-3:] for now_s in (13.5, 15.4)] == [[None, 1, 2]] * 2


def test_when_it_has_gone_its_chart_goes_on_without_it() -> None:
    board = board_of(reading(10, lookups=0), reading(12, lookups=2), down(14))
    view = view_of(board, 16.5)
    assert rates(view)[-4:] == [1, None, None, None]
    assert (view.problem_s, view.uptime_s) == (2.5, None)
    assert view.whole
    assert view.whole.total.counts["lookups"] == 2, "what was known is not forgotten"


def test_a_server_that_never_came_has_only_a_problem() -> None:
    view = view_of(board_of(down(14)), 20)
    assert (view.whole, view.problem_s, view.columns) == (None, 6, ())


def test_how_long_it_runs_is_by_its_own_start() -> None:
    started_at = time.time() - 500
    view = view_of(board_of(reading(10, started_at, lookups=0)), 10)
    assert view.uptime_s == pytest.approx(500, abs=60)
    view = view_of(board_of(reading(10, time.time() + 500)), 10)
    assert view.uptime_s == 0, "its clock is ahead of ours"


def test_a_restart_is_remembered() -> None:
    board = board_of(reading(10, lookups=9), down(12), reading(14, lookups=1))
    assert view_of(board, 20).restarted_s == 6


def test_trouble_is_told_of_whole_servers_and_of_engines() -> None:
    board = board_of(reading(10, load_failures=4), reading(12, load_failures=5, overdue_transfers=1))
    view = view_of(board, 13)
    for summary in (view.whole, view.engines[0][1]):
        assert summary
        found = {key for key, alarm in summary.alarms.items() if alarm is Alarm.TROUBLE}
        assert found == {"load_failures", "overdue_transfers"}
    later = view_of(board, 90).whole
    assert later
    assert later.alarms["load_failures"] is Alarm.NONE
    assert later.alarms["overdue_transfers"] is Alarm.TROUBLE


def test_recomputes_that_somebody_asked_for_are_no_trouble() -> None:
    def alarm(**counters: float) -> Alarm:
        whole = view_of(board_of(reading(10, recomputes=0, resets=0), reading(12, **counters)), 12).whole
        assert whole
        return whole.alarms["recomputes"]

    assert alarm(recomputes=3, resets=0) is Alarm.TROUBLE
    assert alarm(recomputes=3, resets=1) is Alarm.NONE


def test_keys_stay_within_what_there_is() -> None:
    addresses = [Address.parse(f"gpu-{number}:8000") for number in range(3)]
    board = Board(addresses, INTERVAL_S)

    def after(*keys: Key) -> Screen:
        for key in keys:
            board.press(key)
        return board.screen(1.0, [0.0] * 3)

    chosen = [after(Key.UP), after(Key.DOWN), after(*[Key.DOWN] * 5), after(Key.UP)]
    assert [screen.selected for screen in chosen] == [0, 1, 2, 1]
    zoomed = [after(), *(after(Key.ZOOM) for _ in ZOOMS)]
    assert [screen.column_s / INTERVAL_S for screen in zoomed] == [*ZOOMS, 1]
