"""Amounts of memory: as they are asked for, as they are shown, and how many tokens they hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from forebay.config import parse_size
from forebay.copier.memory import Limit
from forebay.errors import ConfigError

_MIB = 1 << 20
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)%")
_BYTES_PER_NUMBER = 2  # of the KV cache; vLLM's default for models of 16 and of 32 bits
# Every layer is full attention and keeps all tokens. Other models keep less, or something else.
_PLAIN_MODELS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "granite"),
    *("glm4", "glm4_moe", "deepseek_v2", "deepseek_v3"),
)


class Memory(NamedTuple):
    """What `--memory` says."""

    setting: int | str  # as vLLM is given it
    num_bytes: int
    per_rank: bool

    @classmethod
    def parse(cls, text: str, limits: Sequence[Limit]) -> Memory:
        """`64GB`, `50%` of the smallest limit, or one of them with `/rank`. Raises ConfigError."""
        amount, slash, what = text.strip().partition("/")
        amount = amount.strip()
        allowed = (
            "a size such as 64GB or 60GiB, a part of this machine such as 50%, or either for a rank: 16GB/rank"
        )
        if slash and what != "rank":
            raise ConfigError("--memory", text, allowed)
        if percent := _PERCENT.fullmatch(amount):
            share = Fraction(percent[1])
            if not 0 < share <= 100:
                raise ConfigError("--memory", text, "more than 0% and at most 100%")
            if not limits:
                raise ConfigError(
                    "--memory", text, "a size such as 64GB: how much this machine has cannot be read"
                )
            total = min(limit.total_bytes for limit in limits)
            num_bytes = max(1, int(total * share / 100) // _MIB) * _MIB
            return cls(num_bytes, num_bytes, bool(slash))
        try:
            num_bytes = parse_size("--memory", amount)
        except ConfigError:
            num_bytes = 0
        if num_bytes < 1:
            raise ConfigError("--memory", text, allowed)
        return cls(num_bytes if amount.isdecimal() else amount, num_bytes, bool(slash))

    @property
    def key(self) -> str:
        return "cpu_bytes_to_use_per_rank" if self.per_rank else "cpu_bytes_to_use"


def shown(num_bytes: int) -> str:
    """In units of 1000, for people."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 1000)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def typed(num_bytes: int) -> str:
    """Not more than that, as a setting."""
    return f"{num_bytes // 10**9}GB" if num_bytes >= 10**9 else f"{max(1, num_bytes // 10**6)}MB"


def kv_bytes_per_token(model: Mapping[str, Any], ranks: int = 1) -> int | None:
    """On each of so many tensor parallel ranks, by a model's `config.json`. None if it is not a plain
    transformer, or does not say enough."""
    windows = model.get("sliding_window") and model.get("use_sliding_window", True)
    kinds = set(model.get("layer_types") or ["full_attention"])
    if model.get("model_type") not in _PLAIN_MODELS or windows or kinds != {"full_attention"}:
        return None
    try:
        layers = int(model["num_hidden_layers"])
        if "kv_lora_rank" in model:  # MLA: every rank has all of it
            return layers * (int(model["kv_lora_rank"]) + int(model["qk_rope_head_dim"])) * _BYTES_PER_NUMBER
        heads = int(model["num_attention_heads"])
        width = int(model.get("head_dim") or int(model["hidden_size"]) // heads)
        # With more ranks than heads, several ranks have the same one.
        kv_heads = max(1, int(model.get("num_key_value_heads") or heads) // ranks)
        return layers * 2 * kv_heads * width * _BYTES_PER_NUMBER
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
