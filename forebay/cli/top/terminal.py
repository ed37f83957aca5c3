"""The terminal while it is ours: a screen of its own, keys one by one, and all as it was when we leave.

Plain escape sequences, those that every terminal of the last decades has: no database that may not know this
terminal has to be asked.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import termios
import tty
from contextlib import suppress
from enum import Enum, auto
from types import FrameType
from typing import Any, Self

_ENTER = "\033[?1049h\033[?25l\033[?7l\033[2J"  # the other screen, no cursor, no line continues on the next
_LEAVE = "\033[0m\033[?7h\033[?25h\033[?1049l"
# Where a terminal knows them, it shows what is between these at once.
_BEGIN, _END = "\033[?2026h", "\033[?2026l"
_USUAL = (80, 24)


class Key(Enum):
    QUIT = auto()
    UP = auto()
    DOWN = auto()
    ZOOM = auto()
    REDRAW = auto()


_KEYS = {
    b"q": Key.QUIT,
    b"Q": Key.QUIT,
    b"k": Key.UP,
    b"j": Key.DOWN,
    b"z": Key.ZOOM,
    b"\f": Key.REDRAW,
    b"\033[A": Key.UP,
    b"\033OA": Key.UP,
    b"\033[B": Key.DOWN,
    b"\033OB": Key.DOWN,
}


class Keys:
    """Bytes in, keys out. A sequence may come in pieces."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, data: bytes) -> list[Key]:
        keys = []
        for byte in data:
            self._begun += bytes([byte])
            if _is_begin_of_sequence(self._begun):
                continue
            if key := _KEYS.get(self._begun):
                keys.append(key)
            self._begun = b""
        return keys


def _is_begin_of_sequence(data: bytes) -> bool:
    """ESC, then `O` and one more, or `[`, parameters and one from `@` to `~`."""
    if data in (b"\033", b"\033O", b"\033["):
        return True
    return data.startswith(b"\033[") and not 0x40 <= data[-1] <= 0x7E and len(data) < 16


class Terminal:
    """`keys` is the file that keys come from, None if that is not a terminal."""

    def __init__(self, output: int, keys: int | None) -> None:
        self._output = output
        self._keys = keys
        self._before: list[Any] | None = None
        self._shown: list[str] = []
        self._size = (0, 0)

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_back()

    def take(self) -> None:
        if self._keys is not None:
            self._before = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        self._write(_ENTER)
        self.forget()

    def give_back(self) -> None:
        with suppress(OSError):  # it may be gone: then nothing of it is left to be put right
            self._write(_LEAVE)
        if self._keys is not None and self._before is not None:
            with suppress(OSError, termios.error):
                termios.tcsetattr(self._keys, termios.TCSADRAIN, self._before)
            self._before = None

    def size(self) -> tuple[int, int]:
        try:
            columns, lines = os.get_terminal_size(self._output)
        except OSError:
            return _USUAL
        # Some that do not know it say 0.
        return (columns or _USUAL[0], lines or _USUAL[1])

    def forget(self) -> None:
        """Somebody else may have written on it: the next time, all of it is written anew."""
        self._shown = []

    def show(self, lines: list[str], size: tuple[int, int]) -> None:
        """Writes the lines that have changed, all at once. If the screen has another size, that is all of them."""
        if size != self._size:
            self._size = size
            self.forget()
        parts = [] if self._shown else ["\033[2J"]
        for number, line in enumerate(lines):
            if number >= len(self._shown) or self._shown[number] != line:
                # What is behind is taken away first: at the last column, terminals differ in what `behind` is.
                parts.append(f"\033[{number + 1};1H\033[K{line}")
        if parts:
            self._write("".join([_BEGIN, *parts, _END]))
        self._shown = lines

    def _write(self, text: str) -> None:
        data = text.encode("utf-8", "replace")
        while data:
            try:
                data = data[os.write(self._output, data) :]
            except BlockingIOError:  # whoever had the terminal before may have left it like that
                select.select([], [self._output], [])


class Signals:
    """Signals as something to wait for, and not as something that happens in the middle of a line."""

    _WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH, signal.SIGTSTP, signal.SIGCONT)

    def __init__(self) -> None:
        self._came: list[int] = []
        self._before: dict[int, Any] = {}
        self._awake, self._waker = socket.socketpair()

    def __enter__(self) -> Self:
        for each in (self._awake, self._waker):
            each.setblocking(False)
        for number in self._WATCHED:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._awake.close()
        self._waker.close()

    def fileno(self) -> int:
        """Can be read when a signal has come, or wake() was called."""
        return self._awake.fileno()

    def wake(self) -> None:
        """From any thread."""
        with suppress(BlockingIOError):  # it is awake
            self._waker.send(b"\0")

    def take(self) -> list[int]:
        """What has come since the last time."""
        with suppress(BlockingIOError):
            while self._awake.recv(4096):
                pass
        came, self._came = self._came, []
        return came

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        self.wake()


def stop_here() -> None:
    """As Ctrl-Z does. Returns when somebody lets us go on."""
    os.kill(os.getpid(), signal.SIGSTOP)
