"""The connector's settings: vLLM's own names for what vLLM's connector has, Forebay's for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay.config import Mode, OffloadConfig, parse_size
from forebay.copier.checksum import Verify
from forebay.copier.faults import InjectedFaults
from forebay.errors import CapacityError, ConfigError, UnknownKeyError
from forebay.vllm import compat

WHERE = "kv_connector_extra_config"
DEFAULT_BYTES = 8 * 1024**3

_VLLM_KEYS = ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "lazy_offload", "kv_offload_backend")
_FOREBAY_KEYS = ("eviction_policy", "load_deadline_s", "wait_deadline_s", "store_deadline_s", "min_load_tokens")
_KNOWN = (*_VLLM_KEYS, *_FOREBAY_KEYS, "verify", "block_layout", "inject_faults")


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    total_bytes: int
    """Host memory of all ranks together (`cpu_bytes_to_use`)."""
    bytes_per_rank: int | None
    """Host memory of one rank, where it was given (`cpu_bytes_to_use_per_rank`)."""
    mode: Mode
    settings: Mapping[str, Any]
    """Those that go to the core as they are."""
    verify: Verify
    block_layout: bool
    """Whether vLLM is asked to keep all layers of a block side by side on the device."""
    faults: InjectedFaults | None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Check everything that can be checked without an engine."""
        for key in extra:
            if key not in _KNOWN:
                raise UnknownKeyError(str(key), _KNOWN, WHERE)
        if extra.get("kv_offload_backend", "cpu") != "cpu":
            raise ConfigError(_named("kv_offload_backend"), extra["kv_offload_backend"], "'cpu'")
        lazy = extra.get("lazy_offload", False)
        if not isinstance(lazy, bool):
            raise ConfigError(_named("lazy_offload"), lazy, "true or false")
        verify, choices = extra.get("verify", Verify.ALL.value), [each.value for each in Verify]
        if verify not in choices:
            raise ConfigError(_named("verify"), verify, f"one of {', '.join(choices)}")
        block_layout = extra.get("block_layout", False)
        if not isinstance(block_layout, bool):
            raise ConfigError(_named("block_layout"), block_layout, "true or false")
        faults = extra.get("inject_faults")
        config = cls(
            total_bytes=_size(extra, "cpu_bytes_to_use", DEFAULT_BYTES),
            bytes_per_rank=_size(extra, "cpu_bytes_to_use_per_rank", None),
            mode=Mode.LAZY if lazy else Mode.EAGER,
            block_layout=block_layout,
            settings={key: extra[key] for key in _FOREBAY_KEYS if key in extra},
            verify=Verify(verify),
            faults=None if faults is None else InjectedFaults.parse(faults, _named("inject_faults")),
        )
        config.for_ranks(1)
        return config

    @property
    def is_lazy(self) -> bool:
        return self.mode is Mode.LAZY

    def per_rank(self, ranks: int) -> int:
        return self.total_bytes // ranks if self.bytes_per_rank is None else self.bytes_per_rank

    def check_capacity(self, kv_cache_config: KVCacheConfig, ranks: int) -> None:
        """A block must fit on every rank. Checked under the name that was written, not what became of it."""
        blocks, size = kv_cache_config.num_blocks, compat.device_bytes(kv_cache_config)
        if blocks * self.per_rank(ranks) >= size:
            return
        needed = ceil(size / blocks)
        if self.bytes_per_rank is not None:
            key, value, allowed = "cpu_bytes_to_use_per_rank", self.bytes_per_rank, f"one block ({needed} bytes)"
        else:
            key, value = "cpu_bytes_to_use", self.total_bytes
            allowed = f"one block on each of {ranks} ranks ({needed * ranks} bytes)"
        raise CapacityError(_named(key), value, f"at least {allowed}")

    def for_ranks(self, ranks: int) -> OffloadConfig:
        """The core's settings on an engine of so many ranks."""
        return OffloadConfig.parse(
            {"capacity_bytes": self.per_rank(ranks), "mode": self.mode.value, **self.settings}, WHERE
        )


def _named(key: str) -> str:
    return f"{WHERE}.{key}"


def _size(extra: Mapping[str, Any], key: str, default: Any) -> Any:
    if key not in extra:
        return default
    size = parse_size(_named(key), extra[key])
    if size < 1:
        raise ConfigError(_named(key), extra[key], "at least one byte")
    return size
