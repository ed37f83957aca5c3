"""Kinds of group, what a hit needs in each, and the sizes that follow from them.

A group is the layers that share one block table and one kind of attention. A hit of `tokens` tokens means that
the engine goes on at token number `tokens` as if it had computed everything before. What has to be there for
that differs by kind, but is always one range of blocks that ends where the hit ends:

    full attention      [################]   the whole prefix (multi-head latent attention is one of these)
    sliding window      [..........######]   what the window of the next token still sees
    chunked local       [............####]   the current chunk
    recurrent state     [...............#]   the last state
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil, lcm
from typing import cast

from forebay.errors import CapacityError, LayoutError, is_whole
from forebay.ids import Key, group_suffix

_LAZY_RESERVE = 2  # steps of allocation that lazy stores stay ahead of the engine


def _check_sizes(owner: object, *settings: str) -> None:
    for setting in settings:
        value = getattr(owner, setting)
        if not is_whole(value) or value < 1:
            raise LayoutError(setting, value, "a whole number of at least 1")


@dataclass(frozen=True)
class Group(ABC):
    tokens_per_block: int
    context_parallel: int = 1
    """Ranks that share the tokens of a block: one block then spans that many times its tokens."""
    drafter: bool = False
    """A speculative drafter reads this group. Its entry for a token depends on the token after it, so a hit
    counts only if the block after it matches too (EAGLE: match one more block, then drop it)."""

    def __post_init__(self) -> None:
        _check_sizes(self, "tokens_per_block", "context_parallel")

    @cached_property
    def span_tokens(self) -> int:
        """Tokens of the prompt that one block stands for."""
        return self.tokens_per_block * self.context_parallel

    @property
    def needs_whole_prefix(self) -> bool:
        """Whether a block is worthless without the blocks before it."""
        return False

    @property
    def keeps_blocks(self) -> bool:
        """Whether a block is its request's own until the request ends. Others are dropped while it runs."""
        return False

    @property
    def blocks_beyond_hit(self) -> int:
        return 1 if self.drafter else 0

    @abstractmethod
    def first_needed(self, tokens: int) -> int:
        """Index of the first block that a hit of `tokens` tokens needs. Never falls as `tokens` grows."""

    @abstractmethod
    def lazy_target(self, max_batched_tokens: int) -> int:
        """Blocks that the engine may take for this group in one step."""

    def most_taken(self, max_batched_tokens: int, max_requests: int) -> int:
        """Blocks that the engine takes for this group in two steps at most: by the tokens it computes, and one
        more for every request that begins a block."""
        return 2 * ceil(max_batched_tokens / self.span_tokens) + max_requests

    def most_held(self, tokens: int, max_batched_tokens: int) -> int:
        """Blocks that a request of `tokens` tokens has at most while it is computed: what a step still reads, and
        what it writes."""
        everything = ceil(tokens / self.span_tokens)
        read = ceil(tokens / self.span_tokens) - self.first_needed(tokens - tokens % self.span_tokens)
        return min(everything, read + ceil(max_batched_tokens / self.span_tokens) + 1)


@dataclass(frozen=True)
class FullAttention(Group):
    drops_outputs: bool = field(default=False, kw_only=True)
    """What was generated is seen through a window: blocks between the prompt and that window are dropped."""

    @property
    def needs_whole_prefix(self) -> bool:
        return True

    @property
    def keeps_blocks(self) -> bool:
        return not self.drops_outputs

    def first_needed(self, tokens: int) -> int:
        return 0

    def lazy_target(self, max_batched_tokens: int) -> int:
        return ceil(max_batched_tokens / self.span_tokens)


@dataclass(frozen=True, kw_only=True)
class SlidingWindow(Group):
    window_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "window_tokens")

    def first_needed(self, tokens: int) -> int:
        # The next token sees itself and window_tokens - 1 tokens before it.
        return max(0, tokens - self.window_tokens + 1) // self.span_tokens

    def lazy_target(self, max_batched_tokens: int) -> int:
        return ceil(self.window_tokens / self.span_tokens) + 1


@dataclass(frozen=True, kw_only=True)
class ChunkedLocal(Group):
    chunk_tokens: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sizes(self, "chunk_tokens")

    def first_needed(self, tokens: int) -> int:
        return tokens // self.chunk_tokens * self.chunk_tokens // self.span_tokens

    def lazy_target(self, max_batched_tokens: int) -> int:
        return ceil(max_batched_tokens / self.span_tokens)


