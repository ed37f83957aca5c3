"""The loop: waits for answers, keys, signals and the next second, and shows what has become of them."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence
from queue import Empty
from time import monotonic

from forebay.cli.top.board import Board
from forebay.cli.top.canvas import Look
from forebay.cli.top.draw import frame
from forebay.cli.top.scrape import Address, Scrapers
from forebay.cli.top.terminal import Key, Keys, Signals, Terminal, stop_here

_TICK_S = 1.0
_ENDINGS = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGHUP: 128 + signal.SIGHUP}
"""Exit codes. Ctrl-C is one of the ways to leave, and no failure."""


def watch(addresses: Sequence[Address], interval_s: float, output: int, keys: int | None, look: Look) -> int:
    board = Board(addresses, interval_s)
    # Woken threads are told of the end first, then the terminal is given back, then signals are as before.
    with (
        Signals() as signals,
        Terminal(output, keys) as terminal,
        Scrapers(addresses, interval_s, wake=signals.wake) as scrapers,
    ):
        return _Loop(board, signals, terminal, scrapers, keys, look).run()


class _Loop:
    def __init__(
        self,
        board: Board,
        signals: Signals,
        terminal: Terminal,
        scrapers: Scrapers,
        keys: int | None,
        look: Look,
    ) -> None:
        self._board = board
        self._signals = signals
        self._terminal = terminal
        self._scrapers = scrapers
        self._input = keys
        self._keys = Keys()
        self._look = look

    def run(self) -> int:
        while True:
            self._take_answers()
            try:
                self._show()
                ended = self._wait()
            except OSError:  # the terminal is gone, and the signal that says so is on its way
                return _ENDINGS[signal.SIGHUP]
            if ended is not None:
                return ended

    def _take_answers(self) -> None:
        while True:
            try:
                self._board.take(self._scrapers.answers.get_nowait())
            except Empty:
                return

    def _show(self) -> None:
        size, now_s = self._terminal.size(), monotonic()
        screen = self._board.screen(now_s, self._scrapers.waiting_s(now_s))
        self._terminal.show(frame(screen, *size, self._look), size)

    def _wait(self) -> int | None:
        """For whatever comes first. An exit code ends it all."""
        waited = [self._signals.fileno(), *([] if self._input is None else [self._input])]
        ready, _, _ = select.select(waited, [], [], _TICK_S)
        for number in self._signals.take():
            if number in _ENDINGS:
                return _ENDINGS[signal.Signals(number)]
            if number == signal.SIGTSTP:
                self._terminal.give_back()
                stop_here()
                self._terminal.take()
            if number == signal.SIGCONT:
                self._terminal.forget()
        if self._input in ready and self._input is not None:
            return self._read(self._input)
        return None

    def _read(self, source: int) -> int | None:
        data = os.read(source, 1024)
        if not data:  # the terminal is gone
            return _ENDINGS[signal.SIGHUP]
        for key in self._keys.feed(data):
            if key is Key.QUIT:
                return 0
            if key is Key.REDRAW:
                self._terminal.forget()
            self._board.press(key)
        return None
