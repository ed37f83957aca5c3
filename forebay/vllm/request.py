"""A vLLM request as the core reads it."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.request import Request

from forebay.ids import BlockId, RequestId
from forebay.vllm import compat


class EngineRequest:
    """Implements forebay.engine.Request."""

    __slots__ = (
        "_tokens_per_hash",
        "device_tokens",
        "has_run",
        "id",
        "offered_nothing",
        "preemptions",
        "request",
        "waits_for",
    )

    def __init__(self, request: Request, tokens_per_hash: int) -> None:
        self.id = RequestId(request.request_id)
        self.request = request
        self.device_tokens = 0
        """What the engine said it has itself when it asked last."""
        self.offered_nothing = False
        """Whether nothing may be added to that."""
        self.preemptions: int = request.num_preemptions
        self.has_run = False
        """Whether a step has computed anything in the blocks that it was given last."""
        self.waits_for: list[BlockId] = []
        """The blocks of its load, where the engine hears of failures by block."""
        self._tokens_per_hash = tokens_per_hash

    @property
    def hashes(self) -> Sequence[bytes]:
        hashes: Sequence[bytes] = self.request.block_hashes
        if getattr(self.request, "resumable", False):
            # The last token of a streaming session is taken back when more input arrives, and its hash with it.
            return hashes[: (self.request.num_tokens - 1) // self._tokens_per_hash]
        return hashes

    @property
    def num_tokens(self) -> int:
        return int(self.request.num_tokens)

    @property
    def may_load(self) -> bool:
        return not (self.request.skip_reading_prefix_cache or self.offered_nothing)

    @property
    def may_store(self) -> bool:
        return not (compat.SESSIONS_KEEP_STALE_HASHES and self.request.resumable)

    @property
    def confirmed_tokens(self) -> int:
        """Tokens whose KV is written once the steps the workers know of have run."""
        computed = int(self.request.num_computed_tokens - self.request.num_output_placeholders)
        # vLLM counts what it waits for as computed. Another connector beside this one may be what it waits for.
        return computed if self.has_run else min(computed, self.device_tokens)

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        tokens: Sequence[int] = self.request.all_token_ids[start:stop]
        return tokens

    @property
    def event_extra(self) -> Request:
        return self.request
