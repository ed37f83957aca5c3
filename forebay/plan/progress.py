"""How far a command is: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import time
from typing import TextIO

_BAR = 30
_CLEAR = "\r\033[K"
_BAR_EVERY_S, _LINE_EVERY_S = 0.1, 10.0


class Progress:
    def __init__(self, stream: TextIO, command: str) -> None:
        self._stream, self._command = stream, command
        self._bar = stream.isatty()
        self._last = time.monotonic()
        self._drawn = False

    def show(self, what: str, share: float) -> None:
        """Cheap: most calls only look at the clock."""
        now = time.monotonic()
        if now - self._last < (_BAR_EVERY_S if self._bar else _LINE_EVERY_S):
            return
        self._last = now
        share = min(max(share, 0.0), 1.0)
        if self._bar:
            done = int(share * _BAR)
            self._stream.write(f"{_CLEAR}{what:<18} [{'#' * done}{'.' * (_BAR - done)}] {share:4.0%}")
            self._drawn = True
        else:
            self._stream.write(f"{self._command}: {what}, {share:.0%}\n")
        self._stream.flush()

    def clear(self) -> None:
        if self._drawn:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._drawn = False
