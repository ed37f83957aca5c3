"""Settings: frozen, checked once, at the edge."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from fractions import Fraction
from typing import Any

from forebay.errors import CapacityError, ConfigError, UnknownKeyError, is_whole
from forebay.policies import policy_class

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_SIZE = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*")
_TOO_MANY = 10**40  # beyond, arithmetic fails before memory does


class Mode(Enum):
    EAGER = "eager"  # store every block once its tokens are confirmed
    LAZY = "lazy"  # store what the device is about to evict


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    capacity_bytes: int
    """Host memory for blocks, on each rank. At least one block."""
    mode: Mode = Mode.EAGER
    """When blocks are stored. `"eager"`: once their tokens are confirmed. `"lazy"`: when the device pool is about
    to evict them."""
    eviction_policy: str = "lru"
    """Which block leaves a full host pool: `"lru"`, `"s3fifo"`, `"arc"`, or `"module:Class"` of a policy of your
    own."""
    load_deadline_s: float = 30.0
    """A load that some rank has not reported after so many seconds counts as failed. Its request computes."""
    wait_deadline_s: float = 2.0
    """How long a request may wait for blocks that are being copied for another, or for room on the device. After
    that it loads or computes on its own. 0: it never waits."""
    store_deadline_s: float = 60.0
    """A store that some rank has not reported after so many seconds is given up. Nobody waits for it, its blocks
    may be stored again, and its slots stay its own."""
    min_load_tokens: int = 0
    """Shorter hits are computed instead of loaded."""

    def __post_init__(self) -> None:
        if not is_whole(self.capacity_bytes) or self.capacity_bytes < 1:
            raise CapacityError("capacity_bytes", self.capacity_bytes, "whole bytes, at least one block")
        if not isinstance(self.mode, Mode):
            raise ConfigError("mode", self.mode, f"one of {', '.join(mode.value for mode in Mode)}")
        policy_class(self.eviction_policy)
        for setting in ("load_deadline_s", "wait_deadline_s", "store_deadline_s"):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(setting, value, "a number of seconds, at least 0")
        if not is_whole(self.min_load_tokens) or self.min_load_tokens < 0:
            raise ConfigError("min_load_tokens", self.min_load_tokens, "a whole number, at least 0")

    @classmethod
    def parse(cls, settings: Mapping[str, Any], where: str = "forebay") -> OffloadConfig:
        """Build from plain data such as JSON; unknown keys raise and name the nearest right one."""
        known = [each.name for each in fields(cls)]
        for key in settings:
            if key not in known:
                raise UnknownKeyError(str(key), known, where)
        values = dict(settings)
        values["capacity_bytes"] = parse_size("capacity_bytes", values.get("capacity_bytes"))
        if isinstance(values.get("mode"), str) and values["mode"] in {mode.value for mode in Mode}:
            values["mode"] = Mode(values["mode"])
        return cls(**values)


def parse_size(setting: str, value: object) -> int:
    """Bytes from a whole number or from text with a unit: GB is 1000³, GiB is 1024³."""
    size = _size(value)
    if size is None:
        raise ConfigError(setting, value, 'whole bytes, or text such as "64GB" or "60GiB"')
    if size >= _TOO_MANY:
        raise ConfigError(setting, value, "less than 10⁴⁰ bytes")
    return size


def _size(value: object) -> int | None:
    if is_whole(value):
        return value
    if isinstance(value, float) and value.is_integer():  # 64e9 in JSON
        return int(value)
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, unit = match.groups()
        if unit in _UNITS:
            size = Fraction(number) * _UNITS[unit]
            if size.denominator == 1:
                return int(size)
    return None
