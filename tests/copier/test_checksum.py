"""Loads bring what was stored under their keys, or say that they do not."""

from __future__ import annotations

import logging
from hashlib import sha256

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.copier import InjectedFaults, arena
from forebay.copier.checksum import Checksums, Verify, is_sampled, seeds
from forebay.copier.torch_copier import TorchCopier
from forebay.ids import Key, make_key
from forebay.transfers import CopyOrder, Outcome
from tests.copier.builders import load, make_regions, run, store

DONE, FAILED, MISMATCH = Outcome.DONE, Outcome.FAILED, Outcome.MISMATCH
BLOCKS = 8


def key(number: int, group: int = 0) -> Key:
    return make_key(sha256(number.to_bytes(4, "big")).digest(), group)


def keyed(order: CopyOrder, *numbers: int) -> CopyOrder:
    return order._replace(keys=[key(number) for number in numbers])


def stored(verify: Verify = Verify.ALL, **regions: object) -> TorchCopier:
    """Block n is in slot n, under key n."""
    copier = TorchCopier(make_regions(BLOCKS, **regions), BLOCKS, verify=verify)  # type: ignore[arg-type]
    order = keyed(store(1, {block: block for block in range(BLOCKS)}), *range(BLOCKS))
    assert run(copier, order) == {1: DONE}
    return copier


def loads(copier: TorchCopier) -> list[int]:
    """Load every slot, each as an order of its own. Which of them were not what was stored?"""
    outcomes = run(copier, *(keyed(load(10 + slot, {slot: slot}), slot) for slot in range(BLOCKS)))
    assert set(outcomes.values()) <= {DONE, MISMATCH}
    return sorted(number - 10 for number, outcome in outcomes.items() if outcome is MISMATCH)


# --- seeds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5, 8, 12, 16, 20, 32, 36])
def test_every_bit_of_a_key_changes_its_seed(length: int) -> None:
    plain = sha256(b"a").digest() + sha256(b"b").digest()
    whole = int.from_bytes(plain[:length], "big")
    keys = [Key((whole ^ 1 << bit).to_bytes(length, "big")) for bit in range(8 * length)]
    numbers = seeds([Key(plain[:length]), *keys])
    assert all(0 <= number < 2**64 for number in numbers)
    assert len(set(numbers)) == 8 * length + 1


def test_keys_that_differ_in_group_or_length_only_have_different_seeds() -> None:
    keys = [key(1), *(key(1, group) for group in range(1, 50)), Key(key(1) + bytes(1)), Key(key(1) + bytes(8))]
    keys += [Key(bytes(length)) for length in range(1, 40)]
    assert len(set(seeds(keys))) == len(keys)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=20))
def test_a_key_has_the_same_seed_whatever_comes_with_it(keys: list[Key]) -> None:
    assert seeds(keys) == [seeds([each])[0] for each in keys]


def test_a_seed_is_the_same_in_every_process() -> None:
    """Nothing of the process is in it, such as the seed of Python's own hash()."""
    assert seeds([key(1), key(2), key(1, 3)]) == [
        0x4E59AAF76A980C12,
        0x2A0E77B552EDD16F,
        0x571ECD418F6E343F,
    ]


def test_one_key_in_eight_is_sampled() -> None:
    assert 900 < sum(map(is_sampled, seeds([key(number) for number in range(8000)]))) < 1100


# --- loads ------------------------------------------------------------------------------------------------


def test_what_was_stored_comes_back_from_every_slot() -> None:
    copier = stored()
    assert loads(copier) == []
    order = keyed(load(2, {block: 7 - block for block in range(BLOCKS)}), *reversed(range(BLOCKS)))
    assert run(copier, order) == {2: DONE}
    copier.close()


def test_a_byte_that_changed_on_the_host_is_noticed_in_its_slot_and_no_other() -> None:
    copier = stored()
    copier.arena[5, 77] ^= 1
    assert loads(copier) == [5]
    copier.arena[5, 77] ^= 1
    assert loads(copier) == []
    copier.close()


def test_slots_that_were_swapped_are_noticed() -> None:
    copier = stored()
    copier.arena[[2, 6]] = copier.arena[[6, 2]]
    assert loads(copier) == [2, 6]
    copier.close()


def test_layers_of_a_block_that_were_swapped_are_noticed() -> None:
    copier = stored(widths=(16, 16, 16))
    copier.arena[4] = copier.arena[4].view(3, 16)[[0, 2, 1]].flatten()
    assert loads(copier) == [4]
    copier.close()


