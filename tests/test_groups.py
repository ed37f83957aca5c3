from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import (
    CapacityError,
    ChunkedLocal,
    FullAttention,
    Group,
    Key,
    KVLayout,
    LayoutError,
    Recurrent,
    SlidingWindow,
    host_slots,
    make_key,
)

_SPANS = [(1, 1), (4, 1), (2, 3), (16, 1)]  # tokens per block, context parallel ranks

GROUPS: list[Group] = [
    *(FullAttention(*span) for span in _SPANS),
    *(SlidingWindow(*span, window_tokens=window) for span in _SPANS for window in (1, 2, 4, 5, 7, 16, 100)),
    *(ChunkedLocal(*span, chunk_tokens=chunk) for span in _SPANS for chunk in (1, 3, 4, 6, 16, 100)),
    *(Recurrent(*span) for span in _SPANS),
]
every_group = pytest.mark.parametrize("group", GROUPS, ids=repr)


def _reads(group: Group, tokens: int) -> list[int]:
    """Positions before `tokens` that the token at position `tokens` reads, one by one."""
    before = range(tokens)
    match group:
        case FullAttention():
            return list(before)
        case SlidingWindow(window_tokens=window):
            return [p for p in before if tokens - p < window]  # itself is one of the window
        case ChunkedLocal(chunk_tokens=chunk):
            return [p for p in before if p // chunk == tokens // chunk]
        case Recurrent():
            return list(before)[-1:]  # the state after the last token holds everything before it
    raise AssertionError(group)


def _hashes(count: int) -> list[bytes]:
    return [i.to_bytes(2, "big") * 16 for i in range(count)]


def _layout(*groups: Group, tokens_per_hash: int = 1) -> KVLayout:
    return KVLayout(groups, tokens_per_hash, 64)


# --- what a hit needs -------------------------------------------------------------------------------------


@every_group
def test_first_needed_block_is_the_one_with_the_first_token_that_is_read(group: Group) -> None:
    for tokens in range(130):
        read = _reads(group, tokens)
        # Where nothing is read, the range is empty: it begins where the hit ends.
        expected = min(read, default=tokens) // group.span_tokens
        assert group.first_needed(tokens) == expected, tokens


@every_group
def test_first_needed_block_never_falls_and_never_lies_beyond_the_hit(group: Group) -> None:
    needed = [group.first_needed(tokens) for tokens in range(300)]
    assert needed == sorted(needed)
    assert all(first * group.span_tokens <= tokens for tokens, first in enumerate(needed))


@every_group
def test_one_block_stands_for_the_tokens_of_all_ranks_that_share_it(group: Group) -> None:
    assert group.span_tokens == group.tokens_per_block * group.context_parallel
    whole = replace(group, tokens_per_block=group.span_tokens, context_parallel=1)
    assert [group.first_needed(t) for t in range(100)] == [whole.first_needed(t) for t in range(100)]
    assert group.lazy_target(1000) == whole.lazy_target(1000)


@every_group
def test_only_full_attention_needs_the_whole_prefix(group: Group) -> None:
    assert group.needs_whole_prefix is isinstance(group, FullAttention)


def test_window_of_whole_blocks_needs_one_block_less_than_one_token_more() -> None:
    # At a block boundary a window of 9 reads the 8 tokens before it: two blocks of four. One more token, one more.
    assert SlidingWindow(4, window_tokens=9).first_needed(40) == 8
    assert SlidingWindow(4, window_tokens=10).first_needed(40) == 7


def test_chunk_that_ends_with_the_hit_needs_nothing() -> None:
    group = ChunkedLocal(4, chunk_tokens=8)
    assert [group.first_needed(tokens) for tokens in (4, 8, 12, 16)] == [0, 2, 2, 4]


def test_recurrent_state_is_the_last_block() -> None:
    group = Recurrent(4)
    assert [group.first_needed(tokens) for tokens in (0, 4, 8, 12)] == [0, 0, 1, 2]


@every_group
def test_drafter_counts_one_block_beyond_the_hit(group: Group) -> None:
    assert group.blocks_beyond_hit == 0
    assert replace(group, drafter=True).blocks_beyond_hit == 1


# --- layouts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spans", "alignment"),
    [
        ([(4, 1)], 4),
        ([(4, 1), (6, 1)], 12),
        ([(4, 1), (8, 1), (16, 1)], 16),
        ([(4, 3), (8, 1)], 24),
        ([(3, 1), (1, 2)], 6),
    ],
)
def test_hit_ends_at_a_block_boundary_of_every_group(spans: list[tuple[int, int]], alignment: int) -> None:
    layout = _layout(*(FullAttention(*span) for span in spans))
    assert layout.alignment_tokens == alignment
    ends = [t for t in range(1, 100) if all(t % (block * ranks) == 0 for block, ranks in spans)]
    assert ends == list(range(alignment, 100, alignment))


