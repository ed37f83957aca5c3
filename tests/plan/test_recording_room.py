"""Engines that record into one folder: what they take together, and what others can do to their files."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.plan.traces import open_trace
from forebay.recording import Recorder, parts, room
from forebay.recording.parts import Parts

LEAST = 1_000_000


def num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def begin(folder: Path, number: int, max_bytes: int = LEAST) -> Parts:
    return Parts(folder, f"{number:016x}", 16, max_bytes)


def line(numbers: random.Random, length: int) -> dict[str, Any]:
    return {"request": 1, "ids": numbers.randbytes(length).hex()[:length]}


class Watch:
    """Looks at the folder whenever a compressed part was written beside the plain one, and when it is asked to."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self.most = 0
        opened = parts._create

        def create(path: Path) -> Any:
            file = opened(path)
            close = file.close
            monkeypatch.setattr(file, "close", lambda: (close(), self.look()))
            return file

        monkeypatch.setattr(parts, "_create", create)

    def look(self) -> None:
        self.most = max(self.most, num_bytes(self._folder))


@pytest.mark.parametrize("engines", [2, 8, 20])
def test_engines_never_take_more_together_than_one_may(
    tmp_path: Path, engines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Watch(tmp_path, monkeypatch)
    all_parts = [begin(tmp_path, number) for number in range(engines)]
    numbers = random.Random(0)
    for _ in range(6000):
        each = numbers.choice(all_parts)
        assert each.write(line(numbers, numbers.randrange(1500)))
        each.flush()
        watch.look()
        each.check()
    for each in all_parts:
        each.close()
    assert LEAST // 2 < watch.most <= LEAST


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), bounds=st.sampled_from([[LEAST], [LEAST, 2 * LEAST]]))
def test_engines_that_come_and_go_keep_to_the_bound(
    tmp_path_factory: pytest.TempPathFactory, seed: int, bounds: list[int]
) -> None:
    """With different bounds, to the largest of them."""
    folder, numbers = tmp_path_factory.mktemp("room"), random.Random(seed)
    running: dict[int, Parts] = {}
    with ExitStack() as at_end:
        for number in range(150):
            if len(running) < 2 or (numbers.random() < 0.15 and len(running) < 40):
                running[number] = begin(folder, number, numbers.choice(bounds))
                at_end.callback(running[number].close)
            which = numbers.choice([*running])
            if numbers.random() < 0.03:
                running.pop(which).close()
            else:
                running[which].write(line(numbers, numbers.choice([10, 1000, 100_000, 200_000])))
                running[which].flush()
            for each in running.values():
                each.check()
            assert num_bytes(folder) <= max(bounds)