@pytest.mark.parametrize("block", [1, 3], ids=["of other bytes", "of equal bytes"])
def test_a_slot_that_was_reused_for_another_key_is_noticed(block: int) -> None:
    copier = stored()
    assert run(copier, keyed(store(2, {block: 3}), 99)) == {2: DONE}
    assert loads(copier) == [3]
    assert run(copier, keyed(load(3, {0: 3}), 99)) == {3: DONE}
    copier.close()


def test_a_slot_to_which_nothing_was_stored_is_a_mismatch() -> None:
    copier = TorchCopier(make_regions(BLOCKS), BLOCKS)
    assert run(copier, keyed(store(1, {1: 1}), 1)) == {1: DONE}
    assert loads(copier) == [0, 2, 3, 4, 5, 6, 7]
    copier.close()


def test_no_sum_is_that_of_a_slot_to_which_nothing_was_stored() -> None:
    checksums = Checksums(BLOCKS, Verify.ALL)
    order = keyed(load(1, {3: 5}), 1)
    for number in (0, 1, 2**64 - 1):
        assert checksums.wrong_slots(order, {0: number}) == [5]
    checksums.keep(keyed(store(2, {3: 5}), 1), {0: 0})
    assert checksums.wrong_slots(order, {0: 0}) == []


def test_one_wrong_slot_fails_the_whole_load_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    copier = stored()
    copier.arena[4, 0] ^= 128
    order = keyed(load(2, {block: block for block in range(BLOCKS)}), *range(BLOCKS))
    with caplog.at_level(logging.WARNING):
        assert run(copier, order, order._replace(id=3)) == {2: MISMATCH, 3: MISMATCH}  # type: ignore[arg-type]
    [line] = [record.getMessage() for record in caplog.records]
    assert line == ("rank 0: transfer 2 found other bytes than were stored in slots [4]")
    copier.close()


def test_orders_without_keys_are_not_verified() -> None:
    copier = stored()
    copier.arena[3, 0] ^= 1
    assert run(copier, load(2, {3: 3})) == {2: DONE}
    copier.close()


def test_a_key_too_few_is_no_order() -> None:
    copier = stored()
    assert run(copier, keyed(load(2, {3: 3, 4: 4}), 3), keyed(store(3, {3: 3}), 3, 4)) == {2: FAILED, 3: FAILED}
    copier.close()


def test_off_sees_nothing() -> None:
    copier = stored(Verify.OFF)
    copier.arena[:] ^= 255
    assert loads(copier) == []
    copier.close()


def test_sampled_verifies_exactly_the_sampled_ones() -> None:
    blocks = 64
    copier = TorchCopier(make_regions(blocks), blocks, verify=Verify.SAMPLED)
    pairs = {block: block for block in range(blocks)}
    assert run(copier, keyed(store(0, pairs), *range(blocks))) == {0: DONE}
    orders = [keyed(load(1 + number, {number: number}), number) for number in range(blocks)]
    assert set(run(copier, *orders).values()) == {DONE}
    copier.arena[:] ^= 16
    outcomes = run(copier, *orders)
    wrong = [outcomes[1 + number] is MISMATCH for number in range(blocks)]
    assert wrong == list(map(is_sampled, seeds([key(number) for number in range(blocks)])))
    assert 0 < sum(wrong) < blocks // 2
    copier.close()


def test_an_injected_failure_is_a_failure_and_no_mismatch() -> None:
    copier = stored()
    faulty = TorchCopier(make_regions(BLOCKS), BLOCKS, faults=InjectedFaults(fail_chance=1.0))
    for each, outcome in ((copier, DONE), (faulty, FAILED)):
        assert run(each, keyed(load(2, {0: 0}), 0)) == {2: outcome}
        each.close()


@given(
    widths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    gap=st.sampled_from([0, 1, 4, 8]),
    buffer=st.sampled_from([8, 64, 2 << 20]),
    data=st.data(),
)
def test_any_single_bit_is_noticed(widths: list[int], gap: int, buffer: int, data: st.DataObject) -> None:
    """Whatever the layout, and however many pieces a row is copied in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "_CHUNK_BYTES", buffer)
        copier = stored(widths=widths, gap=gap)
    assert loads(copier) == []
    slot = data.draw(st.integers(0, BLOCKS - 1))
    bit = data.draw(st.integers(0, 8 * sum(widths) - 1))
    copier.arena[slot, bit // 8] ^= 1 << bit % 8
    assert loads(copier) == [slot]
    copier.close()


def test_a_copier_made_in_inference_mode_verifies_too() -> None:
    """Engines allocate in that mode."""
    with torch.inference_mode():
        copier = stored()
        copier.arena[1, 1] ^= 1
    assert loads(copier) == [1]
    copier.close()