@pytest.mark.parametrize("tokens_per_hash", [1, 2, 4])
def test_key_of_a_block_is_the_last_hash_in_it_and_its_group(tokens_per_hash: int) -> None:
    layout = _layout(FullAttention(4), SlidingWindow(4, 2, window_tokens=8), tokens_per_hash=tokens_per_hash)
    hashes = _hashes(24 // tokens_per_hash)
    found: list[list[Key]] = [[], []]
    layout.extend_keys(found, hashes)
    for number, span in enumerate((4, 8)):
        expected = [make_key(hashes[end // tokens_per_hash - 1], number) for end in range(span, 25, span)]
        assert found[number] == expected


def test_block_without_its_last_hash_has_no_key_yet() -> None:
    layout = _layout(FullAttention(4))
    found: list[list[Key]] = [[]]
    layout.extend_keys(found, _hashes(7))
    assert found == [[make_key(_hashes(4)[3], 0)]]
    layout.extend_keys(found, _hashes(8))
    assert len(found[0]) == 2


@settings(deadline=None, max_examples=100)
@given(
    spans=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4),
    tokens_per_hash=st.integers(1, 2),
    grown=st.lists(st.integers(0, 9), min_size=1, max_size=8),
)
def test_keys_learned_bit_by_bit_are_those_learned_at_once(
    spans: list[tuple[int, int]], tokens_per_hash: int, grown: list[int]
) -> None:
    groups = [FullAttention(blocks * tokens_per_hash, ranks) for blocks, ranks in spans]
    layout = _layout(*groups, tokens_per_hash=tokens_per_hash)
    hashes = _hashes(sum(grown))
    bit_by_bit: list[list[Key]] = [[] for _ in groups]
    for known in (sum(grown[: i + 1]) for i in range(len(grown))):
        layout.extend_keys(bit_by_bit, hashes[:known])
    at_once: list[list[Key]] = [[] for _ in groups]
    layout.extend_keys(at_once, hashes)
    assert bit_by_bit == at_once
    tokens = len(hashes) * tokens_per_hash
    assert [len(each) for each in at_once] == [tokens // group.span_tokens for group in groups]


def test_same_prefix_has_different_keys_in_different_groups() -> None:
    found: list[list[Key]] = [[], []]
    _layout(FullAttention(4), FullAttention(4)).extend_keys(found, _hashes(8))
    assert set(found[0]).isdisjoint(found[1])


def test_keys_of_the_first_group_are_the_hashes_of_the_engine() -> None:
    hashes = _hashes(8)
    found: list[list[Key]] = [[], []]
    _layout(FullAttention(4), FullAttention(4)).extend_keys(found, hashes)
    assert all(mine is theirs for mine, theirs in zip(found[0], (hashes[3], hashes[7]), strict=True))
    assert make_key(hashes[3], 0) == hashes[3]
    assert found[1] == [hashes[3] + b"\0\0\0\1", hashes[7] + b"\0\0\0\1"]


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 40), st.integers(0, 300), st.data())
def test_group_of_a_key_is_the_one_it_was_made_for(size: int, group: int, data: st.DataObject) -> None:
    layout = KVLayout((FullAttention(4),), 4, 64, bytes_per_hash=size)
    prefix = data.draw(st.binary(min_size=size, max_size=size))
    assert layout.group_of(make_key(prefix, group)) == group


def test_group_of_every_key_that_a_layout_makes() -> None:
    layout = KVLayout(
        (FullAttention(4), Recurrent(8), SlidingWindow(4, window_tokens=8)), 4, 64, bytes_per_hash=32
    )
    found: list[list[Key]] = [[], [], []]
    layout.extend_keys(found, _hashes(8))
    assert [[layout.group_of(each) for each in group_keys] for group_keys in found] == [[0] * 8, [1] * 4, [2] * 8]


def test_hashes_have_32_bytes_unless_said_otherwise() -> None:
    assert KVLayout((FullAttention(4),), 4, 64).bytes_per_hash == 32


@pytest.mark.parametrize(
    ("groups", "batched", "blocks"),
    [
        ([FullAttention(16)], 8192, 1024),
        ([FullAttention(16, 2)], 8192, 512),
        ([FullAttention(16)], 100, 2 * 7),
        ([ChunkedLocal(16, chunk_tokens=64)], 8192, 1024),
        ([SlidingWindow(16, window_tokens=128)], 8192, 2 * 9),
        ([SlidingWindow(16, window_tokens=129)], 8192, 2 * 10),
        ([SlidingWindow(16, 2, window_tokens=128)], 8192, 2 * 5),
        ([Recurrent(16)], 8192, 2 * 2),
        ([FullAttention(16), SlidingWindow(16, window_tokens=128), Recurrent(16)], 8192, 2 * (512 + 9 + 2)),
    ],
    ids=repr,
)
def test_lazy_stores_stay_two_steps_ahead_of_the_engine(groups: list[Group], batched: int, blocks: int) -> None:
    assert _layout(*groups).lazy_target_blocks(batched) == blocks


# --- errors -----------------------------------------------------------------------------------------------


def _names(error: pytest.ExceptionInfo[LayoutError], setting: str, value: object, allowed: str) -> None:
    line = str(error.value)
    assert "\n" not in line
    assert line.startswith(f"{setting}: ")
    assert repr(value) in line
    assert allowed in line
    assert (error.value.setting, error.value.value) == (setting, value)


_SIZES: list[tuple[str, Callable[[Any], object]]] = [
    ("tokens_per_block", lambda value: FullAttention(value)),
    ("tokens_per_block", lambda value: SlidingWindow(value, window_tokens=4)),
    ("tokens_per_block", lambda value: ChunkedLocal(value, chunk_tokens=4)),
    ("tokens_per_block", lambda value: Recurrent(value)),
    ("context_parallel", lambda value: FullAttention(4, value)),
    ("window_tokens", lambda value: SlidingWindow(4, window_tokens=value)),
    ("chunk_tokens", lambda value: ChunkedLocal(4, chunk_tokens=value)),
    ("tokens_per_hash", lambda value: KVLayout((FullAttention(4),), value, 64)),
    ("bytes_per_block", lambda value: KVLayout((FullAttention(4),), 4, value)),
    ("bytes_per_hash", lambda value: KVLayout((FullAttention(4),), 4, 64, value)),
]
every_size = pytest.mark.parametrize(("setting", "build"), _SIZES, ids=[setting for setting, _ in _SIZES])


@every_size
@pytest.mark.parametrize("value", [0, -1])
def test_size_below_one_is_a_layout_error(setting: str, build: Callable[[Any], object], value: int) -> None:
    build(4)
    with pytest.raises(LayoutError) as error:
        build(value)
    _names(error, setting, value, "at least 1")


@every_size
def test_size_that_is_no_whole_number_is_a_layout_error(setting: str, build: Callable[[Any], object]) -> None:
    for value in (4.5, 4.0, "4", None, True, [4]):
        with pytest.raises(LayoutError) as error:
            build(value)
        _names(error, setting, value, "whole number")


def test_layout_without_groups_is_a_layout_error() -> None:
    with pytest.raises(LayoutError) as error:
        KVLayout((), 4, 64)
    _names(error, "groups", (), "at least one group")


def test_block_that_ends_between_two_hashes_is_a_layout_error() -> None:
    with pytest.raises(LayoutError) as error:
        KVLayout((FullAttention(8), Recurrent(6)), 4, 64)
    _names(error, "groups[1].tokens_per_block", 6, "a multiple of tokens_per_hash (4)")


def test_block_may_end_at_a_hash_because_ranks_share_it() -> None:
    assert KVLayout((FullAttention(2, context_parallel=2),), 4, 64).alignment_tokens == 4


# --- fingerprints -----------------------------------------------------------------------------------------

_BASE = KVLayout((FullAttention(4), SlidingWindow(8, window_tokens=32)), 4, 64)
_OTHERS = {
    "other hash granularity": replace(_BASE, tokens_per_hash=2),
    "other bytes": replace(_BASE, bytes_per_block=65),
    "fewer groups": replace(_BASE, groups=_BASE.groups[:1]),
    "other order": replace(_BASE, groups=_BASE.groups[::-1]),
    "other kind": replace(_BASE, groups=(Recurrent(4), _BASE.groups[1])),
    "chunk for window": replace(_BASE, groups=(_BASE.groups[0], ChunkedLocal(8, chunk_tokens=32))),
    "other block": replace(_BASE, groups=(FullAttention(8), _BASE.groups[1])),
    "other ranks": replace(_BASE, groups=(FullAttention(4, 2), _BASE.groups[1])),
    "same span by other ranks": replace(_BASE, groups=(FullAttention(2, 2), _BASE.groups[1])),
    "drafter": replace(_BASE, groups=(FullAttention(4, drafter=True), _BASE.groups[1])),
    "other window": replace(_BASE, groups=(_BASE.groups[0], SlidingWindow(8, window_tokens=33))),
}


def test_layouts_that_differ_in_any_size_have_different_fingerprints() -> None:
    prints = {name: layout.fingerprint for name, layout in {"base": _BASE, **_OTHERS}.items()}
    assert len(set(prints.values())) == len(prints), prints


def test_equal_layouts_have_one_fingerprint_in_every_process() -> None:
    twin = KVLayout((FullAttention(4), SlidingWindow(8, window_tokens=32)), 4, 64)
    assert twin.fingerprint == _BASE.fingerprint
    script = (
        "from forebay import *\n"
        "print(KVLayout((FullAttention(4), SlidingWindow(8, window_tokens=32)), 4, 64).fingerprint)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == _BASE.fingerprint


# --- slots ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "device_bytes", "host_bytes", "slots"),
    [(10, 100, 100, 10), (10, 100, 1000, 100), (10, 100, 19, 1), (10, 100, 10, 1), (3, 11, 22, 6), (3, 11, 21, 5)],
)
def test_host_slots(blocks: int, device_bytes: int, host_bytes: int, slots: int) -> None:
    assert host_slots(blocks, device_bytes, host_bytes) == slots


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 10**6), st.integers(1, 10**12), st.integers(1, 10**13))
def test_host_memory_holds_the_slots_and_not_one_more(blocks: int, device_bytes: int, host_bytes: int) -> None:
    try:
        slots = host_slots(blocks, device_bytes, host_bytes)
    except CapacityError:
        slots = 0
    assert slots * device_bytes <= host_bytes * blocks < (slots + 1) * device_bytes


