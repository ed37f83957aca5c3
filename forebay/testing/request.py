"""Requests of the tiny engine, and its clock."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.ids import BlockId, RequestId


class ManualClock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class TinyRequest:
    """A prompt and how many tokens to generate; fulfils `forebay.engine.Request`."""

    id: RequestId
    tokens: list[int]
    max_new_tokens: int
    tokens_per_hash: int
    salt: bytes = b""
    may_load: bool = True
    may_store: bool = True
    event_extra: object = None
    hashes: list[bytes] = field(default_factory=list)

    # The engine's own state.
    computed: int = 0
    table: list[list[BlockId]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the last admission: not computed
    scheduled: int = 0
    waits_for_load: bool = False

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        return self.tokens[start:stop]

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._extend_hashes()

    def _extend_hashes(self) -> None:
        while (len(self.hashes) + 1) * self.tokens_per_hash <= len(self.tokens):
            start = len(self.hashes) * self.tokens_per_hash
            before = self.hashes[-1] if self.hashes else self.salt
            text = before + repr(self.tokens[start : start + self.tokens_per_hash]).encode()
            self.hashes.append(hashlib.blake2b(text, digest_size=32).digest())
