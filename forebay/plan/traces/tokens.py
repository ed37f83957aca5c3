"""Text to tokens, and tokens to prefix ids.

Without a tokenizer, tokens are estimated: so many bytes of UTF-8 are one. A block of N tokens is then N times as
many bytes, its id is a hash of those bytes and of the id before it, and prompts that begin with the same bytes
begin with the same ids.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forebay.errors import ConfigError
from forebay.plan.traces.base import chained
from forebay.plan.traces.lines import BadLineError, shown

BYTES_PER_TOKEN = 4.0
"""English prose has about this many, code fewer, other languages mostly fewer too."""

BLOCK_TOKENS = 16
"""Of a block, where a trace says nothing about it: vLLM's own on most devices."""


class Tokenized(NamedTuple):
    tokens: int
    prefixes: Sequence[int]


class Tokens(Protocol):
    """Turns texts into numbers of tokens and ids of prefixes."""

    @property
    def note(self) -> str: ...

    def count(self, text: str) -> int: ...

    def prefixes(self, text: str) -> Tokenized: ...


class ByteEstimate:
    def __init__(self, block_tokens: int, bytes_per_token: float) -> None:
        self._block_tokens = block_tokens
        self._block_bytes = max(1, round(block_tokens * bytes_per_token))
        size = "1 byte" if bytes_per_token == 1 else f"{bytes_per_token:g} bytes"
        self.note = f"tokens are estimated: one for {size} of text"

    def count(self, text: str) -> int:
        return self._count(_bytes(text))

    def prefixes(self, text: str) -> Tokenized:
        data, size = _bytes(text), self._block_bytes
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        return Tokenized(self._count(data), chained(blocks))

    def _count(self, data: bytes) -> int:
        return -(-len(data) * self._block_tokens // self._block_bytes)


class TokenizerFile:
    """A `tokenizer.json`, read by the package `tokenizers`. Nothing is downloaded."""

    def __init__(self, path: str | PathLike[str], block_tokens: int) -> None:
        try:
            import tokenizers
        except ImportError:
            needed = "the package tokenizers to be installed (pip install tokenizers)"
            raise ConfigError("tokenizer", str(path), needed) from None
        file = Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise ConfigError("tokenizer", str(path), "a tokenizer.json, or a folder that has one")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 it raises nothing more exact
            raise ConfigError("tokenizer", str(path), f"a file that tokenizers can read ({error})") from None
        self._block_tokens = block_tokens
        self.note = f"tokens are those of {path}, without a chat template"

    def count(self, text: str) -> int:
        return len(self._ids(text))

    def prefixes(self, text: str) -> Tokenized:
        ids = self._ids(text)
        return Tokenized(len(ids), prefixes_of(ids, self._block_tokens))

    def _ids(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(_printable(text), add_special_tokens=False).ids
        return ids


def tokens_by(tokenizer: str | PathLike[str] | None, block_tokens: int, bytes_per_token: float) -> Tokens:
    if tokenizer is not None:
        return TokenizerFile(tokenizer, block_tokens)
    if not isinstance(bytes_per_token, int | float) or not math.isfinite(bytes_per_token) or bytes_per_token <= 0:
        raise ConfigError("bytes_per_token", bytes_per_token, "a number above 0")
    return ByteEstimate(block_tokens, bytes_per_token)


def prefixes_of(ids: Sequence[int], block_tokens: int) -> list[int]:
    """Of tokens that are known."""
    try:
        data, size = array("I", ids).tobytes(), array("I").itemsize * block_tokens
    except (OverflowError, TypeError):
        raise BadLineError("token ids as whole numbers", shown(ids)) from None
    return chained([data[start : start + size] for start in range(0, len(data), size)])


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON may have halves of characters


def _printable(text: str) -> str:
    return text.encode("utf-8", "replace").decode() if any("\ud800" <= each <= "\udfff" for each in text) else text
