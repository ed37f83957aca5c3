"""The connector's settings: vLLM's own names for what vLLM's connector has, Forebay's for the rest.

Nothing here needs vLLM, so that the command line checks them as an engine does, on machines that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isabs
from typing import Any, Self

from forebay.config import Mode, OffloadConfig, parse_size
from forebay.copier.faults import InjectedFaults
from forebay.copier.verify import Verify
from forebay.errors import ConfigError, UnknownKeyError
from forebay.recording.parts import LEAST_BYTES as LEAST_RECORDING_BYTES
from forebay.recording.recorder import DEFAULT_BYTES as DEFAULT_RECORDING_BYTES

OLDEST_VLLM, NEWEST_VLLM = (0, 26), (0, 32)
"""Releases the adapter was written against."""

CONNECTOR, MODULE_PATH = "SimpleCPUOffloadConnector", "forebay.vllm"
"""How vLLM finds the connector: `kv_connector` and `kv_connector_module_path`."""

WHERE = "kv_connector_extra_config"
DEFAULT_BYTES = 8 * 1024**3

_VLLM_KEYS = ("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank", "lazy_offload", "kv_offload_backend")
_FOREBAY_KEYS = ("eviction_policy", "load_deadline_s", "wait_deadline_s", "store_deadline_s", "min_load_tokens")
_RECORDING_KEYS = ("record_trace", "record_trace_bytes")
KNOWN = (*_VLLM_KEYS, *_FOREBAY_KEYS, "verify", "block_layout", *_RECORDING_KEYS, "inject_faults")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
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
    record_trace: str | None
    """A folder in which requests are recorded, as keys and times."""
    record_trace_bytes: int
    """What recordings may take in that folder."""
    faults: InjectedFaults | None

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Check everything that can be checked without an engine."""
        for key in extra:
            if key not in KNOWN:
                raise UnknownKeyError(str(key), KNOWN, WHERE)
        if extra.get("kv_offload_backend", "cpu") != "cpu":
            raise ConfigError(named("kv_offload_backend"), extra["kv_offload_backend"], "'cpu'")
        lazy = extra.get("lazy_offload", False)
        if not isinstance(lazy, bool):
            raise ConfigError(named("lazy_offload"), lazy, "true or false")
        verify, choices = extra.get("verify", Verify.ALL.value), [each.value for each in Verify]
        if verify not in choices:
            raise ConfigError(named("verify"), verify, f"one of {', '.join(choices)}")
        block_layout = extra.get("block_layout", False)
        if not isinstance(block_layout, bool):
            raise ConfigError(named("block_layout"), block_layout, "true or false")
        folder = extra.get("record_trace")
        if folder is not None and (not isinstance(folder, str) or not isabs(folder)):
            raise ConfigError(named("record_trace"), folder, "an absolute path to a folder, as text")
        record_bytes = _size(extra, "record_trace_bytes", DEFAULT_RECORDING_BYTES)
        if record_bytes < LEAST_RECORDING_BYTES:
            at_least = f"at least {LEAST_RECORDING_BYTES:,} bytes"
            raise ConfigError(named("record_trace_bytes"), extra["record_trace_bytes"], at_least)
        faults = extra.get("inject_faults")
        config = cls(
            total_bytes=_size(extra, "cpu_bytes_to_use", DEFAULT_BYTES),
            bytes_per_rank=_size(extra, "cpu_bytes_to_use_per_rank", None),
            mode=Mode.LAZY if lazy else Mode.EAGER,
            block_layout=block_layout,
            settings={key: extra[key] for key in _FOREBAY_KEYS if key in extra},
            verify=Verify(verify),
            record_trace=folder,
            record_trace_bytes=record_bytes,
            faults=None if faults is None else InjectedFaults.parse(faults, named("inject_faults")),
        )
        config.for_ranks(1)
        return config

    @property
    def is_lazy(self) -> bool:
        return self.mode is Mode.LAZY

    def per_rank(self, ranks: int) -> int:
        return self.total_bytes // ranks if self.bytes_per_rank is None else self.bytes_per_rank

    def for_ranks(self, ranks: int) -> OffloadConfig:
        """The core's settings on an engine of so many ranks."""
        return OffloadConfig.parse(
            {"capacity_bytes": self.per_rank(ranks), "mode": self.mode.value, **self.settings}, WHERE
        )


def named(key: str) -> str:
    return f"{WHERE}.{key}"


def _size(extra: Mapping[str, Any], key: str, default: Any) -> Any:
    if key not in extra:
        return default
    size = parse_size(named(key), extra[key])
    if size < 1:
        raise ConfigError(named(key), extra[key], "at least one byte")
    return size
