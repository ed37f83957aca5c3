"""A terminal of a known size, in tmux: what is typed, and what is on the screen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import pytest

from tests.cli.builders import ROOT

needs_tmux = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux is not installed, and draws these screens"
)
PATIENCE_S = 60.0
_PROMPT = "ready>"


class Tmux:
    """A shell in a window. Nothing of the user's own tmux is touched."""

    def __init__(self, width: int, height: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-tmux-")  # names of sockets must be short
        self._size = width, height

    def _run(self, *arguments: str) -> str:
        environment = {key: value for key, value in os.environ.items() if key not in ("TMUX", "NO_COLOR")}
        command = ["tmux", "-u", "-S", str(Path(self._folder.name) / "socket"), *arguments]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE_S
        ).stdout

    def top(self, *arguments: str, **environment: str) -> None:
        """Types the command. Its exit code will be in $code."""
        settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
        command = shlex.join([sys.executable, "-W", "error", "-m", "forebay.cli", "top", *arguments])
        self.type(f"{settings} {command}; code=$?")

    def type(self, line: str) -> None:
        self._run("send-keys", "-l", line)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._run("resize-window", "-x", str(width), "-y", str(height))

    def screen(self, *, escapes: bool = False) -> str:
        return self._run("capture-pane", "-p", *(["-e"] if escapes else []))

    def flags(self) -> str:
        """What an application can leave behind: another screen, no cursor, no wrapping, other modes of keys."""
        names = ("alternate_on", "cursor_flag", "wrap_flag", "insert_flag", "keypad_flag", "mouse_any_flag")
        return self._run("display-message", "-p", " ".join(f"#{{{name}}}" for name in names)).strip()

    def tty(self) -> str:
        return self._run("display-message", "-p", "#{pane_tty}").strip()

    def child(self) -> int:
        """The process that the shell waits for."""
        shell = self._run("display-message", "-p", "#{pane_pid}").strip()
        return int(Path(f"/proc/{shell}/task/{shell}/children").read_text().split()[0])

    def wait_for(self, done: Callable[[str], object]) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not done(screen := self.screen()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {PATIENCE_S:.0f} s; on the screen was:\n{screen}")
            time.sleep(0.05)
        return screen

    def wait_for_prompt(self) -> str:
        return self.wait_for(lambda screen: screen.rstrip().endswith(_PROMPT))

    def ask(self, command: str) -> str:
        """What a command prints, when the shell has the terminal."""
        self.type("clear")
        self.wait_for(lambda screen: screen.strip() == _PROMPT)
        self.type(command)
        self.wait_for(lambda screen: len(re.findall(_PROMPT, screen)) == 2)
        return "\n".join(self.screen().rstrip().splitlines()[1:-1])

    def __enter__(self) -> Self:
        width, height = self._size
        try:
            self._run("-f", os.devnull, "new-session", "-d", "-x", str(width), "-y", str(height), "sh")
            self._run("set", "-g", "status", "off")
            self.resize(width, height)
            self.type(f"PS1='{_PROMPT}' PYTHONPATH={shlex.quote(str(ROOT))}; export PYTHONPATH; clear")
            self.wait_for(lambda screen: screen.strip() == _PROMPT)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._run("kill-server")
        self._folder.cleanup()
