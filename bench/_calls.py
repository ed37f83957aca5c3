"""Where an engine's time goes before the first tokens: `gpu_peers.py --calls`.

Calls of vLLM's scheduler and model runner and of the connector are timed in the engine's own process, with every
collection of garbage there. A clock that all processes share says which of them lie between the start of a phase
and its last first token. To time them takes a microsecond each, so times with `--calls` are not for the table.

Calls lie in each other, so their times do not add up: those of the connector and of the cache manager in
schedule() and update_from_output(), or in execute_model(). A name that is not in the table was not called, or was
in another process, as all of the scheduler's are where a worker has one of its own.
"""

from __future__ import annotations

import functools
import gc
import importlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from _bytes import Blocks

Call = tuple[str, float, float]
"""What was called, and from when to when."""

_VLLM = (
    ("vllm.v1.engine.core", "EngineCore", ("preprocess_add_request",)),
    ("vllm.v1.core.sched.scheduler", "Scheduler", ("schedule", "update_from_output")),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("get_computed_blocks", "allocate_slots")),
)
_RUNNER = ("execute_model", "sample_tokens", "add_requests", "prepare_inputs", "prepare_attn")
_CONNECTOR = (
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "bind_connector_metadata",
    "get_finished",
    "get_kv_connector_stats",
)


class Calls(Blocks):
    """As Blocks: methods that a worker of vLLM gets besides its own. Calls of the scheduler are timed if it is in
    the same process, as it is with one GPU."""

    def watch_calls(self) -> None:
        """Begin to time calls: of those methods that this release has."""
        self._calls: list[Call] = []
        for module, owner, methods in _VLLM:
            self._watch(getattr(importlib.import_module(module), owner), methods, "")
        self._watch(type(self.model_runner), _RUNNER, "runner.")  # type: ignore[attr-defined]
        if (connector := _connector()) is not None:
            self._watch(type(connector), _CONNECTOR, "connector.")
        began: dict[int, float] = {}

        def collects(phase: str, info: Mapping[str, int]) -> None:
            generation = info["generation"]
            if phase == "start":
                began[generation] = time.perf_counter()
            elif generation in began:
                self._calls.append((f"gc {generation}", began.pop(generation), time.perf_counter()))

        gc.callbacks.append(collects)

    def take_calls(self) -> list[Call]:
        """Those since the last time."""
        calls, self._calls = self._calls, []
        return calls

    def _watch(self, owner: type, methods: Iterable[str], prefix: str) -> None:
        for name in methods:
            if hasattr(owner, name):
                setattr(owner, name, self._timed(getattr(owner, name), prefix + name))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._calls.append((name, began, time.perf_counter()))

        return timed


def _connector() -> object | None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return get_kv_transfer_group() if has_kv_transfer_group() else None


def until_first_tokens(calls: Sequence[Call], phases: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """By name, over the phases: the median of how many there were before the last first token of a phase, and of
    how many milliseconds they took together."""
    windows = [(each["at"], each["last_first_token_at"]) for each in phases]
    found: dict[str, list[tuple[int, float]]] = defaultdict(lambda: [(0, 0.0)] * len(windows))
    for name, began, ended in calls:
        for number, (start, end) in enumerate(windows):
            if start <= began < end:
                count, seconds = found[name][number]
                found[name][number] = count + 1, seconds + ended - began
    return {
        name: {
            "calls": statistics.median(count for count, _ in of_each),
            "ms": 1000 * statistics.median(seconds for _, seconds in of_each),
            "mean_ms": 1000 * statistics.fmean(seconds for _, seconds in of_each),
        }
        for name, of_each in found.items()
    }


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table for each workload: calls down, engines across."""
    told = [row for row in rows if row.get("calls")]
    table: list[str] = []
    for workload in dict.fromkeys(name for row in told for name in row["calls"]):
        some = [row for row in told if workload in row["calls"]]
        names = dict.fromkeys(name for row in some for name in row["calls"][workload])
        table += ["", f"{workload}, until the last first token: ms, mean of its phases in brackets, and calls"]
        table.append(" " * 32 + "".join(f"{row['label']:>26}" for row in some))
        for name in names:
            cells = [row["calls"][workload].get(name) for row in some]
            table.append(f"{name:<32}" + "".join(f"{_cell(cell):>26}" for cell in cells))
    return table


def _cell(of: Mapping[str, float] | None) -> str:
    return "-" if of is None else f"{of['ms']:.2f} ({of['mean_ms']:.2f}) x{of['calls']:.0f}"
