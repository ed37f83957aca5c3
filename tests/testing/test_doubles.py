"""The test doubles themselves: a tool that cannot fail proves nothing."""

from __future__ import annotations

from random import Random

import pytest

from forebay import BlockId, CopyOrder, Direction, InvariantError, Key, Outcome, Rank, Slot, TransferId
from forebay.testing import ByteCopier, Faults, Memory, TinyDevicePool
from tests.builders import hold, lose_device, make_engine, prompt, release, served


def a_copier(**faults: object) -> ByteCopier:
    copier = ByteCopier(Rank(3), Memory(4), Memory(4), Random(1))
    copier.faults = Faults(**faults)  # type: ignore[arg-type]
    copier.device.write(1, b"kv!!")
    return copier


def a_store(number: int = 1, slot: int = 9) -> CopyOrder:
    return CopyOrder(TransferId(number), Direction.STORE, [BlockId(1)], [Slot(slot)], [], [])


def a_load(number: int = 2, slot: int = 9) -> CopyOrder:
    return CopyOrder(TransferId(number), Direction.LOAD, [BlockId(5)], [Slot(slot)], [BlockId(1)], [BlockId(6)])


def test_a_copier_moves_bytes_both_ways_and_within_the_device() -> None:
    copier = a_copier()
    copier.submit(a_store())
    assert copier.host.read(9) != b"kv!!", "bytes move when the copy ends"
    assert copier.poll() == [(1, 3, Outcome.DONE)]
    copier.submit(a_load())
    copier.poll()
    assert copier.device.read(5) == copier.device.read(6) == copier.host.read(9) == b"kv!!"
    assert copier.poll() == []


def test_held_copies_wait_and_only_in_the_direction_asked_for() -> None:
    copier = a_copier(hold=True, only=Direction.LOAD)
    copier.submit(a_store())
    copier.submit(a_load())
    assert [report.transfer_id for report in copier.poll()] == [1]
    assert copier.poll() == []
    copier.faults = Faults()
    assert [report.transfer_id for report in copier.poll()] == [2]


def test_delayed_copies_end_so_many_polls_later() -> None:
    copier = a_copier(delay_polls=2)
    copier.submit(a_store())
    assert [len(copier.poll()) for _ in range(4)] == [0, 0, 1, 0]


def test_a_failed_copy_says_so_and_leaves_garbage() -> None:
    copier = a_copier(fail_nth={2})
    copier.submit(a_store(1, slot=8))
    copier.submit(a_store(2, slot=9))
    assert [report.outcome for report in copier.poll()] == [Outcome.DONE, Outcome.FAILED]
    assert copier.host.read(8) == b"kv!!"
    assert copier.host.read(9) != b"kv!!"


def test_dropped_duplicated_stray_and_reordered_reports() -> None:
    copier = a_copier(drop_chance=1.0)
    copier.submit(a_store())
    assert copier.poll() == []
    assert copier.host.read(9) == b"kv!!", "only the report is lost"
    assert copier.reports_dropped == [(1, 3, Outcome.DONE)]
    copier.faults = Faults(duplicate=True, stray=True)
    copier.submit(a_store(7))
    reports = copier.poll()
    assert reports.count((7, 3, Outcome.DONE)) == 2
    assert len(reports) == 4
    copier.faults = Faults(reorder=True)
    for number in range(20):
        copier.submit(a_store(number))
    order = [report.transfer_id for report in copier.poll()]
    assert sorted(order) == list(range(20)) != order


def test_an_order_is_copied_as_it_was_submitted() -> None:
    copier = a_copier()
    order = a_store()
    copier.submit(order)
    order.slots[0] = Slot(77)
    copier.close()
    copier.close()
    assert copier.host.read(9) == b"kv!!"


def test_the_engine_notices_a_flipped_byte_on_the_host() -> None:
    engine = make_engine()
    served(engine, prompt(16))
    slot = next(iter(engine.manager.pool.index().values()))
    engine.copiers[0].host.write(slot, b"x" * 16)
    with pytest.raises(InvariantError, match="does not hold its key"):
        engine.check()


def test_the_engine_notices_wrong_bytes_in_a_load() -> None:
    engine = make_engine(ranks=2)
    served(engine, prompt(16))
    lose_device(engine)
    hold(engine)
    request = engine.submit(prompt(17))
    engine.step()
    slot = next(iter(engine.manager.pool.index().values()))
    engine.copiers[1].host.write(slot, b"x" * 16)
    release(engine)
    with pytest.raises(InvariantError, match=f"{request.id}: block 0 has wrong bytes on rank 1"):
        super(type(engine), engine).step()


def test_the_engine_notices_a_pin_that_nobody_owns() -> None:
    engine = make_engine()
    served(engine, prompt(16))
    engine.device.pin([BlockId(1)])
    with pytest.raises(InvariantError, match="device pins without a live owner"):
        engine.check()


def test_a_pool_evicts_in_the_order_of_freeing_and_forgets_the_key() -> None:
    pool = TinyDevicePool(5)
    first, second, third, fourth = pool.take(4) or []
    for number, block in enumerate((first, second, third)):
        pool.cache(block, Key(bytes([number])))
    pool.free([second, first, fourth])
    assert pool.take(5) is None
    assert pool.next_evictions(9) == ([fourth, second, first], [None, b"\1", b"\0"])
    assert pool.take(2) == [fourth, second], "a block without content goes first"
    assert Key(b"\1") not in pool
    assert Key(b"\0") in pool
    assert pool.evicted == [b"\1"]
    pool.check()


def test_in_place_brings_back_only_what_nobody_used() -> None:
    pool = TinyDevicePool(6)
    blocks = pool.take(5) or []
    for number, block in enumerate(blocks):
        pool.cache(block, Key(bytes([number])))
    pool.free(blocks)
    pool.pin(blocks[:3])
    pool.use([blocks[1]])
    pool.free([blocks[1]])
    pool.unpin(blocks[:3], in_place=True)
    assert pool.next_evictions(9)[0] == [blocks[0], blocks[2], blocks[3], blocks[4], blocks[1]]
    pool.check()
