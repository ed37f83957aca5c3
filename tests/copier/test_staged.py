"""The copier of a device with streams of its own: its thread, its order of things, and what goes wrong."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.copier import Copier, InjectedFaults, rests
from forebay.copier import staged as module
from forebay.copier.checksum import Verify
from forebay.copier.faults import GARBAGE, Fate
from forebay.copier.pages import HostPages
from forebay.copier.staged import StagedCopier
from forebay.copier.threaded import Job, Jobs, Wake
from forebay.errors import InvariantError
from forebay.ids import Key, Rank
from forebay.transfers import CopyOrder, Direction, Outcome
from tests.copier.builders import block_bytes, load, make_regions, poll_until, run, store
from tests.copier.fake_gpu import FakeGpu

DONE, FAILED, MISMATCH = Outcome.DONE, Outcome.FAILED, Outcome.MISMATCH
SLOTS = 16


class Rig:
    """A copier over a fake device. `gpu.hold` stops the device."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        slots: int = SLOTS,
        entered: list[bool] | None = None,
        **settings: object,
    ) -> None:
        self.regions = make_regions(num_blocks)
        self.gpu = FakeGpu(self.regions, Random(7))
        if entered is not None:
            self.gpu.enter = lambda: entered.append(True)  # type: ignore[method-assign]
        self.pages = HostPages(
            slots,
            self.gpu.bytes_per_block,
            threads=1,
            register=lambda address, num_bytes: None,
            unregister=lambda address: None,
        )
        assert self.pages.wait(30)
        settings = {
            "rank": Rank(3),
            "few_wait_s": 0.001,
            "load_staging_bytes": 300,
            "store_staging_bytes": 88,
        } | settings
        self.copier = StagedCopier(self.gpu, self.pages, **settings)  # type: ignore[arg-type]

    def block(self, block: int) -> bytes:
        return block_bytes(self.regions, block)

    @property
    def blocks(self) -> list[bytes]:
        return [self.block(block) for block in range(12)]

    def slot(self, slot: int) -> bytes:
        return self.pages.row(slot).tobytes()

    def run(self, *orders: CopyOrder) -> dict[int, Outcome]:
        return run(self.copier, *orders)


def keyed(order: CopyOrder, prefix: str = "key") -> CopyOrder:
    return order._replace(keys=[Key(f"{prefix} of slot {slot:4} and more".encode()) for slot in order.slots])


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(**settings: object) -> Rig:
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.gpu.held = False
        rig.copier.close()


def test_it_fulfils_the_contract(make: Callable[..., Rig]) -> None:
    rig = make()
    contract: Copier = rig.copier
    assert contract.poll() == []
    assert (contract.slots, contract.ready) == (SLOTS, SLOTS)


def test_blocks_come_back_byte_for_byte(make: Callable[..., Rig]) -> None:
    rig = make()
    before = rig.blocks
    assert rig.run(keyed(store(1, {0: 5, 7: 0, 3: 2}))) == {1: DONE}
    assert [rig.slot(slot) for slot in (5, 0, 2)] == [before[0], before[7], before[3]]
    assert rig.blocks == before
    assert rig.run(keyed(load(2, {1: 5, 4: 0, 0: 2}, {9: 8}))) == {2: DONE}
    assert rig.blocks == [before[of] for of in (3, 0, 2, 3, 7, 5, 6, 7, 8, 8, 10, 11)]