def test_a_part_of_an_engine_that_was_killed_may_go(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from forebay.recording.parts import Parts
parts = Parts(Path({str(tmp_path)!r}), "0" * 16, 16, {LEAST})
print("now", flush=True)
time.sleep(600)
"""
    look = room.Room(tmp_path, LEAST)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"now\n"
        open_parts, open_bytes, closed = look.taken(None)
        assert (open_parts, len(closed)) == (1, 0)
        assert open_bytes >= 2 * num_bytes(tmp_path)
        process.kill()
    open_parts, _, closed = look.taken(None)
    assert (open_parts, len(closed)) == (0, 1)


def test_an_engine_without_room_begins_when_there_is_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a rolling restart with a smaller bound: it neither stops nor goes beyond its own."""
    numbers = random.Random(0)
    before = begin(tmp_path, 1, 20 * LEAST)
    for _ in range(10):
        assert before.write(line(numbers, 60_000))
    recorder = Recorder(tmp_path, 16, max_bytes=LEAST)
    recorder.arrived(16, [bytes(32)])
    recorder.close()
    assert recorder.dropped == 1
    assert [each.message for each in caplog.records] == [
        "forebay: the recording has no room for a request: it is not in it"
    ]
    after = begin(tmp_path, 2)
    assert not after.write({})
    before.close()
    assert after.write({})
    after.close()
    assert num_bytes(tmp_path) <= LEAST


def test_requests_without_room_are_told_once_there_is_some(tmp_path: Path) -> None:
    before = begin(tmp_path, 1, 20 * LEAST)
    for _ in range(10):
        assert before.write(line(random.Random(0), 60_000))
    recorder = Recorder(tmp_path, 16, max_bytes=LEAST)
    recorder.arrived(16, [bytes(32)])
    deadline = time.monotonic() + 60
    while not recorder.dropped and time.monotonic() < deadline:
        time.sleep(0.001)
    before.close()
    recorder.arrived(16, [bytes(32)])
    recorder.close()
    trace = open_trace(recorder.path)
    assert len([*trace]) == 1
    assert trace.dropped == 1


def test_a_folder_that_stays_locked_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the thread that writes: the engine starts."""
    monkeypatch.setattr(room, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(parts, "_AT_START_S", 0.0)
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    recorder = Recorder(tmp_path, 16)
    recorder.arrived(16, [bytes(32)])
    recorder.close()
    os.close(folder)
    assert [each.message for each in caplog.records] == [
        f"forebay: recording stops: another process keeps {tmp_path} locked"
    ]
    assert not [*tmp_path.iterdir()]


def test_an_engine_that_started_while_the_folder_was_locked_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_AT_START_S", 0.0)
    with room.Room(tmp_path, LEAST).alone():
        recorder = Recorder(tmp_path, 16)
        recorder.arrived(16, [bytes(32)])
    recorder.close()
    assert len([*open_trace(tmp_path)]) == 1


def test_locks_do_not_stay_with_a_process_that_was_forked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the same open files, as copies of their descriptors are."""
    monkeypatch.setattr(room, "_PATIENCE_S", 0.0)
    flock = fcntl.flock
    copies: list[int] = []

    def forked(file: int, how: int) -> None:
        if how & fcntl.LOCK_EX:
            copies.append(os.dup(file))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", forked)
    each = begin(tmp_path, 1)
    look = room.Room(tmp_path, LEAST)
    assert look.taken(None).open_parts == 1
    with look.alone():
        pass
    each.close()
    each.close()
    assert look.taken(None).open_parts == 0
    for copy in copies:
        os.close(copy)


def test_parts_that_only_others_may_delete_leave_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a folder like /tmp. The engine starts, and records once they are gone."""
    numbers, theirs = random.Random(0), begin(tmp_path, 1, 20 * LEAST)
    while num_bytes(tmp_path) < LEAST:
        theirs.write(line(numbers, 60_000))
    theirs.close()
    name = theirs.path.name.split("-")[2]
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if name in path.name:
            raise PermissionError(1, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        each = begin(tmp_path, 2)
        assert not each.write({})
    assert each.write({})
    each.close()
    assert num_bytes(tmp_path) <= LEAST


def test_a_file_system_without_locks_is_recorded_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", none)
    numbers, each = random.Random(0), begin(tmp_path, 1)
    for _ in range(300):
        assert each.write(line(numbers, 10_000))
        assert num_bytes(tmp_path) <= LEAST
    each.close()


# --- names that lead elsewhere ---------------------------------------------------------------------------


def test_a_link_where_a_part_is_to_be_compressed_is_not_followed(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    elsewhere.write_text("precious")
    numbers, each = random.Random(0), begin(folder, 1)
    first = each.path
    first.with_name(f"{first.name}.gz.tmp").symlink_to(elsewhere)
    first.with_name(f"{first.name}.gz").symlink_to(elsewhere)
    while each.path == first:
        assert each.write(line(numbers, 1000))
    each.close()
    assert elsewhere.read_text() == "precious"
    assert not first.with_name(f"{first.name}.gz").is_symlink()


def test_a_file_of_another_hand_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is made anew: nobody has it open already."""
    flags: dict[str, int] = {}
    opened = os.open

    def watched(path: Any, how: int, *mode: int) -> int:
        if how & (os.O_WRONLY | os.O_RDWR):
            flags[Path(path).name] = how
        return opened(path, how, *mode)

    monkeypatch.setattr(os, "open", watched)
    numbers, each = random.Random(0), begin(tmp_path, 1)
    first = each.path
    (tmp_path / f"{first.name}.gz.tmp").write_bytes(b"theirs")
    theirs = (tmp_path / f"{first.name}.gz.tmp").open("rb")
    while each.path == first:
        assert each.write(line(numbers, 1000))
    each.close()
    assert theirs.read() == b"theirs"
    theirs.close()
    assert {name.endswith(".gz.tmp") for name in flags} == {True, False}
    assert all(how & os.O_EXCL and how & os.O_NOFOLLOW for how in flags.values())
