"""All servers that are watched, what is chosen among them, and what a key does to it."""

from __future__ import annotations

from collections.abc import Sequence
from time import localtime, strftime, time

from forebay.cli.top.history import History
from forebay.cli.top.reading import Reading
from forebay.cli.top.scrape import Address, Answer
from forebay.cli.top.terminal import Key
from forebay.cli.top.timeline import Timeline
from forebay.cli.top.view import Screen, ServerView, Summary

ZOOMS = (1, 5, 30, 180)
"""Intervals in a column of a chart."""


class Watched:
    """One server."""

    def __init__(self, address: Address, interval_s: float) -> None:
        self.address = address
        self.history = History()
        self._timelines = [Timeline(interval_s * zoom) for zoom in ZOOMS]

    def take(self, answer: Answer) -> None:
        if isinstance(answer.outcome, BaseException):
            raise answer.outcome
        if not isinstance(answer.outcome, Reading):
            self.history.fail(answer.outcome)
        elif step := self.history.add(answer.outcome):
            for timeline in self._timelines:
                timeline.add(step)

    def view(self, now_s: float, waiting_s: float = 0.0, zoom: int = 0) -> ServerView:
        history, reading = self.history, self.history.reading
        problem = history.problem
        if reading is None:
            problem_s = now_s - history.problem_since_s if problem else 0.0
            return ServerView(self.address.name, problem, problem_s, waiting_s)
        # While it answers, a chart ends with its last answer: the time since then is not yet a gap.
        end_s = now_s if problem else reading.at_s
        return ServerView(
            self.address.name,
            problem,
            now_s - history.problem_since_s if problem else 0.0,
            waiting_s,
            Summary.of(history, now_s),
            tuple((engine, Summary.of(history, now_s, engine)) for engine in reading.engines),
            None if reading.started_at is None or problem else max(0.0, time() - reading.started_at),
            None if history.restarted_s is None else now_s - history.restarted_s,
            tuple(self._timelines[zoom].until(end_s)),
        )


class Board:
    def __init__(self, addresses: Sequence[Address], interval_s: float) -> None:
        self.servers = [Watched(address, interval_s) for address in addresses]
        self._interval_s = interval_s
        self._selected = 0
        self._zoom = 0

    def take(self, answer: Answer) -> None:
        self.servers[answer.server].take(answer)

    def press(self, key: Key) -> None:
        match key:
            case Key.UP:
                self._selected = max(0, self._selected - 1)
            case Key.DOWN:
                self._selected = min(len(self.servers) - 1, self._selected + 1)
            case Key.ZOOM:
                self._zoom = (self._zoom + 1) % len(ZOOMS)

    def screen(self, now_s: float, waiting_s: Sequence[float]) -> Screen:
        """`waiting_s` is for how long each server has not answered."""
        views = (
            server.view(now_s, waiting, self._zoom)
            for server, waiting in zip(self.servers, waiting_s, strict=True)
        )
        column_s = self._interval_s * ZOOMS[self._zoom]
        clock = strftime("%H:%M:%S", localtime())
        return Screen(tuple(views), self._selected, self._interval_s, column_s, clock)
