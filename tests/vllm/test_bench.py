"""The benches that need a GPU run here too, small: there they must work the first time."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from forebay.vllm import SimpleCPUOffloadConnector
from tests.vllm.families import LLAMA
from tests.vllm.harness import Engine, prompts

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, record: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench" / script), "--device", "cpu", "--json", str(record), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def test_peers(tmp_path: Path) -> None:
    arguments = ("--only", "forebay-eager", "--no-cold-start", "--calls")
    record = run("gpu_peers.py", *arguments, record=tmp_path / "peers.json")
    (row,) = record["rows"]
    assert row["problem"] is None, row["tail"]
    first, *repeats = row["workloads"]["documents"]
    assert first["share_cached"] == 0
    assert all(each["share_cached"] > 0.95 for each in repeats)
    assert [len(row["workloads"][name]) for name in ("documents", "chat", "miss", "fits")] == [3, 3, 2, 2]
    assert row["came_back"]["right"] == row["came_back"]["cached"] > 90, "of four documents of 24 blocks and a bit"
    for workload in ("documents", "fits"):
        for call in ("runner.execute_model", "connector.bind_connector_metadata"):
            assert row["calls"][workload][call]["calls"] >= 1
    assert row["start_s"] > 0
    assert row["resident_bytes"] > record["shape"]["host_bytes"]


def test_peers_in_turns(tmp_path: Path) -> None:
    arguments = ("--in-turns", "--only", "none,forebay-lazy", "--workloads", "fits")
    record = run("gpu_peers.py", *arguments, record=tmp_path / "peers.json")
    assert [(row["engine"], row["problem"]) for row in record["rows"]] == [("none", None), ("forebay-lazy", None)]
    spans = []
    for row in record["rows"]:
        spans += [(each["at"], each["at"] + each["seconds"], row["engine"]) for each in row["workloads"]["fits"]]
    spans.sort()
    assert all(ended < began for (_, ended, _), (began, _, _) in pairwise(spans)), "one works, the other waits"
    assert [name for *_, name in spans] == ["none", "forebay-lazy", "forebay-lazy", "none"]


def test_calls_of_a_scheduler_in_the_same_process_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one GPU it is; on a CPU vLLM gives a worker a process of its own, unless it is in ours."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    calls = importlib.import_module("_calls")
    monkeypatch.setattr(gc, "callbacks", [])
    for module, owner, methods in calls._VLLM:
        of = getattr(importlib.import_module(module), owner)
        for name in methods:
            monkeypatch.setattr(of, name, getattr(of, name))  # and back at the end
    for name in calls._CONNECTOR:
        monkeypatch.setattr(SimpleCPUOffloadConnector, name, getattr(SimpleCPUOffloadConnector, name))
    with Engine(LLAMA, {"cpu_bytes_to_use": "12MB"}) as engine:
        worker = calls.Calls()
        worker.model_runner = None
        worker.watch_calls()
        engine.generate(prompts(3))
        counted = Counter(name for name, _, _ in worker.take_calls())
    for name in ("preprocess_add_request", "get_computed_blocks", "connector.get_num_new_matched_tokens"):
        assert counted[name] == 3, "one for each prompt"
    assert counted["schedule"] >= counted["connector.build_connector_meta"] >= counted["update_from_output"] >= 8


def test_answers(tmp_path: Path) -> None:
    record = run("gpu_answers.py", "--only", "eager", "--answers", "60", record=tmp_path / "answers.json")
    assert record["bad"] == []
    assert [(row["variant"], row["wrong"]) for row in record["rows"]][2:] == [("eager", 0)]
    assert record["rows"][2]["counters"]["loaded_blocks"] > 50
