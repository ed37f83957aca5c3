"""Everything that differs between vLLM releases, in one place.

Forebay asks what a release can do rather than what it is called, so a release nobody has tried yet gets a warning
and is tried. docs/tested-versions.md has the releases that were.

    release   what changed for a connector
    0.26      the oldest that was read: the queue of free blocks and the handshake of ranks are as they still are
    0.27      models with recurrent states: a local hit may be full attention's alone
    0.29      KVCacheTensor places layers in one allocation; groups may opt out of prefix caching
    0.30      a failed load is reported by request (failed_recving), for every kind of model; before that by block,
              which works for models with one group of full attention only. Drafters may opt out of dropping a
              block
    0.31      every spec says itself whether context parallelism shards it; before that the kind decides. Requests
              that were loaded run before others are looked at
    0.32      hits name the tier they came from
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1 import metrics as connector_metrics
from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)

from forebay.settings import NEWEST_VLLM, OLDEST_VLLM

logger = init_logger("vllm.forebay")

OLDEST, NEWEST = OLDEST_VLLM, NEWEST_VLLM


def release() -> tuple[int, int] | None:
    """The installed release as (major, minor); None for builds without a number."""
    numbers = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    return (int(numbers[1]), int(numbers[2])) if numbers else None


REPORTS_FAILED_REQUESTS: bool = hasattr(base, "KVConnectorTransferResults")
"""Whether a failed load can be reported by request. Otherwise by block."""


LOCAL_HITS_DIVERGE: bool = hasattr(KVCacheManager, "get_computed_blocks_for_connector") and not hasattr(
    base.KVConnectorBase_V1, "supports_divergent_local_hybrid_hits"
)
"""Whether the engine may count what only full attention has as a hit of the whole model, unasked (0.27)."""


RESERVES_FOR_LOADS: bool = hasattr(Scheduler, "_holds_kv_blocks")
"""Whether requests that were loaded run before any other is looked at. All releases reserve room for them, but up
to 0.30 one that was passed over, or has a higher priority, may stand before them, find no room, and so keep them
from running for good, unless it is passed over again."""


SESSIONS_KEEP_STALE_HASHES: bool = (release() or NEWEST) < (0, 32)
"""Whether a streaming session that takes a token back keeps the hash that this token completed."""


HAS_CONNECTOR_METRICS: bool = hasattr(connector_metrics, "KVConnectorPromMetrics")
"""Whether a connector can have Prometheus metrics. All releases up to now do."""


BLOCK_LAYOUT: str | None = "BLHNC" if (release() or NEWEST) >= (0, 29) else None
"""What to ask for so that all layers of a block lie side by side. Up to 0.28 a connector says it prefers that."""


def warn_if_untested() -> None:
    installed = release()
    if installed is None or installed > NEWEST:
        logger.warning_once(
            "forebay has not been tested with vLLM %s (newest: %d.%d); trying it all the same",
            vllm.__version__,
            *NEWEST,
        )
    elif installed < OLDEST:
        logger.warning_once("forebay was written for vLLM %d.%d and newer, this is %s", *OLDEST, vllm.__version__)


def log_as_vllm_does() -> None:
    """The core knows nothing of vLLM; what it logs should still look as if it belonged."""
    core, engine = logging.getLogger("forebay"), logging.getLogger("vllm")
    if not core.handlers:
        core.setLevel(engine.level)
        for handler in engine.handlers:
            core.addHandler(handler)


def recovers(kv_cache_config: KVCacheConfig) -> bool:
    """Whether this release can take a failed load back for this model, so that the request computes instead."""
    if REPORTS_FAILED_REQUESTS:
        return True
    groups = kv_cache_config.kv_cache_groups
    # Told by block, vLLM computes from the first bad block on and builds on all before it. Of a window or a
    # recurrent state only the end was loaded: before it there is nothing to build on.
    return len(groups) == 1 and isinstance(plain_spec(groups[0].kv_cache_spec), FullAttentionSpec)


def must_end(kv_cache_config: KVCacheConfig, device_tokens: int) -> bool:
    """Whether a load has to be waited for, however late it is: this release cannot take it back, or computes into
    the blocks that it still writes. Told by block, vLLM keeps those blocks if the device had some before them."""
    return not recovers(kv_cache_config) or (device_tokens > 0 and not REPORTS_FAILED_REQUESTS)


# --- sizes -------------------------------------------------------------------------------------------


def device_bytes(kv_cache_config: KVCacheConfig) -> int:
    """Bytes of all KV on this rank's device."""
    tensors = kv_cache_config.kv_cache_tensors
    if not tensors:
        return 0
    # From 0.29 on every tensor says how large the allocation is that it lies in; before that only packed ones do.
    shared = hasattr(tensors[0], "layers") or any(tensor.block_stride for tensor in tensors)
    return int(tensors[0].size if shared else sum(tensor.size for tensor in tensors))


