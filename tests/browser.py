"""A real Chromium without a screen, told what to do through a pipe (its DevTools protocol)."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_DEADLINE_S = 120.0
_HEARD = ("Network.requestWillBeSent", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")


class Browser:
    """One window."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-browser-", ignore_cleanup_errors=True)
        to_child, self._writing = os.pipe()
        self._reading, from_child = os.pipe()
        # It reads from 3 and writes to 4. A shell puts the pipes there.
        line = f'exec "$0" "$@" 3<&{to_child} 4>&{from_child} {to_child}<&- {from_child}>&-'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options += ["--disable-background-networking", "--no-first-run", f"--user-data-dir={self._folder.name}"]
        self._process = subprocess.Popen(
            ["bash", "-c", line, CHROMIUM, *options],
            pass_fds=(to_child, from_child),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._folder.name},
            start_new_session=True,
        )
        os.close(to_child)
        os.close(from_child)
        self._unread, self._calls, self._session = b"", 0, ""
        self.heard: list[tuple[str, dict[str, Any]]] = []
        """Requests, and what went to the console, since the last page was opened."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()
        os.close(self._writing)
        os.close(self._reading)
        self._folder.cleanup()

    def open(self, page: Path, *, width: int, dark: bool = False, media: str = "screen") -> None:
        self.heard.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        self.call("Page.navigate", url=page.as_uri())
        deadline = time.monotonic() + _DEADLINE_S
        while self.value("location.href + document.readyState") != page.as_uri() + "complete":
            assert time.monotonic() < deadline, "the page does not come"

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            heard = self._next()
            if heard.get("id") == self._calls:
                assert "error" not in heard, heard
                result: dict[str, Any] = heard["result"]
                return result
            if heard.get("method") in _HEARD:
                self.heard.append((heard["method"], heard["params"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            assert select.select([self._reading], [], [], _DEADLINE_S)[0], "Chromium does not answer"
            new = os.read(self._reading, 1 << 16)
            assert new, "Chromium has ended"
            self._unread += new
        message, _, self._unread = self._unread.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard
