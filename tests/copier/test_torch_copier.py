from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from threading import Thread

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from forebay.copier import Copier, InjectedFaults
from forebay.copier.arena import Arena
from forebay.copier.faults import GARBAGE
from forebay.copier.regions import block_regions
from forebay.copier.torch_copier import TorchCopier
from forebay.errors import CapacityError, ConfigError, InvariantError, LayoutError
from forebay.ids import BlockId, Key, Rank, Slot
from forebay.transfers import CopyOrder, Outcome
from tests.copier.builders import block_bytes, held, load, make_regions, poll_until, run, slot_bytes, store

DONE, FAILED, MISMATCH = Outcome.DONE, Outcome.FAILED, Outcome.MISMATCH


@pytest.fixture
def regions() -> list[torch.Tensor]:
    return make_regions()


@pytest.fixture
def copier(regions: list[torch.Tensor]) -> Iterator[TorchCopier]:
    copier = TorchCopier(regions, slots=6, rank=Rank(3))
    yield copier
    copier.close()


def all_blocks(regions: list[torch.Tensor]) -> list[bytes]:
    return [block_bytes(regions, block) for block in range(regions[0].size(0))]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"forebay"}
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- copies -----------------------------------------------------------------------------------------------


def test_it_fulfils_the_contract(copier: TorchCopier) -> None:
    contract: Copier = copier
    assert contract.poll() == []


def test_a_block_comes_back_byte_for_byte(regions: list[torch.Tensor], copier: TorchCopier) -> None:
    before = all_blocks(regions)
    assert run(copier, store(1, {0: 5, 7: 0, 3: 2})) == {1: DONE}
    assert [slot_bytes(copier, slot) for slot in (5, 0, 2)] == [before[0], before[7], before[3]]
    assert all_blocks(regions) == before, "a store writes nothing on the device"
    assert run(copier, load(2, {1: 5, 4: 0, 0: 2})) == {2: DONE}
    assert all_blocks(regions) == [before[source] for source in (3, 0, 2, 3, 7, 5, 6, 7)]


def test_gaps_between_rows_are_left_alone(regions: list[torch.Tensor], copier: TorchCopier) -> None:
    run(copier, store(1, {0: 0}))
    run(copier, load(2, dict.fromkeys(range(1, 8), 0)))
    for region in regions:
        backing = torch.tensor([], dtype=torch.uint8).set_(region.untyped_storage())
        assert not backing.view(8, -1)[:, region.size(1) :].any()


@pytest.mark.parametrize("widths", [(64, 24), (4, 12), (2, 6), (7, 1), (1,), (16,) * 20])
@pytest.mark.parametrize("gap", [0, 1, 8])
def test_any_width_and_alignment(widths: tuple[int, ...], gap: int) -> None:
    regions = make_regions(num_blocks=5, widths=widths, gap=gap)
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=4)
    assert copier.bytes_per_block == sum(widths)
    assert copier.arena.shape == (4, sum(widths))
    run(copier, store(1, {0: 3, 1: 1}), store(2, {2: 0}))
    run(copier, load(3, {3: 3, 4: 1, 0: 0}, moves={1: 2, 2: 1}))
    assert all_blocks(regions) == [before[2], before[2], before[1], before[0], before[1]]
    copier.close()


def test_rows_that_begin_anywhere() -> None:
    backing = torch.arange(5 * 16 + 3).to(torch.uint8)
    regions = [backing[3:].view(5, 16)]
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=5)
    run(copier, store(1, {block: block for block in range(5)}))
    run(copier, load(2, {block: (block + 2) % 5 for block in range(5)}))
    assert all_blocks(regions) == [before[block] for block in (2, 3, 4, 0, 1)]
    copier.close()


def test_copies_larger_than_the_buffer() -> None:
    # 3 MiB a block, in two regions, one of them wider than the buffer; 8 blocks at once.
    regions = [torch.randint(0, 256, (16, width), dtype=torch.uint8) for width in (1 << 19, 5 << 19)]
    before = [region.clone() for region in regions]
    copier = TorchCopier(regions, slots=8)
    run(copier, store(1, {block: 7 - block for block in range(8)}))
    shifted = {8 + block: (block + 1) % 8 + 8 for block in range(8)}
    run(copier, load(2, {block: block for block in range(8)}, moves=shifted))
    for region, old in zip(regions, before, strict=True):
        assert torch.equal(region[:8], old[:8].flip(0))
        assert torch.equal(region[8:], old[8:].roll(-1, 0))
    copier.close()


def test_the_regions_of_a_real_layout() -> None:
    with torch.inference_mode():  # where engines allocate, and where connectors are told of it
        backing = torch.randint(0, 256, (2 * 32 * 4096,), dtype=torch.uint8)
        pages = backing.view(torch.float16)
        layers = [pages.as_strided((32, 2, 16, 64), (2048, 1024, 64, 1), layer * 65_536) for layer in (0, 1)]
        before = backing.clone().view(2, 32, 4096)
        copier = TorchCopier(block_regions(layers, 32), slots=32)
    assert copier.bytes_per_block == 8192
    assert run(copier, store(1, {block: 31 - block for block in range(32)})) == {1: DONE}
    assert run(copier, load(2, {block: block for block in range(32)})) == {2: DONE}
    assert torch.equal(backing.view(2, 32, 4096), before.flip(1))
    copier.close()


def test_an_order_of_nothing_is_done(copier: TorchCopier) -> None:
    assert run(copier, store(1, {}), load(2, {})) == {1: DONE, 2: DONE}


