"""A real Prometheus in a process of its own, that scrapes one server."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.vllm.server import ROOT, free_port, wait_for

START_S = 60.0
END_S = 30.0


class Prometheus:
    """With the configuration that `ops` shows, for another server and every second."""

    def __init__(self, program: Path, folder: Path, server: str) -> None:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        config = folder / "prometheus.yml"
        config.write_text(_config(server))
        command = [
            *(str(program), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"),
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with self._log.open("w") as log:
            self.process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self._is_ready() or self.process.poll() is not None,
            START_S,
            "Prometheus to be ready",
            self.log,
        )
        assert self.process.poll() is None, self.log()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def now(self, query: str) -> list[float]:
        """The value of each series."""
        found = self._ask("query", query=query)["result"]
        return [float(series["value"][1]) for series in found]

    def since(self, start: float, query: str) -> list[float]:
        """All values from then until now, second by second, without what is not a number: nothing per nothing."""
        found = self._ask("query_range", query=query, start=start, end=time.time(), step=1)["result"]
        values = [float(value) for series in found for _, value in series["values"]]
        return [value for value in values if math.isfinite(value)]

    def label_values(self, label: str, series: str) -> list[str]:
        return list(self._ask(f"label/{label}/values", **{"match[]": series}))

    def _ask(self, what: str, **parameters: Any) -> Any:
        address = f"{self._url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_S)


def _config(server: str) -> str:
    text = (ROOT / "ops" / "prometheus.yml").read_text()
    for shown, here in ((r"scrape_interval: \w+", "scrape_interval: 1s"), (r"localhost:8000", server)):
        text, times = re.subn(shown, here, text)
        assert times == 1, shown
    return text
