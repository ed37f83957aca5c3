"""The benches that need a GPU run here too, small: there they must work the first time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(script: str, *arguments: str, record: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "bench" / script), "--device", "cpu", "--json", str(record), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(record.read_text())
    return found


def test_peers(tmp_path: Path) -> None:
    record = run("gpu_peers.py", "--only", "forebay-eager", "--no-cold-start", record=tmp_path / "peers.json")
    (row,) = record["rows"]
    assert row["problem"] is None, row["tail"]
    first, *repeats = row["workloads"]["documents"]
    assert first["share_cached"] == 0
    assert all(each["share_cached"] > 0.95 for each in repeats)
    assert [len(row["workloads"][name]) for name in ("documents", "chat", "miss", "fits")] == [3, 3, 2, 2]
    assert row["came_back"]["right"] == row["came_back"]["cached"] > 90, "of four documents of 24 blocks and a bit"
    assert row["start_s"] > 0
    assert row["resident_bytes"] > record["shape"]["host_bytes"]


def test_answers(tmp_path: Path) -> None:
    record = run("gpu_answers.py", "--only", "eager", "--answers", "60", record=tmp_path / "answers.json")
    assert record["bad"] == []
    assert [(row["variant"], row["wrong"]) for row in record["rows"]][2:] == [("eager", 0)]
    assert record["rows"][2]["counters"]["loaded_blocks"] > 50
