from __future__ import annotations

import gzip
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import ConfigError, FullAttention, KVLayout, Mode, Recurrent, SlidingWindow, TraceError
from forebay.plan.models import load_model
from forebay.plan.run import Wanted, plan
from forebay.plan.text import as_text
from forebay.plan.traces import FileTrace, open_trace, recorded
from forebay.recording import Recorder
from forebay.settings import ConnectorSettings
from tests.builders import FULL, make_engine, prompt

LEAST = 1_000_000
A_FOLDER = "an absolute path to a folder, as text without NUL or half characters"


class Clock:
    def __init__(self) -> None:
        self.now = 1_763_208_000.0

    def __call__(self) -> float:
        self.now += 0.5
        return self.now


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(32, "big") for number in numbers]


def write(folder: Path, requests: int, *, seed: int = 0, blocks: int = 40, **settings: Any) -> list[list[bytes]]:
    """A recording of requests that end at once; what each had."""
    numbers = random.Random(seed)
    all_hashes = [hashes(*(numbers.getrandbits(200) for _ in range(blocks))) for _ in range(requests)]
    recorder = Recorder(folder, 16, max_waiting_hashes=1 << 40, **settings)
    for each in all_hashes:
        request = recorder.arrived(16 * len(each), each)
        assert request is not None
        recorder.ended(request, 16 * len(each) + 5)
    recorder.close()
    assert recorder.dropped == 0
    return all_hashes


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_what_was_recorded_is_read(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 16, clock=Clock())
    first = recorder.arrived(40, hashes(1, 2))
    second = recorder.arrived(48, hashes(1, 3, 4))
    third = recorder.arrived(7, [])
    assert first
    assert second
    assert third
    recorder.ended(second, 50)
    recorder.ended(first, 41)
    recorder.close()
    trace = open_trace(tmp_path)
    a, b, c = trace
    assert (trace.format, trace.block_tokens) == ("recording", 16)
    assert [request.time_s for request in (a, b, c)] == [0, 0.5, 1]
    assert [request.input_tokens for request in (a, b, c)] == [40, 48, 7]
    assert [request.output_tokens for request in (a, b, c)] == [1, 2, 0], "the third has not ended"
    assert [len(request.prefixes) for request in (a, b, c)] == [3, 3, 1]
    assert a.prefixes[0] == b.prefixes[0]
    assert len({*a.prefixes, *b.prefixes, *c.prefixes}) == 6
    assert [*trace] == [a, b, c]
    assert trace.bytes_read == trace.num_bytes


def test_nothing_of_a_request_is_in_the_files(tmp_path: Path) -> None:
    key = bytes(range(32))
    recorder = Recorder(tmp_path, 16)
    recorder.arrived(16, [key])
    recorder.close()
    data = recorder.path.read_bytes()
    assert key not in data
    assert key[:8].hex().encode() not in data
    assert {*json.loads(data.splitlines()[1])} == {"request", "time_s", "input_tokens", "ids"}