def test_an_order_waits_for_what_the_engine_had_given_the_device(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.gpu.compute.give(lambda: rig.regions[0][4].fill_(77))
    rig.run(keyed(store(1, {4: 1})))
    assert rig.slot(1)[:64] == bytes([77]) * 64


def test_submitting_does_not_wait_and_loads_go_first(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AHEAD", ((Direction.LOAD, 3), (Direction.STORE, 4), (Direction.LOAD, 16)))
    rig = make()
    everything = {block: block for block in range(12)}
    rig.run(keyed(store(1, everything)))
    rig.gpu.held = True
    rig.copier.submit(keyed(store(2, everything)))
    while rig.copier._stagers[Direction.STORE].ahead < 4:
        time.sleep(0.001)
    rig.copier.submit(load(3, everything))
    rig.copier.submit(load(4, {0: 0}))
    while len(rig.copier._flights[Direction.LOAD]) < 2:
        time.sleep(0.001)
    assert not rig.copier._flights[Direction.STORE], "the rest of the store waits"
    assert rig.copier.poll() == []
    rig.gpu.held = False
    reports = poll_until(rig.copier, lambda reports: len(reports) == 3)
    assert {report.outcome for report in reports} == {DONE}


@pytest.mark.parametrize(
    "order", [store(2, {12: 0}), load(2, {0: SLOTS}), load(2, {0: -1}), load(2, {0: 0}, {0: 1})]
)
def test_an_order_that_makes_no_sense_fails_alone(
    make: Callable[..., Rig], order: CopyOrder, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    before = rig.blocks
    assert rig.run(store(1, {0: 0}), order, store(3, {1: 1})) == {1: DONE, 2: FAILED, 3: DONE}
    assert rig.blocks == before
    assert "transfer 2 was refused" in caplog.text


def test_slots_that_are_not_ready_are_refused(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.pages.ready = 4
    assert rig.run(store(1, {0: 3}), store(2, {0: 4})) == {1: DONE, 2: FAILED}
    rig.pages.ready = SLOTS


@pytest.mark.parametrize("nth", range(1, 8))
def test_an_error_of_the_device_fails_that_order_only(
    make: Callable[..., Rig], nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    rig.run(keyed(store(1, {0: 0, 1: 1, 2: 2, 3: 3})))
    rig.gpu.refused = {rig.gpu.calls + nth}
    assert rig.run(keyed(load(2, {4: 0, 5: 1, 6: 2, 7: 3}, {8: 9}))) == {2: FAILED}
    assert "transfer 2 could not be copied: RuntimeError: out of luck" in caplog.text
    assert rig.run(keyed(load(3, {4: 0, 5: 1, 6: 2, 7: 3}))) == {3: DONE}
    assert [rig.block(block) for block in (4, 5, 6, 7)] == [rig.block(block) for block in range(4)]


def test_when_the_thread_dies_nothing_is_on_its_way_any_more_and_another_goes_on(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = make()
    chunk = module.Stager._chunk
    chunks = iter(range(100))

    def dies(self: module.Stager, *args: object) -> None:
        if next(chunks) == 1:
            raise SystemExit("struck")
        chunk(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Stager, "_chunk", dies)
    rig.gpu.held = True
    rig.copier.submit(store(1, {block: block for block in range(12)}))
    rig.copier.submit(store(2, {0: 12}))
    rig.copier._thread.join()
    rig.gpu.held = False
    reports = poll_until(rig.copier, lambda reports: len(reports) == 2)
    assert {report.outcome for report in reports} == {FAILED}
    assert rig.gpu.run(1) == 0, "something was still on its way"
    assert "the copying thread died (SystemExit('struck')); orders failed with it: 2" in caplog.text
    assert rig.run(store(3, {0: 12})) == {3: DONE}


@pytest.mark.parametrize(("left", "gets"), [(1000, 384), (384, 384), (383, 192), (256, 192), (128, 96), (13, 12)])
def test_loads_and_stores_share_what_the_device_has_left(left: int, gets: int) -> None:
    gpu = FakeGpu(make_regions(12), Random(7))
    pages = HostPages(SLOTS, gpu.bytes_per_block, threads=1)
    gpu.most_staging_bytes = left << 20
    copier = StagedCopier(gpu, pages)
    rows = [copier._stagers[each].rows_at_once for each in (Direction.LOAD, Direction.STORE)]
    copier.close()
    assert sum(len(each) for each in gpu._stagings) == gets << 20
    assert rows[0] >= rows[1] > 0


def test_a_device_with_little_memory_left_gets_less_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_STAGING_BYTES", 100)
    regions = make_regions(num_blocks=12)
    gpu = FakeGpu(regions, Random(0))
    pages = HostPages(SLOTS, gpu.bytes_per_block, threads=1)
    assert pages.wait(30)
    gpu.most_staging_bytes = 300
    copier = StagedCopier(gpu, pages, load_staging_bytes=4096, store_staging_bytes=4096)
    assert run(copier, store(1, {block: block for block in range(6)})) == {1: DONE}
    assert run(copier, load(2, {block + 6: block for block in range(6)})) == {2: DONE}
    assert [block_bytes(regions, block + 6) for block in range(6)] == [block_bytes(regions, b) for b in range(6)]
    copier.close()
    gpu.most_staging_bytes = 50
    with pytest.raises(MemoryError):
        StagedCopier(gpu, pages, load_staging_bytes=4096)


def test_too_many_on_their_way(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TICKETS", 2)
    rig = make()
    rig.gpu.held = True
    for number in range(4):
        rig.copier.submit(load(number, {}))
    while len(rig.copier._jobs):
        time.sleep(0.001)
    time.sleep(0.05)
    rig.gpu.held = False
    assert len(rig.copier._flights[Direction.LOAD]) == 2, "the others wait"
    reports = poll_until(rig.copier, lambda reports: len(reports) == 4)
    assert {report.outcome for report in reports} == {DONE}
    assert rig.run(load(9, {})) == {9: DONE}


def test_stores_of_a_few_blocks_fly_together(make: Callable[..., Rig]) -> None:
    rig = make(few_wait_s=0.2)
    uploads = []
    upload = rig.gpu.upload
    rig.gpu.upload = lambda stream, columns: (uploads.append(len(columns.slots)), upload(stream, columns))[1]  # type: ignore[method-assign]
    assert rig.run(*(keyed(store(number, {number: number})) for number in range(5))) == dict.fromkeys(
        range(5), DONE
    )
    assert uploads == [5]
    assert [rig.slot(number) for number in range(5)] == rig.blocks[:5]
    assert rig.run(keyed(load(9, {number + 5: number for number in range(5)}))) == {9: DONE}


def test_stores_that_fly_together_wait_for_what_the_last_of_them_waits_for(make: Callable[..., Rig]) -> None:
    rig = make(few_wait_s=0.2)
    rig.gpu.held = True
    rig.copier.submit(store(1, {0: 0}))
    rig.gpu.compute.give(lambda: rig.regions[0][1].fill_(77))
    rig.copier.submit(store(2, {1: 1}))
    while len(rig.copier._jobs) or not rig.copier._flights[Direction.STORE]:
        time.sleep(0.001)
    # The first mark is passed, and then the device rests on everything but the copier's own streams.
    rest = [rig.gpu.compute.todo.pop() for _ in range(2)]
    rig.gpu.held = False
    for _ in range(1000):
        rig.gpu.run(1)
    rig.gpu.compute.todo.extend(reversed(rest))
    poll_until(rig.copier, lambda reports: len(reports) == 2)
    assert rig.slot(1)[:64] == bytes([77]) * 64


@pytest.fixture
def asleep(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The copying thread does not get to run before the end of the test."""
    gate = threading.Event()

    def sleep(self: StagedCopier, jobs: Jobs) -> None:
        self._entered = True
        gate.wait()

    monkeypatch.setattr(StagedCopier, "_serve", sleep)
    yield
    gate.set()


def entered(rig: Rig) -> Rig:
    while not rig.copier._entered:
        time.sleep(0.001)
    return rig


@pytest.mark.usefixtures("asleep")
def test_the_engines_thread_gives_the_device_the_first_chunks_of_a_load(make: Callable[..., Rig]) -> None:
    rig = entered(make(load_staging_bytes=88))  # a block a chunk
    rig.pages.row(3)[:] = 42
    assert rig.run(load(1, {5: 3})) == {1: DONE}
    assert rig.block(5) == bytes([42]) * 88
    rig.gpu.held = True
    rig.copier.submit(load(2, {block: block for block in range(12)}))
    assert rig.copier._stagers[Direction.LOAD].ahead == module._AT_ONCE
    rig.gpu.held = False
    [report] = poll_until(rig.copier, bool)  # what is left is given when the device has little to do
    assert report.outcome is DONE


@pytest.mark.usefixtures("asleep")
def test_many_small_loads_at_once_are_left_to_the_thread(make: Callable[..., Rig]) -> None:
    """However fast the device is: between two polls the engine has other things to do."""
    rig = entered(make())
    for number in range(12):
        rig.copier.submit(load(number, {number: number}))
        rig.gpu.run(1000)
    waiting = [job.order.id for job in rig.copier._jobs._waiting if isinstance(job, Job)]
    assert waiting == list(range(module._AT_ONCE, 12))


@pytest.mark.usefixtures("asleep")
def test_stores_and_very_large_loads_are_left_to_the_thread(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_HERE", 2)
    rig = entered(make())
    rig.copier.submit(store(1, {0: 0}))
    rig.copier.submit(load(2, {1: 1, 2: 2}, moves={3: 4}))
    assert (len(rig.copier._jobs), rig.copier.poll(), rig.gpu.calls) == (2, [], 0)
    job = rig.copier._jobs.get()
    assert isinstance(job, Job)
    rig.copier._begun[Direction.LOAD].append(([job], rig.copier._issue([job])))  # as the thread does
    assert (rig.copier.poll(), rig.gpu.calls) == ([], 0)


@pytest.mark.usefixtures("asleep")
@pytest.mark.parametrize("why", ["not pinned", "not entered"])
def test_what_takes_long_is_left_to_the_thread(make: Callable[..., Rig], why: str) -> None:
    rig = entered(make())
    if why == "not pinned":
        rig.pages.pinned = False
    else:
        rig.copier._entered = False
    rig.copier.submit(load(1, {1: 1}))
    assert (len(rig.copier._jobs), rig.gpu.calls) == (1, 0)


@pytest.mark.usefixtures("asleep")
def test_a_load_that_is_to_kill_the_thread_does_not_kill_the_engines(make: Callable[..., Rig]) -> None:
    rig = make()
    job = Job(0, 1, load(1, {5: 3}), Fate(kills=True), rig.gpu.mark())
    rig.copier._begun[Direction.LOAD].append(([job], rig.copier._fated(job)))
    assert (rig.copier.poll(), len(rig.copier._begun[Direction.LOAD])) == ([], 1)


def test_an_error_in_the_engines_thread_is_what_the_other_dies_of(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = entered(make())
    with monkeypatch.context() as patch:
        patch.setattr(StagedCopier, "_columns", lambda self, order: 1 / 0)
        assert rig.run(load(1, {5: 3})) == {1: FAILED}
    assert "the copying thread died (RuntimeError(\"ZeroDivisionError('division by zero')\"))" in caplog.text
    assert rig.run(load(2, {5: 3})) == {2: DONE}
    assert len(rig.copier._tickets) == len(set(rig.copier._tickets)) == module._TICKETS


def test_an_event_that_does_not_answer_is_nothing_the_engine_hears_of(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = entered(make(load_staging_bytes=88))
    rig.gpu.held = True
    rig.copier.submit(load(1, {block: block for block in range(12)}))

    def fail(self: object) -> bool:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr("tests.copier.fake_gpu.FakeEvent.query", fail)
        rig.copier.poll()
    rig.gpu.held = False
    [report] = poll_until(rig.copier, bool)
    assert report.outcome is FAILED
    assert rig.run(load(2, {5: 3})) == {2: DONE}


@pytest.mark.parametrize("blocks", [22, 38])
def test_when_the_thread_dies_the_engines_gives_nothing_more_of_what_it_left(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """A load of which some chunks were not given yet, whose other chunks have ended: who looks would give more."""
    rig = entered(make(num_blocks=40, slots=40, load_staging_bytes=88))
    rig.gpu.held = True
    monkeypatch.setattr(rig.copier._stagers[Direction.STORE], "issue", lambda *_: 1 / 0)
    rig.copier.submit(load(1, {block: block for block in range(blocks)}))
    rig.copier.submit(store(2, {39: 39}))
    rig.copier._thread.join()
    rig.gpu.held = False
    reports = poll_until(rig.copier, lambda reports: len(reports) == 2)
    assert {report.outcome for report in reports} == {FAILED}
    told = [rig.block(block) for block in range(40)]
    while rig.gpu.run(1):
        pass
    assert [rig.block(block) for block in range(40)] == told
    assert rig.copier.poll() == []
    assert len(rig.copier._tickets) == len(set(rig.copier._tickets)) == module._TICKETS


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "_MOST_S", 600.0)


@pytest.mark.usefixtures("long_rests")
def test_the_thread_rests_while_the_engine_launches_a_step(make: Callable[..., Rig]) -> None:
    rig = entered(make())
    rig.copier.rest()
    rig.copier.submit(store(1, {5: 3}))
    assert wait_for(lambda: rig.copier._rests.holds_up)
    assert rig.copier.poll() == []
    rig.copier.resume()
    [report] = poll_until(rig.copier, bool)
    assert report.outcome is DONE
    assert rig.slot(3) == rig.block(5)


@pytest.mark.usefixtures("long_rests")
def test_but_not_if_the_device_has_nothing_to_load(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_HERE", 0)  # the thread has to begin it
    rig = entered(make())
    rig.copier.rest()
    assert rig.run(load(1, {5: 3})) == {1: DONE}


def test_nor_for_long(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rests, "_MOST_S", 0.03)
    rig = entered(make())
    rig.copier.rest()
    assert rig.run(store(1, {5: 3})) == {1: DONE}


def test_nor_in_one_step_after_the_other(make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the thread may not get a turn."""
    monkeypatch.setattr(rests, "_MOST_S", 0.03)
    rig = entered(make())
    rig.copier.submit(store(1, {5: 3}))
    done = []
    for _ in range(1000):
        rig.copier.rest()
        time.sleep(0.005)
        done += rig.copier.poll()
        if done:
            break
    assert [report.outcome for report in done] == [DONE]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of rests: it stands still, and its time is set."""
    clock = SimpleNamespace(now_s=1000.0)
    monkeypatch.setattr(rests, "monotonic", lambda: clock.now_s)
    return clock


def test_held_up_for_too_long_the_thread_goes_on_until_it_has_caught_up(
    make: Callable[..., Rig], clock: SimpleNamespace
) -> None:
    rig = entered(make(store_staging_bytes=88))  # a block a chunk
    rig.copier.rest()
    rig.copier.submit(store(1, {block: block for block in range(12)}))
    assert wait_for(lambda: rig.copier._rests.holds_up)
    clock.now_s += rests._MOST_S
    rig.copier.rest()
    [report] = poll_until(rig.copier, bool)
    assert report.outcome is DONE
    assert wait_for(lambda: not rig.copier._rests.holds_up)
    rig.copier.submit(store(2, {5: 3}))
    assert wait_for(lambda: rig.copier._rests.holds_up), "and rests again"


def test_loads_that_may_not_wait_do_not_make_a_store_wait_for_longer(
    make: Callable[..., Rig], clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_HERE", 0)  # the thread has to begin loads
    rig = entered(make())
    rig.copier.rest()
    rig.copier.submit(store(1, {5: 3}))
    assert wait_for(lambda: rig.copier._rests.holds_up)
    clock.now_s += 0.6 * rests._MOST_S
    rig.copier.rest()
    [report] = run(rig.copier, load(2, {6: 4})).items()
    assert report == (2, DONE)
    clock.now_s += 0.6 * rests._MOST_S
    rig.copier.rest()
    [report] = poll_until(rig.copier, bool)
    assert (report.transfer_id, report.outcome) == (1, DONE)


@pytest.mark.parametrize(
    ("chunk_s", "first"),
    [(0.0004, [0.0, 0.0, "lets others run"] * 4), (0.0011, [0.0, 0.0] + ["lets others run"] * 10)],
)
def test_every_millisecond_the_thread_lets_others_run_unless_the_device_has_little_to_do(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, chunk_s: float, first: list[object]
) -> None:
    does: list[object] = []
    now_s = 0.0
    advance, get = StagedCopier._advance, Jobs.get

    def watched_advance(self: StagedCopier, begun: Any) -> None:
        nonlocal now_s
        now_s += chunk_s  # so long it takes to give one
        does.append("gives")
        advance(self, begun)

    def watched_get(self: Jobs, timeout_s: float | None = None) -> Any:
        does.append(timeout_s)
        return get(self, timeout_s)

    monkeypatch.setattr(module, "sleep", lambda _: does.append("lets others run"))
    monkeypatch.setattr(module, "monotonic", lambda: now_s)
    monkeypatch.setattr(module, "_MOST_HERE", 0)  # the thread has to give all of it
    monkeypatch.setattr(module, "_AHEAD", ((Direction.LOAD, 100),))
    monkeypatch.setattr(StagedCopier, "_advance", watched_advance)
    monkeypatch.setattr(Jobs, "get", watched_get)
    rig = make(num_blocks=24, slots=24, load_staging_bytes=88)  # a block a chunk
    rig.gpu.held = True  # the more it was given, the more it has to do
    rig.copier.submit(load(1, {block: block for block in range(24)}))
    assert wait_for(lambda: does.count("gives") == 24 and does[-1] is None), "then until something comes"
    after = [then for does_so, then in pairwise(does) if does_so == "gives"]
    assert after[:12] == first


def test_with_as_much_as_the_device_may_have_the_thread_waits(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    get = Jobs.get

    def watched_get(self: Jobs, timeout_s: float | None = None) -> Any:
        waits.append(timeout_s)
        return get(self, timeout_s)

    monkeypatch.setattr(Jobs, "get", watched_get)
    rig = entered(make(load_staging_bytes=88))  # a block a chunk
    rig.gpu.held = True
    rig.copier.submit(load(1, {block: block for block in range(12)}))
    assert wait_for(lambda: waits[-5:] == [module._LOOK_AGAIN_S] * 5)
    rig.copier.rest()
    rig.copier.submit(store(2, {5: 3}))
    assert wait_for(lambda: rig.copier._rests.holds_up)
    assert min(each for each in waits[-2:] if each is not None) > 0.0


def test_who_rests_with_nothing_to_give_is_not_held_up(make: Callable[..., Rig], clock: SimpleNamespace) -> None:
    """The engine's thread may have given what there was."""
    rig = entered(make())
    rig.copier.rest()
    rig.copier._rests.hold_up()
    rig.copier._jobs.put(Wake())
    assert wait_for(lambda: not rig.copier._rests.holds_up)


def test_a_copier_that_has_stopped_is_not_woken(make: Callable[..., Rig]) -> None:
    rig = entered(make(faults=InjectedFaults(kill_nth=tuple(range(1, 100)))))
    for number in range(20):
        rig.run(store(number, {5: 3}))
    assert rig.copier._stopped
    waiting = len(rig.copier._jobs)
    rig.copier._rests.hold_up()
    rig.copier._few.add(Job(1, 1, store(99, {5: 3}), Fate(), None))
    for _ in range(10):
        rig.copier.rest()
        rig.copier.hurry()
        rig.copier.resume()
    assert len(rig.copier._jobs) == waiting


def test_few_blocks_do_not_wait_for_others_if_there_is_nothing_to_compute(make: Callable[..., Rig]) -> None:
    rig = entered(make(few_wait_s=600.0))
    rig.copier.submit(store(1, {5: 3}))
    assert wait_for(lambda: rig.copier._few.jobs)
    rig.copier.hurry()
    [report] = poll_until(rig.copier, bool)
    assert report.outcome is DONE


@pytest.mark.usefixtures("long_rests")
def test_what_the_engines_thread_began_is_not_forgotten_in_a_rest(make: Callable[..., Rig]) -> None:
    rig = entered(make(load_staging_bytes=88))  # a block a chunk, and more of them than it gives itself
    rig.copier.rest()
    rig.copier.submit(load(1, {block: block for block in range(12)}))
    assert wait_for(lambda: not rig.copier._begun[Direction.LOAD]), "nobody has polled"


@pytest.mark.usefixtures("long_rests")
def test_a_thread_with_nothing_to_give_is_not_woken(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = entered(make(few_wait_s=600.0))
    rig.copier.submit(store(1, {5: 3}))  # waits for others
    assert wait_for(lambda: rig.copier._few.jobs)
    put: list[object] = []
    monkeypatch.setattr(rig.copier._jobs, "put", put.append)
    for _ in range(3):
        rig.copier.rest()
        time.sleep(0.02)
        rig.copier.resume()
    assert put == []
    monkeypatch.undo()


@pytest.mark.usefixtures("long_rests")
def test_close_does_not_wait_for_the_end_of_a_rest(make: Callable[..., Rig]) -> None:
    rig = entered(make())
    rig.copier.rest()
    rig.copier.submit(store(1, {5: 3}))
    rig.copier.close()
    assert [report.outcome for report in rig.copier.poll()] == [DONE]


def test_the_interpreter_is_kept_until_the_first_copy_is_given(make: Callable[..., Rig]) -> None:
    """Beside a thread that computes, whoever gives it away gets it back 5 ms later; numpy did so several times
    for an order of a thousand blocks. Here he would get it back a second later, and the other has computed."""
    rig = make(num_blocks=1000, slots=1000, load_staging_bytes=4096)
    pairs = dict(zip(range(1000), Random(5).sample(range(1000), 1000), strict=True))
    order, jobs = keyed(load(1, pairs)), Jobs()
    turns, stop = 0, False

    def compute() -> None:
        nonlocal turns
        while not stop:
            turns += 1

    other = threading.Thread(target=compute)
    switches_after_s = sys.getswitchinterval()
    other.start()
    try:
        for _ in range(20):
            sys.setswitchinterval(1)
            before, given = turns, rig.gpu.calls
            jobs.put(Job(0, 1, order, Fate(), rig.gpu.mark()))
            job = jobs.get()
            assert isinstance(job, Job)
            assert not rig.copier._is_refused(job)
            next(rig.copier._issue([job]))
            assert (turns, rig.gpu.calls > given) == (before, True)
            sys.setswitchinterval(switches_after_s)
            time.sleep(0)
    finally:
        sys.setswitchinterval(switches_after_s)
        stop = True
        other.join()


# --- injected ---------------------------------------------------------------------------------------------


def test_an_injected_failure_leaves_garbage_where_it_should_have_written(make: Callable[..., Rig]) -> None:
    rig = make(faults=InjectedFaults(fail_chance=1.0))
    before = rig.blocks
    garbage = bytes([GARBAGE]) * rig.gpu.bytes_per_block
    assert rig.run(keyed(store(1, {0: 5}))) == {1: FAILED}
    assert rig.slot(5) == garbage
    assert rig.run(keyed(load(2, {1: 5, 2: 6}, {9: 8}))) == {2: FAILED}
    assert rig.blocks == [garbage if block in (1, 2, 9) else before[block] for block in range(12)]


def test_a_killed_thread_leaves_garbage_and_is_replaced(make: Callable[..., Rig]) -> None:
    rig = make(faults=InjectedFaults(kill_nth=(2, 3)))
    garbage = bytes([GARBAGE]) * rig.gpu.bytes_per_block
    assert rig.run(store(1, {0: 5})) == {1: DONE}
    assert rig.run(load(2, {1: 5}, {9: 8})) == {2: FAILED}
    assert {rig.block(1), rig.block(9)} == {garbage}
    assert rig.run(store(3, {0: 6})) == {3: FAILED}
    assert rig.slot(6) == garbage
    assert rig.run(load(4, {1: 5})) == {4: DONE}
    assert rig.block(1) == rig.block(0)


def test_a_flipped_bit_is_noticed(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make(faults=InjectedFaults(fail_chance=1.0, spoil="flip"))
    assert rig.run(keyed(store(1, {0: 0, 1: 1}))) == {1: DONE}
    assert rig.slot(0) != rig.block(0)
    assert rig.run(keyed(load(2, {2: 0, 3: 1}))) == {2: MISMATCH}
    assert "transfer 2: 1 of 2 blocks are not what was stored" in caplog.text
    assert rig.run(keyed(load(3, {3: 1}))) == {3: DONE}


def test_a_slot_that_is_reused_under_a_load_is_noticed(make: Callable[..., Rig]) -> None:
    rig = make(faults=InjectedFaults(fail_chance=1.0, spoil="reuse"))
    assert rig.run(keyed(store(1, {0: 0, 1: 1}))) == {1: DONE}
    assert rig.run(keyed(load(2, {2: 0, 3: 1}))) == {2: MISMATCH}


def test_a_slot_that_holds_another_key_is_noticed(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.run(keyed(store(1, {0: 0, 1: 1})))
    rig.run(keyed(store(2, {2: 1}), "other"))
    assert rig.run(keyed(load(3, {4: 0, 5: 1}))) == {3: MISMATCH}
    assert rig.run(keyed(load(4, {5: 1}), "other")) == {4: DONE}


def test_a_copy_reported_before_it_is_done_is_noticed_and_has_ended_when_it_is_told(
    make: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    rig = make(faults=InjectedFaults(fail_chance=1.0, spoil="early"))
    for number, order in enumerate((store(1, {0: 0, 1: 1}), load(2, {2: 0, 3: 1}))):
        assert rig.run(keyed(order)) == {number + 1: MISMATCH}
        assert rig.gpu.run(1) == 0
    assert "transfer 1 was reported before it was done" in caplog.text


def test_unverified_copies_see_nothing(make: Callable[..., Rig]) -> None:
    rig = make(verify=Verify.OFF, faults=InjectedFaults(fail_chance=1.0, spoil="flip"))
    assert rig.run(keyed(store(1, {0: 0}))) == {1: DONE}
    assert rig.run(keyed(load(2, {2: 0}))) == {2: DONE}
    assert rig.block(2) != rig.block(0)


def test_reports_are_held_back_for_so_many_polls(make: Callable[..., Rig]) -> None:
    rig = make(faults=InjectedFaults(delay_polls=3))
    rig.copier.submit(store(1, {0: 0}))
    while not rig.copier._held:
        assert rig.copier.poll() == []
    assert [len(rig.copier.poll()) for _ in range(3)] == [0, 0, 1]  # the poll that saw it end was the first


# --- the end ----------------------------------------------------------------------------------------------


def test_close_waits_for_bytes_on_their_way_and_may_be_called_twice(make: Callable[..., Rig]) -> None:
    rig = make()
    before = rig.blocks
    orders = [keyed(store(1, {block: block for block in range(12)})), keyed(load(2, {}))]
    for order in orders:
        rig.copier.submit(order)
    seen: list[bytes] = []
    close = rig.pages.close
    rig.pages.close = lambda: (seen.extend(rig.slot(slot) for slot in range(12)), close())  # type: ignore
    rig.copier.close()
    assert seen == before
    assert {report.outcome for report in rig.copier.poll()} == {DONE}
    rig.pages.close = close  # type: ignore[method-assign]
    rig.copier.close()
    with pytest.raises(InvariantError):
        rig.copier.submit(store(3, {0: 0}))


def test_close_with_more_orders_than_fit_on_the_way(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_TICKETS", 2)
    rig = make()
    for number in range(9):
        rig.copier.submit(load(number, {}))
    rig.copier.close()
    assert [report.outcome for report in rig.copier.poll()] == [DONE] * 9


def test_close_when_the_device_is_gone(make: Callable[..., Rig], caplog: pytest.LogCaptureFixture) -> None:
    rig = make()

    def gone(self: object) -> None:
        raise RuntimeError("driver shutting down")

    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(module.Stager, "synchronize", gone)
        rig.copier.close()
    assert "the device does not answer: RuntimeError('driver shutting down')" in caplog.text


def test_nothing_that_takes_long_is_done_before_the_engine_has_started(make: Callable[..., Rig]) -> None:
    entered: list[bool] = []
    rig = make(waits=True, entered=entered)
    time.sleep(0.05)
    assert rig.copier.poll() == []
    assert not entered
    rig.copier.go_on()
    assert wait_for(lambda: entered)
    assert rig.run(store(1, {3: 0})) == {1: DONE}


def test_an_order_does_not_wait_for_that(make: Callable[..., Rig]) -> None:
    rig = make(waits=True)
    assert rig.run(store(1, {3: 0})) == {1: DONE}


def test_what_was_submitted_is_carried_out_by_who_waits_and_is_closed(make: Callable[..., Rig]) -> None:
    rig = make(waits=True)
    rig.copier.submit(store(1, {3: 0}))
    rig.copier.close()
    assert [report.outcome for report in rig.copier.poll()] == [DONE]


def test_memory_grows_when_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.copier.cuda import cuda_copier, gpu

    registered: list[int] = []
    regions = make_regions(12)
    device: Any = FakeGpu(regions, Random(7))
    device.driver = SimpleNamespace(
        register=lambda address, length: registered.append(length),
        unregister=lambda address: None,
        pci_bus_id=lambda: "0000:00:00.0",
    )
    monkeypatch.setattr(gpu, "CudaGpu", lambda regions, slots: device)
    slots = (34 << 20) // device.bytes_per_block
    copier = cuda_copier(regions, slots, waits=True, load_staging_bytes=300, store_staging_bytes=88)
    try:
        assert wait_for(lambda: copier.ready)
        assert not copier.pages.wait(0.5)
        assert (len(registered), copier.ready < slots) == (1, True)
        copier.go_on()
        assert copier.pages.wait(60)
        assert (len(registered), copier.ready) == (2, slots)
    finally:
        copier.close()


def test_nobody_begins_what_takes_long_only_to_end(make: Callable[..., Rig]) -> None:
    entered: list[bool] = []
    rig = make(waits=True, entered=entered)
    rig.copier.close()
    assert not entered
    assert not rig.copier._thread.is_alive()


def wait_for(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(condition())