def test_an_order_is_what_it_was_when_it_was_submitted(
    regions: list[torch.Tensor], copier: TorchCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = all_blocks(regions)
    with held(monkeypatch) as (go, _):
        order = store(1, {1: 1})
        copier.submit(order)
        order.blocks[:] = [BlockId(2)]
        order.slots[:] = [Slot(99)]
        go.set()
        assert poll_until(copier, bool) == [(1, 3, DONE)]
    assert slot_bytes(copier, 1) == before[1]


# --- moves ------------------------------------------------------------------------------------------------


def test_moves_swap_and_rotate(regions: list[torch.Tensor], copier: TorchCopier) -> None:
    before = all_blocks(regions)
    run(copier, load(1, {}, moves={0: 1, 1: 0, 2: 3, 3: 4, 4: 2, 5: 6, 7: 6}))
    assert all_blocks(regions) == [before[source] for source in (1, 0, 3, 4, 2, 6, 6, 6)]


def test_a_move_reads_what_was_there_before_the_load_wrote_it(
    regions: list[torch.Tensor], copier: TorchCopier
) -> None:
    before = all_blocks(regions)
    run(copier, store(1, {7: 0}))
    run(copier, load(2, {1: 0, 2: 0}, moves={3: 1, 4: 2, 5: 3}))
    assert all_blocks(regions) == [before[source] for source in (0, 7, 7, 1, 2, 3, 6, 7)]


# --- threads ----------------------------------------------------------------------------------------------


def test_submitting_does_not_wait_and_loads_go_first(copier: TorchCopier, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(monkeypatch) as (go, begun):
        for order in (store(1, {0: 0}), store(2, {1: 1}), load(3, {2: 2}), store(4, {3: 3}), load(5, {4: 4})):
            copier.submit(order)
            while not begun:  # the first is taken before there is anything more urgent
                threading.Event().wait(0.001)
        assert copier.poll() == []
        go.set()
        reports = poll_until(copier, lambda reports: len(reports) == 5)
    assert [report.transfer_id for report in reports] == [1, 3, 5, 2, 4]
    assert begun == [1, 3, 5, 2, 4]


def test_the_thread_has_a_name_and_keeps_no_process_alive(copier: TorchCopier) -> None:
    [thread] = [each for each in threading.enumerate() if each.name == "forebay-copier-3"]
    assert thread.daemon


# --- what goes wrong --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "why"),
    [
        (store(1, {0: 0, 8: 1}), "there is no block 8, only 0 to 7"),
        (store(1, {0: 0, -1: 1}), "there is no block -1, only 0 to 7"),
        (store(1, {0: 0, 1: 6}), "there is no slot 6, only 0 to 5"),
        (store(1, {0: 0, 1: -6}), "there is no slot -6, only 0 to 5"),
        (load(1, {0: 0, 8: 1}), "there is no block 8, only 0 to 7"),
        (load(1, {0: 0, 1: 6}), "there is no slot 6, only 0 to 5"),
        (load(1, {0: 0}, moves={1: 8}), "there is no block 8, only 0 to 7"),
        (load(1, {0: 0}, moves={-2: 1}), "there is no block -2, only 0 to 7"),
        (store(1, {0: 2, 1: 2}), "it names a destination twice"),
        (load(1, {0: 2}, moves={0: 1}), "it names a destination twice"),
        (store(1, {0: 0})._replace(slots=[]), "its columns are of unequal length"),
        (load(1, {})._replace(move_to=[BlockId(1)]), "its columns are of unequal length"),
        (store(1, {0: 0})._replace(move_to=[BlockId(1)], move_from=[BlockId(2)]), "a store has no moves"),
    ],
)
def test_an_order_that_makes_no_sense_fails_and_writes_nothing(
    order: CopyOrder,
    why: str,
    regions: list[torch.Tensor],
    copier: TorchCopier,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copier.arena.fill_(7)
    before, arena = all_blocks(regions), copier.arena.clone()
    assert run(copier, order) == {1: FAILED}
    assert run(copier, order._replace(id=2)) == {2: FAILED}  # type: ignore[arg-type]
    assert warnings_in(caplog) == [f"rank 3: transfer 1 was refused: {why}"]
    assert all_blocks(regions) == before
    assert torch.equal(copier.arena, arena)
    assert run(copier, store(3, {1: 1})) == {3: DONE}


def fail_at(monkeypatch: pytest.MonkeyPatch, error: BaseException, *orders: int) -> None:
    copy = Arena.copy

    def copy_or_not(self: Arena, order: CopyOrder, sums: dict[int, int]) -> None:
        if order.id in orders:
            raise error
        copy(self, order, sums)

    monkeypatch.setattr(Arena, "copy", copy_or_not)


def test_an_error_while_copying_fails_that_order_only(
    copier: TorchCopier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, RuntimeError("out of luck"), 1, 3)
    outcomes = run(copier, *(store(number, {number: number}) for number in range(5)))
    assert outcomes == {0: DONE, 1: FAILED, 2: DONE, 3: FAILED, 4: DONE}
    assert warnings_in(caplog) == ["rank 3: transfer 1 could not be copied"]
    assert "out of luck" in caplog.text


def test_many_errors_are_one_line_of_each_kind(
    copier: TorchCopier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, RuntimeError("out of luck"), *range(100, 200))
    run(copier, *(store(number, {0: 0}) for number in range(100, 200)))
    run(copier, *(store(number, {99: 0}) for number in range(200, 300)))
    assert warnings_in(caplog) == [
        "rank 3: transfer 100 could not be copied",
        "rank 3: transfer 200 was refused: there is no block 99, only 0 to 7",
    ]


@pytest.mark.parametrize("error", [SystemExit(), KeyboardInterrupt(), GeneratorExit()], ids=repr)
def test_when_the_thread_dies_all_it_left_behind_fails_and_another_goes_on(
    error: BaseException,
    regions: list[torch.Tensor],
    copier: TorchCopier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with held(monkeypatch) as (go, _):
        fail_at(monkeypatch, error, 2)
        for number in range(1, 5):
            copier.submit(store(number, {number: number}))
        go.set()
        reports = poll_until(copier, lambda reports: len(reports) == 4)
    assert [report.outcome for report in reports] == [DONE, FAILED, FAILED, FAILED]
    assert warnings_in(caplog) == [f"rank 3: the copying thread died ({error!r}); orders failed with it: 3"]
    assert run(copier, store(5, {5: 5}), load(6, {0: 1})) == {5: DONE, 6: DONE}
    assert block_bytes(regions, 0) == block_bytes(regions, 1)
    assert len([each for each in threading.enumerate() if each.name == "forebay-copier-3"]) == 1


def test_what_ended_while_the_thread_was_dying_is_not_failed(
    copier: TorchCopier, monkeypatch: pytest.MonkeyPatch
) -> None:
    [thread] = [each for each in threading.enumerate() if each.name == "forebay-copier-3"]
    with held(monkeypatch) as (go, _):
        fail_at(monkeypatch, SystemExit(), 2)
        copier.submit(store(1, {0: 0}))
        copier.submit(store(2, {1: 1}))
        # The worst moment: all of it happens while poll() asks.
        monkeypatch.setattr(thread, "is_alive", lambda: (go.set(), Thread.join(thread), False)[-1])
        assert copier.poll() == [(1, 3, DONE), (2, 3, FAILED)]
        assert copier.poll() == []


def test_a_thread_that_is_killed_while_it_waits_is_replaced(
    copier: TorchCopier, caplog: pytest.LogCaptureFixture
) -> None:
    [thread] = [each for each in threading.enumerate() if each.name == "forebay-copier-3"]
    killed = ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
    assert killed == 1
    copier.submit(store(1, {0: 0}))  # it wakes up for that, and dies
    thread.join()
    copier.submit(store(2, {1: 1}))  # nobody has looked yet
    assert copier.poll() == [(1, 3, FAILED), (2, 3, FAILED)]
    assert len(warnings_in(caplog)) == 1
    assert run(copier, store(3, {0: 0})) == {3: DONE}


@pytest.mark.parametrize(
    ("given", "error", "line"),
    [
        ([], LayoutError, "regions: expected at least one, got []"),
        ([torch.zeros(8, 4)], LayoutError, "regions[0]: expected bytes in rows"),
        ([torch.zeros(8, 0, dtype=torch.uint8)], LayoutError, "regions[0]: expected bytes in rows"),
        ([torch.zeros(8, dtype=torch.uint8)], LayoutError, "regions[0]: expected bytes in rows"),
        ([torch.zeros(8, 4, dtype=torch.uint8).t()], LayoutError, "regions[0]: expected dense rows"),
        ([torch.zeros(9, 4, dtype=torch.uint8, device="meta")], LayoutError, "regions[0]: expected memory that"),
        (
            [torch.zeros(8, 4, dtype=torch.uint8), torch.zeros(9, 4, dtype=torch.uint8)],
            LayoutError,
            "regions[1]: expected as many blocks as in regions[0], 8, got 9",
        ),
    ],
)
def test_regions_that_cannot_be_used(given: list[torch.Tensor], error: type[Exception], line: str) -> None:
    with pytest.raises(error) as raised:
        TorchCopier(given, slots=4)
    assert str(raised.value).startswith(line)


@pytest.mark.parametrize("slots", [0, -1, 1.0, True, None])
def test_slots_that_are_none(slots: int) -> None:
    with pytest.raises(CapacityError, match=r"^slots: expected a whole number, at least 1"):
        TorchCopier(make_regions(), slots=slots)


def test_more_slots_than_there_is_memory() -> None:
    with pytest.raises(CapacityError) as raised:
        TorchCopier(make_regions(), slots=1 << 50)
    assert str(raised.value) == (
        f"slots: expected no more slots of 88 bytes than the host has memory for, got {1 << 50}"
    )


# --- injected faults --------------------------------------------------------------------------------------


def garbage(copier: TorchCopier) -> bytes:
    return bytes([GARBAGE]) * copier.bytes_per_block


def test_an_injected_failure_leaves_garbage_where_it_should_have_written(regions: list[torch.Tensor]) -> None:
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(fail_chance=1.0))
    copier.arena.fill_(7)
    assert run(copier, store(1, {0: 0, 1: 3})) == {1: FAILED}
    assert [slot_bytes(copier, slot) == garbage(copier) for slot in range(6)] == [
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert all_blocks(regions) == before
    arena = copier.arena.clone()
    assert run(copier, load(2, {2: 2}, moves={5: 6})) == {2: FAILED}
    after = all_blocks(regions)
    assert after[2] == after[5] == garbage(copier)
    assert [after[block] for block in (0, 1, 3, 4, 6, 7)] == [before[block] for block in (0, 1, 3, 4, 6, 7)]
    assert torch.equal(copier.arena, arena)
    copier.close()


def test_nothing_is_garbled_by_an_order_that_is_refused(regions: list[torch.Tensor]) -> None:
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(fail_chance=1.0))
    assert run(copier, load(1, {0: 0, 1: 6})) == {1: FAILED}
    assert all_blocks(regions) == before
    copier.close()


def test_equal_seeds_fail_the_same_orders(regions: list[torch.Tensor]) -> None:
    faults = InjectedFaults(fail_chance=0.5, seed=4)
    outcomes = []
    for rank in (0, 0, 1):
        copier = TorchCopier(regions, slots=6, rank=Rank(rank), faults=faults)
        outcomes.append(run(copier, *(load(number, {number % 8: 0}) for number in range(40))))
        copier.close()
    assert outcomes[0] == outcomes[1] != outcomes[2]
    assert set(outcomes[0].values()) == {DONE, FAILED}


def test_only_one_direction_fails(regions: list[torch.Tensor]) -> None:
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(fail_chance=1.0, only="load"))
    assert run(copier, store(1, {0: 0}), store(2, {1: 1})) == {1: DONE, 2: DONE}
    assert run(copier, load(3, {0: 0})) == {3: FAILED}
    copier.close()


@pytest.mark.parametrize("spoil", ["flip", "reuse"])
def test_what_goes_wrong_in_silence_is_noticed(regions: list[torch.Tensor], spoil: str) -> None:
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(fail_chance=1.0, spoil=spoil))  # type: ignore[arg-type]
    keys = [Key(b"one"), Key(b"two")]
    assert run(copier, store(1, {0: 0, 1: 1})._replace(keys=keys)) == {1: DONE}
    assert run(copier, load(2, {2: 0, 3: 1})._replace(keys=keys)) == {2: MISMATCH}
    copier.close()


def test_a_copier_whose_thread_dies_again_and_again_stops_and_says_so(
    regions: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(kill_nth=tuple(range(1, 9))))
    for number in range(8):
        assert run(copier, store(number, {0: 0})) == {number: FAILED}
    assert "the copier has stopped; nothing is stored or loaded any more" in caplog.text
    assert run(copier, store(9, {0: 0})) == {9: FAILED}, "although nothing would kill the thread any more"
    assert not copier._thread.is_alive()
    copier.close()


def test_nothing_can_be_reported_too_early(regions: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"^spoil: expected flip or reuse"):
        TorchCopier(regions, slots=6, faults=InjectedFaults(fail_chance=1.0, spoil="early"))


def test_reports_are_held_back_for_so_many_polls(
    regions: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(delay_polls=3))
    undelayed = TorchCopier(regions, slots=6, faults=InjectedFaults(delay_polls=3, ranks=(1,)))
    for each in (copier, undelayed):
        ended = threading.Event()
        copy = Arena.copy
        monkeypatch.setattr(Arena, "copy", lambda *args, copy=copy, ended=ended: (copy(*args), ended.set()))
        each.submit(store(1, {0: 0}))
        ended.wait()
    assert poll_until(undelayed, bool) == [(1, 0, DONE)]
    polls = 1
    while not (reports := copier.poll()):
        polls += 1
    assert reports == [(1, 0, DONE)]
    assert polls >= 4
    assert copier.poll() == []
    copier.close()
    undelayed.close()


def test_a_killed_thread_leaves_garbage_and_a_warning(
    regions: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(kill_nth=(2, 3), only="load"))
    [notice] = warnings_in(caplog)
    assert notice.startswith("rank 0: faults are injected into copies, as asked for: InjectedFaults(")
    caplog.clear()
    assert run(copier, store(1, {0: 0}), store(2, {1: 1})) == {1: DONE, 2: DONE}
    assert run(copier, load(3, {2: 0})) == {3: DONE}
    assert run(copier, load(4, {3: 1})) == {4: FAILED}
    assert run(copier, load(5, {4: 1})) == {5: FAILED}
    assert warnings_in(caplog) == [
        "rank 0: the copying thread died (SystemExit('injected')); orders failed with it: 1"
    ]
    assert run(copier, load(6, {5: 1})) == {6: DONE}
    after = all_blocks(regions)
    assert after[2] == before[0]
    assert after[3] == after[4] == garbage(copier)
    assert after[5] == before[1]
    copier.close()


def test_other_ranks_are_not_touched(regions: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    faults = InjectedFaults(fail_chance=1.0, kill_nth=(1,), ranks=(1,))
    copier = TorchCopier(regions, slots=6, rank=Rank(0), faults=faults)
    assert run(copier, store(1, {0: 0})) == {1: DONE}
    assert warnings_in(caplog) == []
    copier.close()


# --- the end ----------------------------------------------------------------------------------------------


def test_close_waits_for_what_was_submitted(regions: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    before = all_blocks(regions)
    copier = TorchCopier(regions, slots=6)
    run(copier, store(1, {0: 0, 1: 1, 2: 2}))
    with held(monkeypatch) as (go, _):
        for number in range(3):
            copier.submit(load(2 + number, {5 + number: number}))
        closing = threading.Thread(target=copier.close)
        closing.start()
        closing.join(0.05)
        assert closing.is_alive(), "bytes are on their way"
        go.set()
        closing.join()
    assert all_blocks(regions)[5:] == before[:3]
    assert copier.poll() == [(2, 0, DONE), (3, 0, DONE), (4, 0, DONE)]
    assert copier.poll() == []


def test_close_may_be_called_twice_and_nothing_is_taken_after_it(copier: TorchCopier) -> None:
    copier.close()
    copier.close()
    assert copier.poll() == []
    with pytest.raises(InvariantError, match="transfer 7 was submitted to a copier that is closed"):
        copier.submit(store(7, {0: 0}))
    assert not [each for each in threading.enumerate() if each.name == "forebay-copier-3"]


def test_close_with_a_dead_thread_fails_what_it_left_behind(
    copier: TorchCopier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fail_at(monkeypatch, SystemExit(), 1)
    copier.submit(store(1, {0: 0}))
    [thread] = [each for each in threading.enumerate() if each.name == "forebay-copier-3"]
    thread.join()
    copier.submit(load(2, {1: 1}))
    copier.close()
    copier.close()
    assert copier.poll() == [(1, 3, FAILED), (2, 3, FAILED)]
    assert copier.poll() == []
    assert len(warnings_in(caplog)) == 1


def test_close_does_not_hold_reports_back(regions: list[torch.Tensor]) -> None:
    copier = TorchCopier(regions, slots=6, faults=InjectedFaults(delay_polls=100))
    copier.submit(store(1, {0: 0}))
    assert copier.poll() == []
    copier.close()
    assert copier.poll() == [(1, 0, DONE)]
    assert copier.poll() == []


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_slots_cost_memory_once_they_are_used_and_none_after_close() -> None:
    mib = 1 << 20
    regions = [torch.zeros((4, mib), dtype=torch.uint8)]
    before = resident_bytes()
    copier = TorchCopier(regions, slots=1024)
    assert resident_bytes() - before < 100 * mib
    run(copier, store(1, {block: block for block in range(4)}))
    arena, device = StorageWeakRef(copier.arena.untyped_storage()), StorageWeakRef(regions[0].untyped_storage())
    assert resident_bytes() - before < 100 * mib
    regions.clear()
    assert not arena.expired()
    assert not device.expired()
    copier.close()
    assert arena.expired()
    assert device.expired(), "nor does it keep the engine's memory"
    assert copier.arena.shape == (0, mib)
    assert (copier.slots, copier.bytes_per_block) == (1024, mib)
