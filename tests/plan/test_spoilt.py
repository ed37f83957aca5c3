"""Whatever is wrong with a file: one line says so, or all that is read of it is a trace."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest

from forebay.errors import ForebayError
from forebay.plan.traces import open_trace
from forebay.recording import Recorder

ASKED = {"messages": [{"role": "user", "content": ["hi", {"type": "image_url", "image_url": {"url": "x"}}]}]}
ANSWERED = {"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 3}}
TRACES: dict[str, list[dict[str, Any]]] = {
    "hashes": [
        {"timestamp": n, "input_length": 600 + n, "output_length": 5, "hash_ids": [0, n]} for n in range(1, 6)
    ],
    "texts": [{"timestamp": 1760428258635837 + n, "input": "abc" * 30, "output": "x"} for n in range(5)],
    "log": [{"created": n, "request": json.dumps(ASKED), "response": ANSWERED} for n in range(5)],
    "tokens": [{"timestamp": f"2026-01-01T00:00:0{n}Z", "body": {"prompt": [1, 2, 3]}} for n in range(5)],
    "recording": [],
}
VALUE = re.compile(rb'"[^"]*"|-?\d+(?:\.\d+)?|\[[^\[\]]*\]|\{[^{}]*\}')
OTHERS = [
    b"null",
    b"true",
    b"-1",
    b"1e999",
    b"1e308",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b"[[",
    b"9" * 30,
    b"\n",
    b"\xff",
]


def spoil(data: bytes, draw: Random) -> bytes:
    """Another value, another byte, or something missing; up to three times."""
    for _ in range(draw.randrange(1, 4)):
        at = draw.randrange(len(data) + 1)
        match draw.randrange(3):
            case 0 if values := [*VALUE.finditer(data)]:
                value = draw.choice(values)
                data = data[: value.start()] + draw.choice(OTHERS) + data[value.end() :]
            case 1:
                data = data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :]
            case _:
                data = data[:at] + data[at + draw.randrange(30) :]
    return data


@pytest.mark.parametrize("kind", TRACES)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_spoilt_file_gives_a_line_or_a_trace(tmp_path: Path, kind: str, name: str) -> None:
    if kind == "recording":
        recorder = Recorder(tmp_path / "recorded", 4)
        for number in range(5):
            request = recorder.arrived(9, [bytes([number]) * 32, bytes([number + 1]) * 32])
            assert request
            recorder.ended(request, 12)
        recorder.close()
        right = recorder.path.read_bytes()
    else:
        right = b"".join(json.dumps(record).encode() + b"\n" for record in TRACES[kind])
    draw, path, read, refused = Random(kind), tmp_path / name, 0, list[str]()
    for _ in range(200):
        spoilt = spoil(right, draw)
        if name.endswith(".gz"):
            spoilt = gzip.compress(spoilt)
            spoilt = spoil(spoilt, draw) if draw.random() < 0.5 else spoilt
        path.write_bytes(spoilt)
        for skip in (False, True):
            try:
                trace = open_trace(path, skip_bad_lines=skip)
                requests = [*trace]
            except ForebayError as error:
                refused.append(str(error))
                continue
            read += 1
            assert [request.time_s for request in requests] == sorted(request.time_s for request in requests)
            for request in requests:
                assert len(request.prefixes) == -(-request.input_tokens // trace.block_tokens)
                assert all(0 <= each < 1 << 64 for each in request.prefixes)
    assert read > 50
    assert len(refused) > 50
    for message in refused:
        assert message.startswith(str(path))
        assert "\n" not in message