def test_ids_of_two_recordings_cannot_be_compared(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write(tmp_path / folder, 3)
    ids = [[request.prefixes for request in open_trace(tmp_path / folder)] for folder in ("a", "b")]
    assert not {each for row in ids[0] for each in row} & {each for row in ids[1] for each in row}


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(tmp_path / "folder", 2000, max_bytes=LEAST)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700
    parts = [*(tmp_path / "folder").iterdir()]
    assert {path.suffix for path in parts} == {".jsonl", ".gz"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in parts} == {0o600}


def test_parts_are_rotated_and_all_of_them_are_read(tmp_path: Path) -> None:
    written = write(tmp_path, 1000, max_bytes=8 * LEAST, blocks=200)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    assert [path.suffix for path in parts] == [".gz"] * (len(parts) - 1) + [".jsonl"]
    read = [*open_trace(tmp_path)]
    assert len(read) == len(written)
    assert {request.output_tokens for request in read} == {5}
    for path in parts[:-1]:
        with gzip.open(path) as file:
            assert len(file.read()) <= LEAST


def test_a_recording_never_takes_more_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at whenever files change: at every write, and while a part is compressed."""
    from forebay.recording import parts

    most = 0
    opened, write_line = parts._create, parts.Parts.write

    def look() -> None:
        nonlocal most
        most = max(most, num_bytes(tmp_path))

    def create(path: Path) -> Any:
        file = opened(path)
        close = file.close
        monkeypatch.setattr(file, "close", lambda: (close(), look()))
        return file

    def write_and_look(self: parts.Parts, record: dict[str, Any]) -> bool:
        self.flush()
        look()
        return write_line(self, record)

    monkeypatch.setattr(parts, "_create", create)
    monkeypatch.setattr(parts.Parts, "write", write_and_look)
    write(tmp_path, 4000, max_bytes=LEAST, blocks=100)
    assert LEAST // 2 < most <= LEAST
    kept = [*open_trace(tmp_path)]
    assert 400 < len(kept) < 4000
    assert {request.output_tokens for request in kept} == {5}


def test_the_oldest_goes_first_of_all_recordings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 100)
    old = {path.name for path in tmp_path.iterdir()}
    for path in tmp_path.iterdir():
        path.rename(path.with_name(path.name.replace("forebay-2", "forebay-1")))
    write(tmp_path, 1000, max_bytes=LEAST, blocks=100)
    assert len(old) == 1
    left = sorted(path.name for path in tmp_path.iterdir())
    assert not [name for name in left if name.startswith("forebay-1")]
    assert len({name.split("-")[2] for name in left}) == 1


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("forebay-notes.jsonl", "trace-2026.jsonl.gz", "forebay-20250101T000000Z.jsonl"):
        (tmp_path / name).write_text("{}\n" * 100_000)
    write(tmp_path, 1000, max_bytes=LEAST, blocks=100)
    assert len([path for path in tmp_path.iterdir() if path.read_bytes()[:3] == b"{}\n"]) == 3


def test_several_recordings_in_a_folder_are_merged(tmp_path: Path) -> None:
    for _ in range(3):
        write(tmp_path, 10)
    trace = open_trace(tmp_path)
    assert len([*trace]) == 30
    assert len({each for request in trace for each in request.prefixes}) == 3 * 10 * 40
    assert "3 recordings, merged by time: no prefix of one is a prefix of another" in trace.notes


def test_an_engine_that_nobody_asked_is_no_error(tmp_path: Path) -> None:
    Recorder(tmp_path, 16).close()
    with pytest.raises(TraceError, match=r"expected at least one request, got none that can be read$"):
        open_trace(tmp_path)
    write(tmp_path, 3)
    assert len([*open_trace(tmp_path)]) == 3


def test_an_end_that_is_far_away_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory stays bounded, and the order that of arrival."""
    monkeypatch.setattr(recorded, "_MAX_AHEAD", 10)
    recorder = Recorder(tmp_path, 16, clock=Clock())
    long = recorder.arrived(1, [])
    assert long
    for tokens in range(100, 150):
        request = recorder.arrived(tokens, hashes(*range(tokens // 16)))
        assert request
        recorder.ended(request, tokens + 1)
    recorder.ended(long, 1000)
    recorder.close()
    read = [*open_trace(tmp_path)]
    assert [request.input_tokens for request in read] == [1, *range(100, 150)]
    assert [request.output_tokens for request in read] == [0] + [1] * 50


@given(st.data())
def test_requests_come_in_the_order_of_arrival_however_they_end(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("order")
    recorder = Recorder(folder, 4, clock=Clock())
    running: dict[int, Any] = {}
    outputs: dict[int, int] = {}
    for number in range(data.draw(st.integers(1, 15))):
        running[number] = recorder.arrived(number + 1, hashes(*range((number + 1) // 4)))
        for ended in [each for each in running if data.draw(st.booleans())]:
            outputs[ended] = data.draw(st.integers(0, 9))
            recorder.ended(running.pop(ended), ended + 1 + outputs[ended])
    recorder.close()
    read = [*open_trace(folder)]
    assert [request.input_tokens for request in read] == [*range(1, len(read) + 1)]
    assert [request.output_tokens for request in read] == [outputs.get(number, 0) for number in range(len(read))]
    assert [request.time_s for request in read] == [0.5 * number for number in range(len(read))]


# --- when things go wrong --------------------------------------------------------------------------------


def test_a_clock_that_is_set_back_makes_no_bad_recording(tmp_path: Path) -> None:
    times = iter([100.0, 90.0, 101.0])
    recorder = Recorder(tmp_path, 16, clock=lambda: next(times))
    for _ in range(3):
        recorder.arrived(5, [])
    recorder.close()
    assert [request.time_s for request in open_trace(tmp_path)] == [0, 0, 1]


def test_a_request_is_in_the_file_before_the_next_one_comes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 16)
    request = recorder.arrived(16, hashes(1))
    assert request
    recorder.ended(request, 20)
    deadline = time.monotonic() + 60
    while recorder.path.read_bytes().count(b"\n") < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    (read,) = open_trace(tmp_path)
    assert read.output_tokens == 4
    recorder.close()


def test_what_was_written_before_a_kill_is_read(tmp_path: Path) -> None:
    """No close(), no warning: the process is gone between two requests."""
    script = f"""
import time
from forebay.recording import Recorder
recorder = Recorder({str(tmp_path)!r}, 16)
told = False
while True:
    request = recorder.arrived(160, [bytes([i]) * 32 for i in range(10)])
    recorder.ended(request, 165)
    time.sleep(0.0001)
    if not told and recorder.path.read_bytes().count(b"output_tokens") > 300:
        print("now", flush=True)
        told = True
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"now\n"
        process.send_signal(signal.SIGKILL)
    trace = open_trace(tmp_path)
    read = [*trace]
    assert len(read) > 300
    assert {request.output_tokens for request in read[:-1]} == {5}


def test_a_torn_last_line_is_none(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for cut in range(1, 33):
        path.write_bytes(whole[:-cut])
        trace = open_trace(tmp_path)
        assert len([*trace]) == 10
        assert trace.skipped == 0


@pytest.mark.parametrize("left", [b"", b'{"forebay_recording":1,"rec'])
def test_a_part_that_was_hardly_begun_is_none(tmp_path: Path, left: bytes) -> None:
    write(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    path.with_name(path.name.replace("000001", "000002")).write_bytes(left)
    path.with_name(path.name.replace("forebay-2", "forebay-1")).write_bytes(left)
    assert len([*open_trace(tmp_path)]) == 10


def test_a_torn_line_in_the_middle_is_named(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows[:5], rows[5][:20], *rows[6:]]) + "\n")
    with pytest.raises(TraceError, match=rf"^{path}:6: expected one JSON object, got "):
        [*open_trace(tmp_path)]
    trace = open_trace(tmp_path, skip_bad_lines=True)
    assert len([*trace]) == 9
    assert trace.skipped == 1


def test_a_truncated_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, 3000, max_bytes=8 * LEAST)
    path = min(tmp_path.iterdir())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(TraceError, match=r"got its end: the file is truncated$"):
        [*open_trace(tmp_path)]
    assert len([*open_trace(tmp_path, skip_bad_lines=True)]) > 2900


def test_a_part_that_was_left_both_ways_counts_once(tmp_path: Path) -> None:
    """Killed after a part was compressed and before the plain one was removed; or in the middle of it."""
    write(tmp_path, 10)
    (path,) = tmp_path.iterdir()
    (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    (tmp_path / f"{path.name}.gz.tmp").write_bytes(b"half")
    assert len([*open_trace(tmp_path)]) == 10


def test_a_part_may_be_compressed_after_it_was_found(tmp_path: Path) -> None:
    """The engine goes on while its recording is read."""
    write(tmp_path, 10)
    trace = open_trace(tmp_path)
    (path,) = tmp_path.iterdir()
    (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert len([*trace]) == 10


def test_a_recording_is_read_while_it_is_written(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 16, max_bytes=LEAST, max_waiting_hashes=1 << 40)
    read = 0
    for number in range(300):
        request = recorder.arrived(1600, hashes(*range(number, number + 100)))
        assert request
        recorder.ended(request, 1601)
        while number == 0 and recorder.path.read_bytes().count(b"\n") < 2:
            time.sleep(0.001)
        if number % 20 == 10:
            before, read = read, len([*open_trace(tmp_path)])
            assert 0 < read >= before
    recorder.close()
    assert len([*open_trace(tmp_path)]) == 300


def test_parts_of_another_block_size_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 3)
    Recorder(tmp_path, 32).close()
    with pytest.raises(TraceError, match=r":1: expected block_tokens (16|32), as in forebay-.*, got (16|32)$"):
        open_trace(tmp_path)
    with pytest.raises(ConfigError, match=r"^block_tokens: expected 16, as forebay-.* was recorded, got 512$"):
        open_trace(min(path for path in tmp_path.iterdir() if b":16}" in path.read_bytes()), block_tokens=512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda text: text.replace('"forebay_recording":1', '"forebay_recording":2'),
            "a recording of version 1, got 2",
        ),
        (lambda text: text.replace('"block_tokens":16', '"block_tokens":0'), "block_tokens of at least 1, got 0"),
        (
            lambda text: text.replace('"input_tokens":640', '"input_tokens":600'),
            "296 bytes of ids for 600 tokens, got 320",
        ),
        (lambda text: text.replace('"ids":"', '"ids":"!'), "ids in base64"),
        (lambda text: text.replace('"request":2,"time', '"request":1,"time'), "a number above 1, got 1"),
        (lambda text: text.replace('"time_s":', '"time_s":-'), "a time of at least"),
        (lambda text: text.replace('"output_tokens":5', '"output_tokens":-5'), "output_tokens as a whole number"),
    ],
)
def test_a_spoilt_recording_is_named(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    write(tmp_path, 3)
    (path,) = tmp_path.iterdir()
    path.write_text(change(path.read_text()))
    with pytest.raises(TraceError, match=r".*:\d+: expected ") as caught:
        [*open_trace(tmp_path)]
    assert message in str(caught.value)


def test_a_writer_that_cannot_keep_up_drops_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held = threading.Event()
    write_line = Recorder._write

    def wait(self: Recorder, entry: Any) -> None:
        assert held.wait(60)
        write_line(self, entry)

    monkeypatch.setattr(Recorder, "_write", wait)
    recorder = Recorder(tmp_path, 16, max_waiting_hashes=100)
    known = [recorder.arrived(160, hashes(*range(10))) for _ in range(50)]
    kept = [each for each in known if each is not None]
    assert len(kept) == 9
    assert recorder.dropped == 41
    for each in kept:
        recorder.ended(each, 161)
    held.set()
    recorder.close()
    trace = open_trace(tmp_path)
    assert len([*trace]) == 9
    assert trace.dropped == 41, "the recording knows"
    report = plan(trace, Wanted(load_model("llama-3.1-8b"), curve_only=True))
    assert "41 requests are missing from the recording" in " ".join(as_text(report).split())
    assert [each.message for each in caplog.records] == [
        "forebay: the recording cannot keep up: a request is not in it"
    ]


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from forebay.recording import parts

    def full(self: parts.Parts, record: dict[str, Any]) -> bool:
        raise OSError(28, "No space left on device")

    recorder = Recorder(tmp_path, 4)
    monkeypatch.setattr(parts.Parts, "write", full)
    engine = make_engine(recorder=recorder)
    engine.submit(prompt(12), 3)
    engine.run()
    recorder._thread.join(60)
    assert [each.message for each in caplog.records] == [
        "forebay: recording stops: [Errno 28] No space left on device"
    ]
    engine.submit(prompt(16), 3)
    engine.run()
    engine.check()
    recorder.close()
    recorder.close()
    assert recorder.dropped == 1


def test_a_request_too_long_for_the_bound_is_dropped(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 16, max_bytes=LEAST)
    recorder.arrived(16 * 20_000, hashes(*range(20_000)))
    assert recorder.arrived(16, hashes(1))
    recorder.close()
    trace = open_trace(tmp_path)
    assert [request.input_tokens for request in trace] == [16]
    assert trace.dropped == 1


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^record_trace: expected a folder to write to \(.*\), got '.*/file/x'$"
    ):
        Recorder(tmp_path / "file" / "x", 16)
    with pytest.raises(
        ConfigError, match=r"^record_trace: expected a folder to write to \(.*null.*\), got '/a\\x00b'$"
    ):
        Recorder("/a\0b", 16)
    with pytest.raises(ConfigError, match=r"^record_trace_bytes: expected at least 1,000,000 bytes, got 5$"):
        Recorder(tmp_path, 16, max_bytes=5)


# --- with an engine ----------------------------------------------------------------------------------------

HYBRID = KVLayout(
    (FullAttention(8), SlidingWindow(4, window_tokens=6), Recurrent(16)), tokens_per_hash=4, bytes_per_block=16
)


def served(engine: Any, folder: Path) -> FileTrace:
    engine.run()
    return open_trace(folder)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["one group", "three groups"])
def test_an_engine_records_the_requests_that_it_serves(tmp_path: Path, layout: KVLayout, mode: Mode) -> None:
    recorder = Recorder(tmp_path, layout.tokens_per_hash, clock=Clock())
    engine = make_engine(layout, num_blocks=60, max_running=3, mode=mode, recorder=recorder)
    numbers = random.Random(0)
    for _ in range(30):
        shared = prompt(4 * numbers.randrange(1, 10), family=numbers.randrange(3))
        tail = [numbers.randrange(10**6) for _ in range(numbers.randrange(9))]
        engine.submit([*shared, *tail], numbers.randrange(1, 6))
    engine.run()
    recorder.close()
    asked = sorted(engine.finished.values(), key=lambda request: int(request.id[1:]))
    read = [*open_trace(tmp_path)]
    assert [request.input_tokens for request in read] == [each.prompt_tokens for each in asked]
    assert [request.output_tokens for request in read] == [each.generated for each in asked]
    names: dict[bytes, int] = {}
    for request, each in zip(read, asked, strict=True):
        whole = each.prompt_tokens // layout.tokens_per_hash
        for key, name in zip(each.hashes[:whole], request.prefixes, strict=False):
            assert names.setdefault(key, name) == name
    assert len({*names.values()}) == len(names), "equal ids are equal prefixes"


def test_requests_that_are_preempted_or_aborted_are_recorded_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 4)
    engine = make_engine(num_blocks=10, max_running=4, recorder=recorder)
    requests = [engine.submit(prompt(12, family=number), 12) for number in range(4)]
    engine.step()
    engine.abort(requests[1])
    engine.run()
    assert engine.preemptions
    recorder.close()
    read = [*open_trace(tmp_path)]
    assert [request.input_tokens for request in read] == [12] * 4
    assert sorted(request.output_tokens for request in read)[1:] == [12] * 3


# --- settings ------------------------------------------------------------------------------------------------


def test_settings_name_the_folder_and_the_bound() -> None:
    assert ConnectorSettings.parse({}).record_trace is None
    settings = ConnectorSettings.parse({"record_trace": "/var/lib/x", "record_trace_bytes": "2MB"})
    assert (settings.record_trace, settings.record_trace_bytes) == ("/var/lib/x", 2_000_000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"record_trace": True}, f"record_trace: expected {A_FOLDER}, got True"),
        ({"record_trace": "traces"}, f"record_trace: expected {A_FOLDER}, got 'traces'"),
        ({"record_trace": "/a\0b"}, rf"record_trace: expected {A_FOLDER}, got '/a\x00b'"),
        ({"record_trace": "/a\ud800b"}, rf"record_trace: expected {A_FOLDER}, got '/a\ud800b'"),
        ({"record_trace_bytes": "1KB"}, "record_trace_bytes: expected at least 1,000,000 bytes, got '1KB'"),
        ({"record_traces": "/x"}, "unknown key 'record_traces'; did you mean 'record_trace'?"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorSettings.parse(settings)
    assert message in str(caught.value)
