"""A vLLM model's KV cache in Forebay's words."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    RSWASpec,
    SlidingWindowSpec,
)

from forebay.errors import LayoutError
from forebay.groups import ChunkedLocal, FullAttention, Group, KVLayout, Recurrent, SlidingWindow
from forebay.vllm import compat


@dataclass(frozen=True)
class EngineLayout:
    kv: KVLayout
    group_ids: tuple[int, ...]
    """The engine's number of each group in `kv`. Groups that the engine does not cache are left out."""
    alignment_tokens: int
    """The engine wants hits to end on a multiple of this."""

    @classmethod
    def of(
        cls,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        scheduler_block_size: int | None = None,
        hash_block_size: int | None = None,
    ) -> EngineLayout:
        if scheduler_block_size is None or hash_block_size is None:
            resolved = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            scheduler_block_size = scheduler_block_size or resolved[0]
            hash_block_size = hash_block_size or resolved[1]
        drafted = compat.drafter_groups(vllm_config, kv_cache_config)
        dcp = vllm_config.parallel_config.decode_context_parallel_size
        numbered = compat.cacheable_groups(kv_cache_config)
        for number, group in numbered:
            if compat.has_own_pool(group):
                raise LayoutError(f"kv_cache_groups[{number}]", "blocks on the host", "blocks on the device")
        groups = tuple(
            _group(number, group.kv_cache_spec, dcp, drafter=number in drafted) for number, group in numbered
        )
        return cls(
            KVLayout(
                groups,
                tokens_per_hash=hash_block_size,
                bytes_per_block=ceil(compat.device_bytes(kv_cache_config) / kv_cache_config.num_blocks),
                bytes_per_hash=compat.hash_bytes(vllm_config),
            ),
            tuple(number for number, _ in numbered),
            scheduler_block_size,
        )


def group_of(spec: KVCacheSpec, dcp_world_size: int) -> Group | None:
    """What a spec means; None if it is of a kind that Forebay does not know."""
    plain = compat.plain_spec(spec)
    tokens, ranks = spec.block_size, compat.context_parallel(spec, dcp_world_size)
    if isinstance(plain, MambaSpec):
        return Recurrent(tokens, ranks)
    if isinstance(plain, SlidingWindowSpec):
        return SlidingWindow(tokens, ranks, window_tokens=plain.sliding_window)
    if isinstance(plain, ChunkedLocalAttentionSpec):
        return ChunkedLocal(tokens, ranks, chunk_tokens=plain.attention_chunk_size)
    if isinstance(plain, FullAttentionSpec):
        return FullAttention(tokens, ranks, drops_outputs=isinstance(plain, RSWASpec))
    return None


def _group(number: int, spec: KVCacheSpec, dcp_world_size: int, *, drafter: bool) -> Group:
    group = group_of(spec, dcp_world_size)
    if group is None:
        raise LayoutError(
            f"kv_cache_groups[{number}]",
            type(compat.plain_spec(spec)).__name__,
            "full attention, a sliding window, chunked local attention or a recurrent state",
        )
    if drafter and not isinstance(group, Recurrent):  # drafters have no recurrent layers
        return type(group)(**{**vars(group), "drafter": True})
    return group
