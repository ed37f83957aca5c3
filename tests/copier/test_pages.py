from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.copier import memory, pages
from forebay.copier.memory import HUGE_BYTES, PAGE_BYTES, Limit
from forebay.copier.pages import HostPages
from forebay.errors import CapacityError, InvariantError

MIB = 1 << 20
ROOT = Path(pages.__file__).parents[2]


class Driver:
    """Registers, or refuses to. `go` holds it back."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.go, self.entered = Event(), Event()
        self.go.set()
        self.fails_at = fails_at
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.niceness: set[int] = set()

    def register(self, address: int, length: int) -> None:
        self.entered.set()
        self.go.wait()
        self.niceness.add(os.getpriority(os.PRIO_PROCESS, 0))
        if len(self.registered) == self.fails_at:
            raise RuntimeError("no more of that")
        self.registered.append((address, length))

    def unregister(self, address: int) -> None:
        self.unregistered.append(address)

    def make(self, slots: int, bytes_per_slot: int, **settings: Any) -> HostPages:
        return HostPages(
            slots, bytes_per_slot, register=self.register, unregister=self.unregister, threads=2, **settings
        )


@contextmanager
def closing(host: HostPages) -> Iterator[HostPages]:
    try:
        yield host
    finally:
        host.close()


@contextmanager
def grown(*sizes: int, driver: Driver | None = None, **settings: Any) -> Iterator[HostPages]:
    with closing((driver or Driver()).make(*sizes, **settings)) as host:
        assert host.wait(60)
        yield host


def ours(pid: int | str = "self") -> dict[str, int]:
    """Bytes of all memory that is neither forked nor dumped: nothing else in a test is."""
    sums = {"Size:": 0, "Rss:": 0, "AnonHugePages:": 0}
    seen: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if words[0] in sums:
            seen[words[0]] = int(words[1]) << 10
        elif words[0] == "VmFlags:" and {"dc", "dd"} <= set(words):
            sums = {name: sums[name] + seen[name] for name in sums}
    return sums


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.001)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    assert ours()["Size:"] == 0
    yield
    assert ours()["Size:"] == 0, "memory that nobody unmapped"


# --- where slots are --------------------------------------------------------------------------------------


@given(
    slots=st.integers(1, 120),
    bytes_per_slot=st.integers(1, 3 * PAGE_BYTES),
    piece_bytes=st.integers(1, 12 * PAGE_BYTES),
    first_bytes=st.integers(1, 12 * PAGE_BYTES),
)
@example(slots=1, bytes_per_slot=1, piece_bytes=1, first_bytes=1)
@example(slots=7, bytes_per_slot=HUGE_BYTES + 1, piece_bytes=5 * MIB, first_bytes=MIB)
@example(slots=9, bytes_per_slot=PAGE_BYTES, piece_bytes=4 * PAGE_BYTES, first_bytes=PAGE_BYTES)
def test_every_slot_has_its_own_bytes_in_one_registration(
    slots: int, bytes_per_slot: int, piece_bytes: int, first_bytes: int
) -> None:
    driver = Driver()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "_FIRST_BYTES", first_bytes)
        with grown(slots, bytes_per_slot, driver=driver, piece_bytes=piece_bytes) as host:
            assert (host.slots, host.bytes_per_slot, host.ready) == (slots, bytes_per_slot, slots)
            assert (host.pinned, host.growing) == (True, False)
            addresses = host.addresses(np.arange(slots))
            assert addresses.dtype == np.uint64
            begins = addresses.astype(np.int64)
            where = [(begin, length) for begin, length in driver.registered]
            holds = [np.sum((begins >= at) & (begins + bytes_per_slot <= at + length)) for at, length in where]
            assert sum(holds) == slots, "a slot that no registration holds, or two do"
            for (at, length), held in zip(where, holds, strict=True):
                assert at % HUGE_BYTES == 0
                assert length % PAGE_BYTES == 0
                assert 0 <= length - held * bytes_per_slot < PAGE_BYTES, "pages without slots"
                assert held == 1 or held * bytes_per_slot <= piece_bytes
            assert holds[0] == 1 or holds[0] * bytes_per_slot <= first_bytes
            for slot in range(slots):
                host.row(slot)[:] = slot % 251 + 1
            for slot in range(slots):
                row = host.row(slot)
                assert row.ctypes.data == addresses[slot]
                assert row.shape == (bytes_per_slot,)
                assert (row == slot % 251 + 1).all(), "another slot wrote here"


def test_addresses_are_for_any_order_any_number_and_any_whole_type() -> None:
    with grown(1000, 5000, piece_bytes=50_000) as host:
        one_by_one = [host.row(slot).ctypes.data for slot in range(1000)]
        some = np.array([999, 0, 5, 5, 500], np.int64)
        assert host.addresses(some).tolist() == [one_by_one[slot] for slot in some]
        assert host.addresses(np.array([], np.int64)).tolist() == []
        with_gaps = np.arange(1000, dtype=np.int16)[::7]
        assert host.addresses(with_gaps).tolist() == one_by_one[::7], "slot times bytes does not fit this type"


@pytest.mark.parametrize("slot", [-1, 4, 1 << 40])
def test_slots_that_are_not_ready_have_no_address(slot: int) -> None:
    with grown(4, 100) as host, pytest.raises(InvariantError, match=str(slot)):
        host.addresses(np.array([0, slot, 1], np.int64))


@pytest.mark.parametrize(("slots", "size"), [(0, 1), (-1, 1), (1, 0), (True, 1), (1.0, 1)])
def test_sizes_that_make_no_sense(slots: Any, size: Any) -> None:
    with pytest.raises(CapacityError, match="at least 1"):
        HostPages(slots, size)


# --- what it costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "bytes_per_slot", "piece_bytes"),
    [(300, MIB, 64 * MIB), (100, HUGE_BYTES + 2 * PAGE_BYTES, HUGE_BYTES), (70_001, 4321, 33 * MIB)],
    ids=["plain", "just above a huge page", "odd"],
)
def test_all_pages_that_hold_slots_are_there_before_they_are_used_and_no_others(
    slots: int, bytes_per_slot: int, piece_bytes: int
) -> None:
    rss_before = ours()["Rss:"]
    with grown(slots, bytes_per_slot, piece_bytes=piece_bytes) as host:
        asked = slots * bytes_per_slot
        assert asked <= ours()["Rss:"] - rss_before <= 1.02 * asked
        assert ours()["Size:"] <= 1.02 * asked
        if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            assert ours()["AnonHugePages:"] > 0.8 * asked
        for slot in range(slots):
            host.row(slot)[:] = 7
        assert ours()["Rss:"] - rss_before <= 1.02 * asked
    assert ours()["Rss:"] == 0


def test_what_was_mapped_to_find_a_boundary_is_given_back() -> None:
    def address_space_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES

    before = address_space_bytes()
    mapped = [memory.map_private(PAGE_BYTES) for _ in range(200)]
    assert address_space_bytes() - before < 20 * MIB
    for address in mapped:
        memory.unmap(address, PAGE_BYTES)


def test_nothing_is_touched_in_long_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = spy_on_touch(monkeypatch)
    with grown(100, MIB) as host:
        assert sum(length for _, length in touched) == 100 * MIB
        assert max(length for _, length in touched) <= 32 * MIB
        assert len(set(touched)) == len(touched)
        assert host.ready == 100


def spy_on_touch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    touched: list[tuple[int, int]] = []
    touch = memory.touch

    def spy(address: int, length: int) -> None:
        touched.append((address, length))
        touch(address, length)

    monkeypatch.setattr(memory, "touch", spy)
    return touched


def test_others_can_map_memory_while_it_is_touched() -> None:
    """The kernel has a call that touches pages, and lets nobody map memory meanwhile. Counted, not timed: how many
    times memory can be mapped while a gigabyte is touched."""

    def mapped_meanwhile(touch: Callable[[int, int], object]) -> int:
        length, count = 1 << 30, 0
        address = memory.map_private(length)
        thread = Thread(target=touch, args=(address, length))
        thread.start()
        while thread.is_alive():
            memory.unmap(memory.map_private(PAGE_BYTES), PAGE_BYTES)
            count += 1
        memory.unmap(address, length)
        return count

    assert mapped_meanwhile(memory.touch) > 10 * mapped_meanwhile(lambda *of: memory._libc.madvise(*of, 23))


def test_only_the_threads_that_grow_have_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    touching: set[int] = set()
    monkeypatch.setattr(memory, "touch", lambda *_: touching.add(os.getpriority(os.PRIO_PROCESS, 0)))
    driver = Driver()
    with grown(4, 100, driver=driver, piece_bytes=100):
        assert driver.niceness == touching == {min(19, before + 10)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (6, 4), (64, 16)])
def test_two_cores_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    names: list[str] = []
    start = Thread.start

    def spy(thread: Thread) -> None:
        names.append(thread.name)
        start(thread)

    monkeypatch.setattr(Thread, "start", spy)
    with closing(HostPages(1, 1)) as host:
        assert host.wait(60)
    assert names.count("forebay-touch") == threads


# --- growing ----------------------------------------------------------------------------------------------


def test_slots_are_ready_in_order_and_only_once_registered() -> None:
    driver, made, seen = Driver(), Event(), []
    steps = [Event() for _ in range(10)]

    def register(address: int, length: int) -> None:
        assert made.wait(60)
        seen.append((host.ready, host.pinned, host.growing))
        driver.register(address, length)
        assert steps[len(seen) - 1].wait(60)

    begun_at = time.monotonic()
    host = HostPages(20, PAGE_BYTES, register=register, piece_bytes=2 * PAGE_BYTES)
    made.set()
    assert time.monotonic() - begun_at < 10, "the engine waits for it"
    with closing(host):
        try:
            for done in range(10):
                until(lambda done=done: len(driver.registered) > done)
                assert (host.ready, host.pinned, host.growing) == (2 * done, done > 0, True)
                assert not host.wait(0.001)
                if done:
                    host.row(2 * done - 1)[:] = 1
                with pytest.raises(InvariantError):
                    host.row(2 * done)
                steps[done].set()
        finally:
            for step in steps:
                step.set()
        assert host.wait(60)
        assert (host.ready, host.pinned, host.growing) == (20, True, False)
    assert seen == [(2 * done, done > 0, True) for done in range(10)]


def test_the_next_pieces_are_touched_while_one_is_registered_but_not_all(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = spy_on_touch(monkeypatch)
    driver = Driver()
    driver.go.clear()
    with closing(driver.make(20, MIB, piece_bytes=MIB)) as host:
        until(lambda: len(touched) == 4)
        time.sleep(0.1)
        assert len(touched) == 4, "one that is registered and three ahead"
        assert ours()["Size:"] == 4 * MIB
        driver.go.set()
        assert host.wait(60)
        assert (len(touched), host.ready) == (20, 20)


def test_there_is_one_piece_until_it_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = spy_on_touch(monkeypatch)
    driver = Driver()
    with closing(driver.make(20, MIB, piece_bytes=MIB, waits=True)) as host:
        until(lambda: host.ready == 1)
        time.sleep(0.1)
        assert (host.ready, host.growing, len(driver.registered), len(touched)) == (1, True, 1, 1)
        for _ in range(2):
            host.go_on()
        assert host.wait(60)
        assert (host.ready, len(driver.registered)) == (20, 20)


def test_if_one_piece_is_all_there_is_nothing_to_wait_for() -> None:
    with closing(HostPages(4, PAGE_BYTES, waits=True)) as host:
        assert host.wait(60)
        assert (host.ready, host.growing) == (4, False)


def test_what_waits_can_be_closed() -> None:
    driver = Driver()
    with closing(driver.make(20, MIB, piece_bytes=MIB, waits=True)) as host:
        until(lambda: host.ready == 1)
    assert host.wait(0), "its thread has ended"
    assert len(driver.registered) == len(driver.unregistered) == 1


def test_the_first_slots_do_not_wait_for_a_large_piece() -> None:
    driver = Driver()
    with grown(100, MIB, driver=driver):
        assert [length for _, length in driver.registered] == [32 * MIB, 68 * MIB]


def test_without_a_driver_nothing_is_pinned() -> None:
    with closing(HostPages(10, 100, piece_bytes=100)) as host:
        assert host.wait(60)
        assert (host.ready, host.pinned) == (10, False)


def test_memory_is_bound_to_the_node_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/numa_maps").exists() or not Path("/sys/devices/system/node/node0").exists():
        pytest.skip("a kernel without NUMA")
    calls: list[str] = []
    bind, touch = memory.bind, memory.touch
    monkeypatch.setattr(memory, "bind", lambda *args: (calls.append("bind"), bind(*args)))
    monkeypatch.setattr(memory, "touch", lambda *args: (calls.append("touch"), touch(*args)))
    with grown(1, MIB, numa_node=0) as host:
        assert calls == ["bind", "touch"]
        [policy] = [
            line.split()[1]
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if int(line.split()[0], 16) == host.row(0).ctypes.data
        ]
        assert policy in ("prefer:0", "prefer=relative:0", "prefer=static:0")


def test_a_node_that_is_not_there_is_one_line_for_debugging(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "forebay")
    with grown(5, 100, piece_bytes=100, numa_node=900) as host:
        assert (host.ready, host.pinned) == (5, True)
    [record] = caplog.records
    assert (record.levelno, "node 900" in record.getMessage()) == (logging.DEBUG, True)


@pytest.mark.parametrize("text", ["0\n", "3\n", "-1\n", "", "what"])
def test_the_node_of_a_gpu(tmp_path: Path, text: str) -> None:
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text(text)
    expected = {"0\n": 0, "3\n": 3}.get(text)
    assert pages.gpu_numa_node("0000:1B:00.0", tmp_path) == expected
    assert pages.gpu_numa_node("00000000:1B:00.0", tmp_path) == expected, "as NVML writes it"
    for unknown in ("0000:1c:00.0", "", "gpu:0"):
        assert pages.gpu_numa_node(unknown, tmp_path) is None


# --- what can go wrong ------------------------------------------------------------------------------------


def test_if_the_first_piece_cannot_be_pinned_all_is_there_unpinned(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(fails_at=0)
    with grown(10, 100, driver=driver, piece_bytes=200) as host:
        assert (host.ready, host.pinned) == (10, False)
        host.row(9)[:] = 1
    [line] = warnings_in(caplog)
    assert "not pinned" in line
    assert "no more of that" in line
    assert "ulimit -l" in line
    assert (driver.registered, driver.unregistered) == ([], [])


def test_if_a_later_piece_cannot_be_pinned_there_are_fewer_slots(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(fails_at=3)
    with grown(10, PAGE_BYTES, driver=driver, piece_bytes=2 * PAGE_BYTES) as host:
        assert (host.ready, host.pinned, host.growing) == (6, True, False)
        assert ours()["Size:"] == 6 * PAGE_BYTES, "what cannot be used is given back"
        host.row(5)[:] = 1
    [line] = warnings_in(caplog)
    assert "6 of 10 slots" in line
    assert "no more of that" in line
    assert "ulimit -l" in line
    assert sorted(driver.unregistered) == sorted(address for address, _ in driver.registered)


def test_if_no_more_can_be_mapped_there_are_fewer_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lengths: list[int] = []
    mmap = memory._libc.mmap

    def full(_: object, length: int, *rest: int) -> int:
        lengths.append(length)
        return int(mmap(_, length if len(lengths) < 4 else 1 << 60, *rest))

    monkeypatch.setattr(memory._libc, "mmap", full)
    with grown(10, PAGE_BYTES, piece_bytes=2 * PAGE_BYTES) as host:
        assert (host.ready, host.pinned) == (6, True)
        host.row(5)[:] = 1
    [line] = warnings_in(caplog)
    assert "6 of 10 slots" in line
    assert "mmap: Cannot allocate memory" in line


def test_nothing_is_unmapped_while_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    go, touched = Event(), []

    def touch(address: int, length: int) -> None:
        touched.append(address)
        if len(touched) > 1:
            go.wait()
            memory.view(address, length)[:] = 1
        else:
            until(lambda: len(touched) > 1)
            raise OSError("full")

    monkeypatch.setattr(memory, "touch", touch)
    with closing(HostPages(3, PAGE_BYTES, piece_bytes=PAGE_BYTES, threads=2)) as host:
        try:
            until(lambda: ours()["Size:"] == 2 * PAGE_BYTES)
            time.sleep(0.05)
            assert ours()["Size:"] == 2 * PAGE_BYTES
            assert host.growing
        finally:
            go.set()
        assert host.wait(60)
        assert (host.ready, ours()["Size:"]) == (0, 0)


@pytest.mark.parametrize("threads", [1, 4])
def test_a_touching_thread_that_dies_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    touched, lock = [], Lock()

    def dies(address: int, length: int) -> None:
        with lock:
            touched.append(address)
            if len(touched) == 4:
                raise SystemExit("killed")

    monkeypatch.setattr(memory, "touch", dies)
    with closing(HostPages(10, PAGE_BYTES, piece_bytes=PAGE_BYTES, threads=threads)) as host:
        assert host.wait(60)
        assert 0 <= host.ready <= 3 + threads
        assert host.ready == 3 or threads > 1
        assert ours()["Size:"] == host.ready * PAGE_BYTES
    [line] = warnings_in(caplog)
    assert "died (SystemExit('killed'))" in line


def test_the_growing_thread_dies_and_what_is_ready_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def dies() -> list[Limit]:
        asked.append(1)
        if len(asked) == 7:
            raise SystemExit("killed")
        return []

    monkeypatch.setattr(memory, "memory_limits", dies)
    driver = Driver()
    with grown(10, PAGE_BYTES, driver=driver, piece_bytes=PAGE_BYTES) as host:
        assert (host.ready, host.pinned, host.growing) == (3, True, False)
        host.row(2)[:] = 1
        assert ours()["Size:"] == 3 * PAGE_BYTES
    [line] = warnings_in(caplog)
    assert "3 of 10 slots" in line
    assert "died (SystemExit('killed'))" in line
    assert sorted(driver.unregistered) == sorted(address for address, _ in driver.registered)


# --- how much memory there is -----------------------------------------------------------------------------


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def v2_folder(root: Path, path: str, *, most: str, high: str = "max", used: int = 0, files: int = 0) -> None:
    folder = f"sys/fs/cgroup{path}"
    write(root, f"{folder}/memory.max", f"{most}\n")
    write(root, f"{folder}/memory.high", f"{high}\n")
    write(root, f"{folder}/memory.current", f"{used}\n")
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {files - 1}\nactive_file 1\n")


def test_the_limit_of_the_machine(tmp_path: Path) -> None:
    assert memory.memory_limits(tmp_path) == [], "what cannot be read bounds nothing"
    write(tmp_path, "proc/meminfo", "MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 70 kB\nHugePages_Total: 0\n")
    assert memory.memory_limits(tmp_path) == [Limit("the machine", 1000 << 10, 70 << 10)]


def test_the_limits_of_cgroups_and_those_around_them(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/a/b/c\n")
    v2_folder(tmp_path, "/a", most="1000", used=400, files=100)
    v2_folder(tmp_path, "/a/b", most="max")
    v2_folder(tmp_path, "/a/b/c", most="900", high="800", used=300, files=1)
    assert memory.memory_limits(tmp_path) == [Limit("the cgroup", 800, 501), Limit("the cgroup", 1000, 700)]


def test_the_limit_of_a_container_that_sees_only_its_own_cgroup(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    v2_folder(tmp_path, "", most="1000", used=400, files=1)
    assert memory.memory_limits(tmp_path) == [Limit("the cgroup", 1000, 601)]


def test_the_limit_of_an_older_cgroup(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/x\n1:cpuset:/docker/x\n0::/\n")
    for folder, limit in (("/docker/x", 1000), ("", 9223372036854771712)):
        write(tmp_path, f"sys/fs/cgroup/memory{folder}/memory.limit_in_bytes", f"{limit}\n")
        write(tmp_path, f"sys/fs/cgroup/memory{folder}/memory.usage_in_bytes", "300\n")
        stat = "inactive_file 7\ntotal_inactive_file 40\ntotal_active_file 60\n"
        write(tmp_path, f"sys/fs/cgroup/memory{folder}/memory.stat", stat)
    [limit, no_limit] = memory.memory_limits(tmp_path)
    assert limit == Limit("the cgroup", 1000, 800)
    assert no_limit.available_bytes > 1 << 60


def test_this_machine_has_a_limit() -> None:
    limit = memory.memory_limits()[0]
    assert limit.name == "the machine"
    assert 0 < limit.available_bytes < limit.total_bytes


def test_it_stops_before_a_limit_is_reached(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # What is touched is missing from what is left, and as much as was asked for has to stay.
    used, touch = [], memory.touch
    monkeypatch.setattr(memory, "touch", lambda address, length: (touch(address, length), used.append(length)))
    monkeypatch.setattr(memory, "memory_limits", lambda: [Limit("the cgroup", 1, 30 * MIB - sum(used))])
    with closing(HostPages(20, MIB, piece_bytes=MIB, threads=1)) as host:
        assert host.wait(60)
        assert host.ready in (9, 10)  # a piece counts twice in the moment in which it is touched
        assert len(used) == host.ready
        [line] = warnings_in(caplog)
        assert f"{host.ready} of 20 slots: the cgroup has 0.02 GiB left, and 0.02 are kept" in line


@pytest.mark.parametrize(
    ("total_gib", "available_gib", "is_enough"),
    [(30, 1.2, True), (30, 1.1, False), (100, 2.2, True), (100, 2.1, False)],
)
def test_what_is_kept_for_others(
    monkeypatch: pytest.MonkeyPatch, total_gib: int, available_gib: float, is_enough: bool
) -> None:
    limit = Limit("the machine", total_gib << 30, int(available_gib * (1 << 30)))
    monkeypatch.setattr(memory, "memory_limits", lambda: [limit])
    monkeypatch.setattr(memory, "touch", lambda *_: None)  # address space costs nothing
    with closing(HostPages(64, 160 * MIB, piece_bytes=160 * MIB)) as host:
        assert host.wait(60)
        assert (host.ready > 0) == is_enough


def test_what_is_mapped_but_not_touched_counts_as_used(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is touched before four pieces are mapped. Three fit.
    monkeypatch.setattr(memory, "memory_limits", lambda: [Limit("the machine", 1, 13 * MIB)])
    go, touch = Event(), memory.touch
    monkeypatch.setattr(memory, "touch", lambda *args: (go.wait(), touch(*args)))
    with closing(HostPages(10, MIB, piece_bytes=MIB)) as host:
        try:
            until(lambda: ours()["Size:"] >= 3 * MIB)
            time.sleep(0.1)
            assert ours()["Size:"] == 3 * MIB
        finally:
            go.set()
        assert host.wait(60)
        assert host.ready == 3


# --- the end ----------------------------------------------------------------------------------------------


def test_close_may_come_twice_and_unregisters_everything_once() -> None:
    driver = Driver()
    host = driver.make(10, 100, piece_bytes=300)
    assert host.wait(60)
    for _ in range(2):
        host.close()
        assert len(driver.unregistered) == len(driver.registered) == 4
        assert set(driver.unregistered) == {address for address, _ in driver.registered}
        assert ours()["Size:"] == 0
    assert (host.ready, host.growing, host.wait()) == (0, False, True)
    for use in (lambda: host.row(0), lambda: host.addresses(np.array([0]))):
        with pytest.raises(InvariantError):
            use()


def test_a_driver_that_is_gone_does_not_keep_the_memory() -> None:
    def gone(_: int) -> None:
        raise RuntimeError("driver is shutting down")

    host = HostPages(10, 100, register=lambda *_: None, unregister=gone, piece_bytes=300)
    assert host.wait(60)
    host.close()
    assert ours()["Size:"] == 0


def test_close_while_a_piece_is_registered_waits_for_it_and_ends_growth() -> None:
    driver = Driver()
    driver.go.clear()
    host = driver.make(50, PAGE_BYTES, piece_bytes=PAGE_BYTES)
    assert driver.entered.wait(60)
    closer = Thread(target=host.close)
    closer.start()
    until(host._stop.is_set)
    time.sleep(0.05)
    assert closer.is_alive()
    assert ours()["Size:"] == 4 * PAGE_BYTES, "unmapped under the driver's hands"
    driver.go.set()
    closer.join(60)
    assert not host.growing
    assert [address for address, _ in driver.registered] == driver.unregistered
    assert len(driver.registered) == 1


def test_close_while_pages_are_touched_waits_for_those_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    go, touched = Event(), []
    monkeypatch.setattr(memory, "touch", lambda address, _: (touched.append(address), go.wait()))
    driver = Driver()
    host = driver.make(1000, 32 * MIB)  # eight calls for a piece
    until(lambda: len(touched) == 2)
    closer = Thread(target=host.close)
    closer.start()
    until(host._stop.is_set)
    go.set()
    closer.join(60)
    assert (len(touched), driver.registered, host.growing) == (2, [], False)
    assert ours()["Size:"] == 0


def test_close_does_not_wait_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "_CLOSE_S", 0.05)
    driver = Driver()
    driver.go.clear()
    host = driver.make(3, PAGE_BYTES, piece_bytes=PAGE_BYTES)
    try:
        assert driver.entered.wait(60)
        host.close()
        [line] = warnings_in(caplog)
        assert "not unmapped" in line
        assert ours()["Size:"] == 3 * PAGE_BYTES
    finally:
        driver.go.set()
    assert host.wait(60)
    host.close()
    assert driver.unregistered == [address for address, _ in driver.registered]


SCRIPT = """
import os, sys, time
import numpy as np
from forebay.copier.pages import HostPages
host = HostPages(300, 1 << 20)
"""


def start(code: str) -> subprocess.Popen[str]:
    code = SCRIPT + code
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_sigkill_leaves_nothing_behind() -> None:
    shared = Path("/dev/shm")
    before = set(shared.iterdir())
    with start("host.wait(); host.row(299)[:] = 1; print('up', flush=True); time.sleep(600)") as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            assert ours(process.pid)["Rss:"] == 300 * MIB
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                words = line.split()
                begin, end = (int(each, 16) for each in words[0].split("-"))
                if end - begin >= 32 * MIB and words[1] == "rw-p":
                    assert words[4] == "0", "memory with a name"
                assert "shm" not in line
                assert "memfd" not in line
                assert words[1][3] == "p" or "/" in line, "memory that another process could have"
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()
    left = [each for each in set(shared.iterdir()) - before if each.stat().st_size >= 30 * MIB]
    assert left == []


def test_a_process_may_end_while_it_grows() -> None:
    with start("HostPages(1, 1, register=lambda *_: time.sleep(600)); time.sleep(0.1)") as process:
        try:
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_forked_child_has_none_of_it_and_closing_there_changes_nothing() -> None:
    code = """
host.wait()
at = int(host.addresses(np.array([0]))[0])
child = os.fork()
if not child:
    from forebay.copier import memory
    memory._libc.mmap(at, 4096, 3, 0x32, -1, 0)  # something else is there by now
    host.close()
    memory.view(at, 4096)[:] = 1
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), host.row(0).sum(), flush=True)
host.close()
"""
    with start(code) as process:
        assert process.communicate(timeout=60)[0] == "7 0\n"
    assert process.returncode == 0
