"""The connector's settings: vLLM's own names for what vLLM's connector has, Forebay's for the rest.

Nothing here needs vLLM, so that the command line checks them as an engine does, on machines that have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from forebay.config import Mode, OffloadConfig, parse_size
from forebay.copier.faults import InjectedFaults
from forebay.copier.verify import Verify
from forebay.errors import ConfigError, UnknownKeyError
from forebay.parsing import is_absolute_path
from forebay.recording.parts import LEAST_BYTES as LEAST_RECORDING_BYTES
from forebay.recording.recorder import DEFAULT_BYTES as DEFAULT_RECORDING_BYTES

OLDEST_VLLM, NEWEST_VLLM = (0, 26), (0, 32)
"""Releases the adapter was written against."""

CONNECTOR, MODULE_PATH = "SimpleCPUOffloadConnector", "forebay.vllm"
"""How vLLM finds the connector: `kv_connector` and `kv_connector_module_path`."""

WHERE = "kv_connector_extra_config"
DEFAULT_BYTES = 8 * 1024**3

CORE_EXAMPLES: Mapping[str, Any] = {
    "eviction_policy": "s3fifo",
    "load_deadline_s": 10,
    "wait_deadline_s": 0,
    "store_deadline_s": 120,
    "min_load_tokens": 256,
}
"""Settings of the core that the connector passes on as they are, each with an example for the docs."""


def _key(key: str, example: object) -> dict[str, object]:
    """How a field is written in JSON, with an example for the docs."""
    return {"key": key, "example": example}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """The text below a field is what docs/configuration.md says of its key."""

    total_bytes: int = field(metadata=_key("cpu_bytes_to_use", "64GB"))
    """Host memory for blocks, of all ranks of an engine together. A rank gets its share. The default is 8 GiB."""
    bytes_per_rank: int | None = field(metadata=_key("cpu_bytes_to_use_per_rank", "60GiB"))
    """Host memory for blocks, on each rank. If given, it counts and `cpu_bytes_to_use` does not."""
    mode: Mode = field(metadata=_key("lazy_offload", True))
    """When blocks are stored. False: once they are computed. True: when the device is about to evict them."""
    backend: str = field(metadata=_key("kv_offload_backend", "cpu"))
    """Only `"cpu"` is there."""
    settings: Mapping[str, Any]
    """Those that go to the core as they are."""
    verify: Verify = field(metadata=_key("verify", "sampled"))
    """Which blocks have to be, when they are loaded, what was stored: `"all"`, `"sampled"` or `"off"`."""
    block_layout: bool = field(metadata=_key("block_layout", True))
    """On GPUs: whether vLLM is asked to keep all layers of a block side by side."""
    record_trace: str | None = field(metadata=_key("record_trace", "/var/lib/forebay"))
    """A folder in which the engine records what it is asked for, as keys and times. An absolute path."""
    record_trace_bytes: int = field(metadata=_key("record_trace_bytes", "200MB"))
    """What recordings may take in that folder, those of all engines together. The oldest part goes first."""
    faults: InjectedFaults | None = field(metadata=_key("inject_faults", {"fail_chance": 0.05}))
    """Copies that fail on demand. For tests."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """Check everything that can be checked without an engine."""
        for key in extra:
            if key not in KNOWN:
                raise UnknownKeyError(str(key), KNOWN, WHERE)
        backend = extra.get("kv_offload_backend", "cpu")
        if backend != "cpu":
            raise ConfigError(named("kv_offload_backend"), backend, "'cpu'")
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
        if folder is not None and not is_absolute_path(folder):
            wanted = "an absolute path to a folder, as text without NUL or half characters"
            raise ConfigError(named("record_trace"), folder, wanted)
        record_bytes = _size(extra, "record_trace_bytes", DEFAULT_RECORDING_BYTES)
        if record_bytes < LEAST_RECORDING_BYTES:
            at_least = f"at least {LEAST_RECORDING_BYTES:,} bytes"
            raise ConfigError(named("record_trace_bytes"), extra["record_trace_bytes"], at_least)
        faults = extra.get("inject_faults")
        config = cls(
            total_bytes=_size(extra, "cpu_bytes_to_use", DEFAULT_BYTES),
            bytes_per_rank=_size(extra, "cpu_bytes_to_use_per_rank", None),
            mode=Mode.LAZY if lazy else Mode.EAGER,
            backend=backend,
            settings={key: extra[key] for key in CORE_EXAMPLES if key in extra},
            verify=Verify(verify),
            block_layout=block_layout,
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

    def summary(self, slots: int, ranks: int) -> str:
        """The line at the start of an engine, for people and for scripts: its names stay as they are."""
        core = self.for_ranks(ranks)
        said = {
            "slots": slots,
            "bytes_per_rank": core.capacity_bytes,
            "ranks": ranks,
            "mode": core.mode.value,
            "policy": core.eviction_policy,
            "verify": self.verify.value,
            "layout": "block" if self.block_layout else "engine",
        }
        return " ".join(f"{name}={value}" for name, value in said.items())


KNOWN = tuple(
    key
    for each in fields(ConnectorSettings)
    for key in ([each.metadata["key"]] if each.metadata else CORE_EXAMPLES)
)
"""Every key of `kv_connector_extra_config`, in the order of docs/configuration.md."""


def named(key: str) -> str:
    return f"{WHERE}.{key}"


def _size(extra: Mapping[str, Any], key: str, default: Any) -> Any:
    if key not in extra:
        return default
    size = parse_size(named(key), extra[key])
    if size < 1:
        raise ConfigError(named(key), extra[key], "at least one byte")
    return size
