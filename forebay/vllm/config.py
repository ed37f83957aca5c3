"""The connector's settings as an engine reads them: those of `forebay.settings`, and what only it can check."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay.errors import CapacityError
from forebay.settings import DEFAULT_BYTES, WHERE, ConnectorSettings, named
from forebay.settings import KNOWN as _KNOWN
from forebay.vllm import compat

__all__ = ["DEFAULT_BYTES", "WHERE", "_KNOWN", "ConnectorConfig"]


@dataclass(frozen=True, slots=True)
class ConnectorConfig(ConnectorSettings):
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
        raise CapacityError(named(key), value, f"at least {allowed}")
