"""What Forebay asks of an engine. An adapter implements these; `forebay.testing` has the small reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from forebay.ids import BlockId, Key, RequestId


class Request(Protocol):
    """What the manager reads of a request. Called from the scheduler's thread, during the manager's calls."""

    @property
    def id(self) -> RequestId: ...

    @property
    def hashes(self) -> Sequence[bytes]:
        """Prefix hashes, one per `tokens_per_hash` tokens, with all that makes prefixes differ (adapter, image,
        salt) inside. Grows with the request, never changes."""

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and output."""

    @property
    def may_load(self) -> bool:
        """False if every token must be computed, for instance because prompt log-probabilities were asked for."""

    @property
    def may_store(self) -> bool:
        """False if nothing of this request may be kept."""

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        """Called only if events are on."""

    @property
    def event_extra(self) -> object:
        """Handed through to events untouched (adapter names and the like). Read only if events are on."""


class DevicePool(Protocol):
    """The engine's own blocks. Forebay never owns them; it looks, pins and unpins."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int:
        """Blocks the engine could take now, cached ones that nobody uses included."""

    @property
    def null_block(self) -> BlockId | None:
        """The block that stands for "nothing here" in block tables, if there is one."""

    def pin(self, blocks: Sequence[BlockId]) -> None:
        """Keep these blocks, which are distinct, from being reused until unpin()."""

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> int:
        """Let go. A block that nobody uses any more becomes the last in the eviction order. With `in_place`, one
        that was waiting for eviction when it was pinned, and that nobody used since, goes back to where it was:
        behind the blocks that stood before it and before those that stood behind it. Returns how many did."""

    def keys_of(self, blocks: Sequence[BlockId]) -> Sequence[Key | None]:
        """The key under which the engine caches each block now; None for null blocks and blocks without one."""

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        """Blocks that hold keys[start], keys[start + 1], … until the first that the device does not have."""

    def next_evictions(self, count: int) -> tuple[Sequence[BlockId], Sequence[Key | None]]:
        """Up to `count` blocks from the head of the eviction order, and their keys."""


class Progress(NamedTuple):
    """What became of one request in a step."""

    request_id: RequestId
    confirmed_tokens: int
    """Tokens whose KV is in device memory for sure: computed in an earlier step and not a placeholder."""
    new_blocks: Sequence[Sequence[BlockId]] | None = None
    """Blocks appended to the table of each group, if any."""