@dataclass(frozen=True)
class Recurrent(Group):
    def most_taken(self, max_batched_tokens: int, max_requests: int) -> int:
        return 2 * max_requests  # a step takes a state for every request, however few its tokens

    def first_needed(self, tokens: int) -> int:
        return max(0, ceil(tokens / self.span_tokens) - 1)

    def lazy_target(self, max_batched_tokens: int) -> int:
        return 2


@dataclass(frozen=True)
class KVLayout:
    """The groups of a model and the one hash granularity under them."""

    groups: tuple[Group, ...]
    tokens_per_hash: int
    bytes_per_block: int
    """Bytes of one block on one rank, all its layers."""
    bytes_per_hash: int = 32
    """Length of the engine's prefix hashes."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise LayoutError("groups", self.groups, "at least one group")
        _check_sizes(self, "tokens_per_hash", "bytes_per_block", "bytes_per_hash")
        for number, group in enumerate(self.groups):
            if group.span_tokens % self.tokens_per_hash:
                spans = f" once multiplied by {group.context_parallel}" if group.context_parallel > 1 else ""
                raise LayoutError(
                    f"groups[{number}].tokens_per_block",
                    group.tokens_per_block,
                    f"a multiple of tokens_per_hash ({self.tokens_per_hash}){spans}",
                )

    @cached_property
    def alignment_tokens(self) -> int:
        """A hit ends on a multiple of this: a block boundary in every group."""
        return lcm(*(group.span_tokens for group in self.groups))

    @cached_property
    def fingerprint(self) -> str:
        """Names this layout. Bytes written under one fingerprint mean nothing under another."""
        text = repr((self.groups, self.tokens_per_hash, self.bytes_per_block))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def extend_keys(self, keys: Sequence[list[Key]], hashes: Sequence[bytes]) -> None:
        """Append the keys that new hashes complete. A block that spans several hashes is named by its last,
        which covers everything before it."""
        if hashes and len(hashes[0]) != self.bytes_per_hash:
            raise LayoutError(
                "bytes_per_hash", self.bytes_per_hash, f"{len(hashes[0])}, as the engine's hashes have"
            )
        for number, (group, group_keys) in enumerate(zip(self.groups, keys, strict=True)):
            hashes_per_block = group.span_tokens // self.tokens_per_hash
            first = (len(group_keys) + 1) * hashes_per_block - 1
            if first >= len(hashes):
                continue
            named_by = hashes[first::hashes_per_block]
            suffix = group_suffix(number)
            group_keys += cast("list[Key]", [each + suffix for each in named_by] if suffix else named_by)

    def group_of(self, key: Key) -> int:
        """The number of the group a key belongs to."""
        return int.from_bytes(key[self.bytes_per_hash :], "big")

    def lazy_target_blocks(self, max_batched_tokens: int) -> int:
        """How far from the head of the device's eviction order lazy stores keep blocks safe: twice what the
        engine may take in a step."""
        return _LAZY_RESERVE * sum(group.lazy_target(max_batched_tokens) for group in self.groups)

    def lazy_reach_blocks(self, max_batched_tokens: int, max_requests: int) -> int:
        """The target, or as far as it takes to lose nothing: what two steps may take. One is being copied to the
        host, and is pinned, while the engine takes the other."""
        most = sum(group.most_taken(max_batched_tokens, max_requests) for group in self.groups)
        return max(self.lazy_target_blocks(max_batched_tokens), most)


def host_slots(device_blocks: int, device_bytes: int, host_bytes: int) -> int:
    """Slots that host_bytes hold, for a device whose device_blocks blocks take device_bytes. Per rank.

    Multiplied before divided, so that a device size that is no multiple of its blocks loses nothing. Every rank
    and the scheduler must call it with the same three numbers; that they do is the adapter's business.
    """
    for setting, value in (("device_blocks", device_blocks), ("device_bytes", device_bytes)):
        if not is_whole(value) or value < 1:
            raise CapacityError(setting, value, "a whole number of at least 1")
    if not is_whole(host_bytes) or device_blocks * host_bytes < device_bytes:
        needed = ceil(device_bytes / device_blocks)
        raise CapacityError("capacity_bytes", host_bytes, f"whole bytes, at least one block ({needed} bytes)")
    return device_blocks * host_bytes // device_bytes
