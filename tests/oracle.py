"""What the manager should answer, worked out the slow and obvious way: token by token, from events alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from forebay import (
    ChunkedLocal,
    Cleared,
    Event,
    FullAttention,
    Group,
    Key,
    KVLayout,
    Recurrent,
    Removed,
    SlidingWindow,
    Stored,
    make_key,
)


class Router:
    """Knows the host only through its events, as a router in front of many engines does."""

    def __init__(self) -> None:
        self.keys: set[Key] = set()

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            match event:
                case Stored(keys=keys):
                    assert self.keys.isdisjoint(keys), "announced twice"
                    self.keys.update(keys)
                case Removed(keys=keys):
                    assert self.keys.issuperset(keys), "removed without having been announced"
                    self.keys.difference_update(keys)
                case Cleared():
                    self.keys.clear()


def tokens_read_next(group: Group, length: int) -> set[int]:
    """Positions that the token at position `length` reads in this group."""
    match group:
        case FullAttention():
            return set(range(length))
        case SlidingWindow(window_tokens=window):
            return {p for p in range(length) if length - p < window}
        case ChunkedLocal(chunk_tokens=chunk):
            return {p for p in range(length) if p // chunk == length // chunk}
        case Recurrent():
            return {length - 1} if length else set()
    raise AssertionError(group)


def block_key(layout: KVLayout, number: int, hashes: list[bytes], block: int) -> Key | None:
    """The key of a group's block: named by the last hash that lies inside it."""
    span = layout.groups[number].span_tokens
    last_hash = (block + 1) * span // layout.tokens_per_hash - 1
    return make_key(hashes[last_hash], number) if last_hash < len(hashes) else None


def longest(
    layout: KVLayout,
    hashes: list[bytes],
    num_tokens: int,
    device_tokens: int,
    is_there: Callable[[Key], bool],
) -> int:
    """Tokens beyond device_tokens that can be had, trying every length from the longest down."""
    for length in range(num_tokens - 1, device_tokens, -1):
        if all(length % group.span_tokens == 0 for group in layout.groups) and all(
            _accepts(layout, number, hashes, length, device_tokens, is_there)
            for number in range(len(layout.groups))
        ):
            return length - device_tokens
    return 0


def _accepts(
    layout: KVLayout,
    number: int,
    hashes: list[bytes],
    length: int,
    device_tokens: int,
    is_there: Callable[[Key], bool],
) -> bool:
    group = layout.groups[number]
    span = group.span_tokens
    blocks = {position // span for position in tokens_read_next(group, length)}
    if group.drafter:
        blocks.add(length // span)
    for block in blocks:
        if (block + 1) * span <= device_tokens:
            continue
        key = block_key(layout, number, hashes, block)
        if key is None or not is_there(key):
            return False
    return True
