"""The prefix hashes that an engine would make of a request of a trace."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.amounts import counted
from forebay.errors import ConfigError
from forebay.plan.curve import prefix_path
from forebay.plan.request import TraceRequest

HASH_BYTES = 8
_MASK = (1 << 64) - 1


class EngineHashes:
    """One for each `tokens_per_hash` tokens, whether blocks of the trace are smaller or larger than that."""

    def __init__(self, block_tokens: int, tokens_per_hash: int) -> None:
        if block_tokens % tokens_per_hash and tokens_per_hash % block_tokens:
            allowed = f"a divisor or a multiple of the trace's {counted(block_tokens, 'token')} to a block"
            raise ConfigError("tokens_per_hash", tokens_per_hash, allowed)
        self._tokens = tokens_per_hash
        self._parts = max(1, block_tokens // tokens_per_hash)
        self._step = max(1, tokens_per_hash // block_tokens)

    def of_prompt(self, request: TraceRequest) -> list[bytes]:
        """Of all full blocks of the prompt."""
        path: Sequence[int] = prefix_path(request.prefixes)[self._step - 1 :: self._step]
        if self._parts > 1:
            last = self._parts - 1
            path = [
                each if part == last else hash((each, part, 0)) & _MASK
                for each in path
                for part in range(self._parts)
            ]
        return [each.to_bytes(HASH_BYTES, "little") for each in path[: request.input_tokens // self._tokens]]

    def of_output(self, number: int, block: int) -> bytes:
        """Of the Nth block of the request with this number in the trace, which ends with output: a block that no
        other request has, since the trace does not say what was answered."""
        return (hash((number, block, 1, 1)) & _MASK).to_bytes(HASH_BYTES, "little")
