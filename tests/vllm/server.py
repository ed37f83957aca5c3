"""`vllm serve` in processes of its own, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
START_S = 240.0  # alone on two cores it takes 40
END_S = 30.0
SHARED_MEMORY = Path("/dev/shm")
_ZOMBIE = "Z"
_RANDOM = re.compile(
    r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}|(?<=psm_)[0-9a-f]{8}|(?<=mp-)[0-9a-z_]{8}"
)


class Server:
    """`offload` is what a user writes as kv_connector_extra_config, None is no connector."""

    def __init__(
        self,
        model: str,
        folder: Path,
        *arguments: str,
        offload: dict[str, Any] | None = None,
        load_failure_policy: str | None = "recompute",
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # Not in `folder`: names of sockets must be short.
        self._temporary = tempfile.TemporaryDirectory(prefix="forebay-server-")
        self._log = folder / "log"
        self._used: set[str] = set()
        program = Path(sys.executable).with_name("vllm")
        command = [str(program), "serve", model, "--port", str(self.port), *arguments]
        if offload is not None:
            settings = {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_module_path": "forebay.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": offload,
            }
            if load_failure_policy is not None:
                settings["kv_load_failure_policy"] = load_failure_policy
            command += ["--kv-transfer-config", json.dumps(settings)]
        with self._log.open("w") as log:
            # A session of its own: whatever it starts can be told from everything else on this machine.
            self.process = subprocess.Popen(
                command, cwd=folder, env=self._environment(), stdout=log, stderr=log, start_new_session=True
            )

    def _environment(self) -> dict[str, str]:
        environment = os.environ | {
            "TMPDIR": self._temporary.name,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_LOG_STATS_INTERVAL": "1",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # a server has several processes
        return environment

    # --- while it runs -----------------------------------------------------------------------------

    def wait_until_ready(self) -> None:
        wait_for(
            lambda: self._is_ready() or self.process.poll() is not None,
            START_S,
            "the server to be ready",
            self.log,
        )
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return True
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    def metric(self, name: str) -> float:
        """A counter from /metrics, with all its labels together; 0 if it is not there."""
        from prometheus_client.parser import text_string_to_metric_families

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log().splitlines() if text in line]

    def processes(self) -> set[int]:
        """All that live in its session."""
        return {pid for pid, state, session in _processes() if session == self.process.pid and state != _ZOMBIE}

    # --- the end -------------------------------------------------------------------------------------

    def terminate(self) -> None:
        """As a user or a supervisor does it: SIGTERM to the process that they started."""
        self._used = self._shared_memory()
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to all of vLLM at once. Python's tracker of shared memory stays, as it does when the kernel has
        no memory left: it removes the names that it was told of, then ends by itself."""
        self._used = self._shared_memory()
        for pid in self.processes():
            with suppress(OSError):  # it has just ended
                if b"multiprocessing.resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)

    def wait(self, patience_s: float = END_S) -> int:
        """Until nothing of it runs any more. Returns the exit code."""
        code = self.process.wait(patience_s)
        wait_for(lambda: not self.processes(), patience_s, "all of the server to end", self.log)
        return code

    def left_in_shared_memory(self) -> Counter[str]:
        """By kind: what its processes used before they were told to end, and what still has a name. Other programs
        come and go there meanwhile."""
        return _kinds(name for name in self._used if (SHARED_MEMORY / name).exists())

    def left_in_temporary_folder(self) -> Counter[str]:
        """By kind. The folder is its own."""
        folder = Path(self._temporary.name)
        return _kinds(str(path.relative_to(folder)) for path in folder.rglob("*"))

    def _shared_memory(self) -> set[str]:
        """Names in /dev/shm that its processes have mapped or open."""
        used: set[str] = set()
        for pid in self.processes():
            with suppress(OSError):  # it has just ended
                used.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    path = Path(os.readlink(file))
                    if path.parent == SHARED_MEMORY:
                        used.add(path.name)
        return used

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.processes():
            self.kill()
            self.wait()
        self._temporary.cleanup()


def _kinds(names: Iterable[str]) -> Counter[str]:
    """Names that differ only in what was drawn at random are of one kind."""
    return Counter(_RANDOM.sub("*", name) for name in names)


def wait_for(done: Callable[[], bool], patience_s: float, what: str, log: Callable[[], str]) -> None:
    deadline = time.monotonic() + patience_s
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s:.0f} s for {what}; the server said:\n{log()}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        return int(chosen.getsockname()[1])


def _processes() -> Iterator[tuple[int, str, int]]:
    """Everything on this machine: id, state, session."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has just ended
                state, _, _, session, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), state, int(session)
