from __future__ import annotations

import json
from pathlib import Path

from forebay.plan.traces import open_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 250, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 250, "input_length": 512, "output_length": 7, "hash_ids": [0]},
]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return path


def test_a_mooncake_trace_gives_its_requests(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "mooncake.jsonl", *MOONCAKE))
    first, second, third = trace
    assert trace.block_tokens == 512
    assert [request.time_s for request in (first, second, third)] == [0, 0.25, 0.25]
    assert [request.input_tokens for request in (first, second, third)] == [1100, 1600, 512]
    assert [request.output_tokens for request in (first, second, third)] == [5, 0, 7]
    assert first.prefixes[:2] == second.prefixes[:2]
    assert not {*first.prefixes[2:]} & {*second.prefixes[2:]}
    assert third.prefixes == first.prefixes[:1]
    assert [*trace] == [first, second, third]