def scaled(kv_cache_config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """The same groups and tensors for another number of blocks."""
    before = kv_cache_config.num_blocks

    def resized(tensor: KVCacheTensor) -> KVCacheTensor:
        lists = {
            each.name: list(value)
            for each in fields(tensor)
            if isinstance(value := getattr(tensor, each.name), list)
        }
        return replace(tensor, size=tensor.size // before * num_blocks, **lists)

    return replace(
        kv_cache_config,
        num_blocks=num_blocks,
        kv_cache_tensors=[resized(tensor) for tensor in kv_cache_config.kv_cache_tensors],
    )


def hash_bytes(vllm_config: VllmConfig) -> int:
    """Length of the prefix hashes that this engine computes."""
    return len(get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)(b""))


# --- groups ------------------------------------------------------------------------------------------


def cacheable_groups(kv_cache_config: KVCacheConfig) -> list[tuple[int, KVCacheGroupSpec]]:
    """Groups whose blocks have keys, with their numbers. Others are rebuilt by the engine."""
    return [
        (number, group)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if getattr(group, "enable_kv_transfer", True) and getattr(group.kv_cache_spec, "prefix_cacheable", True)
    ]


def has_own_pool(group: KVCacheGroupSpec) -> bool:
    """Whether this group's blocks are numbered in a pool of their own, on the host (HiSparse, from 0.30 on)."""
    return bool(getattr(group, "host_resident", False))


def plain_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """Of layers that differ in size only, any stands for all."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def has_device_memory(vllm_config: VllmConfig) -> bool:
    """Whether KV is on a device, so that host memory for it becomes ready only bit by bit."""
    return getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu") == "cuda"


def is_recurrent(group: KVCacheGroupSpec) -> bool:
    return isinstance(plain_spec(group.kv_cache_spec), MambaSpec)


def context_parallel(spec: KVCacheSpec, dcp_world_size: int) -> int:
    """Ranks that share the tokens of a block."""
    sharded = getattr(spec, "dcp_sharded", None)
    if sharded is None:
        only_full = hasattr(kv_cache_utils, "dcp_world_size_for_kv_cache_spec")
        plain = plain_spec(spec)
        sharded = isinstance(plain, FullAttentionSpec) if only_full else not isinstance(plain, MambaSpec)
    return dcp_world_size if sharded else 1


def drafter_groups(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> set[int]:
    """Groups that a drafter reads, for which a hit counts only if the next block matches too."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return set()
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    if not drops():
        return set()
    groups = kv_cache_config.kv_cache_groups
    marked = {number for number, group in enumerate(groups) if group.is_eagle_group}
    return marked or set(range(len(groups)))


# --- results and events ----------------------------------------------------------------------------


def transfer_results(finished: set[str], failed: set[str]) -> Any:
    """What get_transfer_results() returns, on releases that have it."""
    return base.KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)


def host_hit_source() -> Any:
    """How hits from the host are labelled in metrics; None on releases that do not label them."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return None
    return CacheHitSource.HOST


def make_event(kind: type, **values: Any) -> Any:
    """A KV event with those of the fields that this release's events have."""
    known = kind.__struct_fields__  # type: ignore[attr-defined]
    return kind(**{name: value for name, value in values.items() if name in known})


def event_extra_keys(extra_keys: list[Any]) -> Any:
    """What entered the hashes beside the tokens, in the form this release publishes."""
    published = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return published(extra_keys) if published is not None else extra_keys


def settings_being_resolved() -> Mapping[str, Any] | None:
    """The kv_connector_extra_config of the engine that is looking the connector class up just now, if one is.

    vLLM gives a connector its settings only when it builds it, and that is after the weights are loaded. But it
    looks the class up while it checks its own configuration, and a typo should be named then. So this reads the
    local variable of the function that does the lookup; where it finds none, the check comes later.
    """
    frame = sys._getframe(1)  # noqa: SLF001
    for _ in range(4):
        config = frame.f_locals.get("kv_transfer_config")
        if config is not None and isinstance(extra := getattr(config, "kv_connector_extra_config", None), Mapping):
            return extra
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