def test_host_memory_below_one_block_is_a_capacity_error_that_names_the_block() -> None:
    for blocks, device_bytes, host_bytes in ((10, 100, 9), (10, 95, 9), (1, 100, 0), (1, 100, -5)):
        with pytest.raises(CapacityError) as error:
            host_slots(blocks, device_bytes, host_bytes)
        assert error.value.setting == "capacity_bytes"
        assert error.value.value == host_bytes
        assert f"({ceil(device_bytes / blocks)} bytes)" in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("blocks", "device_bytes", "setting"), [(0, 1, "device_blocks"), (1, 0, "device_bytes")])
def test_device_without_memory_is_a_capacity_error(blocks: int, device_bytes: int, setting: str) -> None:
    with pytest.raises(CapacityError, match=f"{setting}: .*at least 1.*0"):
        host_slots(blocks, device_bytes, 100)


@pytest.mark.parametrize("setting", ["device_blocks", "device_bytes", "host_bytes"])
@pytest.mark.parametrize("value", [2.5, True])
def test_host_slots_of_sizes_that_are_no_whole_numbers_is_a_capacity_error(setting: str, value: Any) -> None:
    sizes: dict[str, Any] = {"device_blocks": 10, "device_bytes": 10, "host_bytes": 10, setting: value}
    with pytest.raises(CapacityError):
        host_slots(**sizes)
