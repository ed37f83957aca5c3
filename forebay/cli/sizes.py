"""Amounts of memory, as they are asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from forebay.config import parse_size
from forebay.copier.memory import Limit
from forebay.errors import ConfigError

_MIB = 1 << 20
_PERCENT = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)%")


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
