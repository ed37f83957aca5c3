"""Driving a scheduler class by hand, without an engine: vLLM's own or Forebay's, by the same calls."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

from tests.vllm.test_names import VLLM

BLOCK = 16


def scheduler_class(name: str) -> type:
    """Forebay's SimpleCPUOffloadScheduler ("forebay") or vLLM's own ("vllm")."""
    module = "forebay.vllm" if name == "forebay" else VLLM["SimpleCPUOffloadScheduler"]
    return importlib.import_module(module).SimpleCPUOffloadScheduler  # type: ignore[no-any-return]


def worker_metadata(name: str, events: dict[int, int]) -> Any:
    module = "forebay.vllm" if name == "forebay" else VLLM["SimpleCPUOffloadWorkerMetadata"]
    return importlib.import_module(module).SimpleCPUOffloadWorkerMetadata(completed_store_events=events)


def full(block: int = BLOCK) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)


def window(tokens: int, block: int = BLOCK) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=tokens
    )


def reference_window(tokens: int, block: int = BLOCK) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import RSWASpec

    return RSWASpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32, rswa_window=tokens)


def chunked(tokens: int, block: int = BLOCK) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    return ChunkedLocalAttentionSpec(
        block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32, attention_chunk_size=tokens
    )


def mamba(block: int = BLOCK) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    return MambaSpec(block_size=block, shapes=((8,),), dtypes=(torch.float32,), mamba_cache_mode="align")


def kv_cache_config(specs: Sequence[Any], num_blocks: int, block_bytes: int = 1024) -> Any:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    size = num_blocks * block_bytes
    tensors = [
        KVCacheTensor(size=size, layers=[f"layer{i}"], layer_stride=size, block_stride=block_bytes)
        for i in range(len(specs))
    ]
    return KVCacheConfig(
        num_blocks, tensors, [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    )


def vllm_config(**settings: Any) -> Any:
    """The part of a VllmConfig that scheduler classes read."""
    values: dict[str, Any] = {
        "kv_events_config": None,
        "speculative_config": None,
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, world_size=1, rank=0),
        "model_config": SimpleNamespace(max_model_len=1 << 20),
        "cache_config": SimpleNamespace(
            prefix_caching_hash_algo="sha256", block_size=BLOCK, prefix_match_unit=None, enable_prefix_caching=True
        ),
        "scheduler_config": SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=8),
        "max_in_flight_tokens": 256,
        "num_prefill_lookahead_tokens": 0,
    }
    return SimpleNamespace(**values | settings)


@dataclass
class HandRequest:
    """What scheduler classes read of a vLLM request, with hashes that chain."""

    request_id: str
    all_token_ids: list[int]
    hash_tokens: int = BLOCK
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        for stop in range(self.hash_tokens, len(self.all_token_ids) + 1, self.hash_tokens):
            self.block_hashes.append(sha256(repr(self.all_token_ids[:stop]).encode()).digest())

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.all_token_ids)


class Hand:
    """An engine of one's hands around a scheduler class and a real BlockPool. Copies end when told to."""

    def __init__(
        self, name: str, specs: Sequence[Any], *, blocks: int = 64, slots: int = 64, **kwargs: Any
    ) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.name = name
        sizes = [spec.block_size for spec in specs]
        self.hash_tokens = kwargs.pop("hash_tokens", min(sizes))
        self.group_tokens = sizes
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=self.hash_tokens)
        config = kwargs.pop("vllm_config", None) or vllm_config()
        self.scheduler = scheduler_class(name)(
            config,
            kv_cache_config(specs, blocks),
            slots * 1024,
            scheduler_block_size=max(sizes),
            hash_block_size=self.hash_tokens,
            **kwargs,
        )
        self.scheduler.bind_gpu_block_pool(self.pool)
        self.requests: dict[str, tuple[HandRequest, tuple[list[Any], ...]]] = {}

    def request(self, name: str, tokens: Sequence[int]) -> HandRequest:
        return HandRequest(name, list(tokens), self.hash_tokens)

    def admit(self, request: HandRequest, external_tokens: int = 0) -> None:
        """Give a request blocks for all its tokens in every group. What it computes has its hashes from now on."""
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks

        handles = tuple(self.pool.get_new_blocks(-(-request.num_tokens // size)) for size in self.group_tokens)
        for group, (blocks, size) in enumerate(zip(handles, self.group_tokens, strict=True)):
            if external_tokens:
                break  # vLLM gives hashes to what is loaded when it has arrived
            self.pool.cache_full_blocks(request, blocks, 0, request.num_tokens // size, size, group)
        self.requests[request.request_id] = (request, handles)
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(handles), external_tokens)

    def step(self, *running: HandRequest, confirmed: bool = True) -> Any:
        """Build a step in which these run, all their tokens confirmed, or computed by this step."""
        from vllm.v1.core.sched.output import SchedulerOutput

        planned = SchedulerOutput.make_empty()
        planned.scheduled_new_reqs = [
            SimpleNamespace(
                req_id=each.request_id,
                block_ids=tuple(
                    [block.block_id for block in group] for group in self.requests[each.request_id][1]
                ),
            )
            for each in running
        ]
        planned.num_scheduled_tokens = {each.request_id: 1 for each in running}
        planned.total_num_scheduled_tokens = len(running)
        if confirmed:
            for each in running:
                each.num_computed_tokens = each.num_tokens
        return self.scheduler.build_connector_meta(planned)

    def stored(self, metadata: Any) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        meta = worker_metadata(self.name, {metadata.store_event: 1})
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def loaded(self, request: HandRequest) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        self.scheduler.update_connector_output(KVConnectorOutput(finished_recving={request.request_id}))

    def finish(self, request: HandRequest) -> None:
        _, handles = self.requests.pop(request.request_id)
        table = tuple([block.block_id for block in group] for group in handles)
        assert self.scheduler.request_finished_all_groups(request, table) == (False, None)
        for group in handles:
            self.pool.free_blocks(reversed(group))

    def forget_device(self) -> None:
        self.pool.evict_blocks(set(range(1, self.pool.num_gpu_blocks)))

    def keep(self, request: HandRequest) -> None:
        """Compute a request, store all of it, and let it go."""
        self.admit(request)
        metadata = self.step(request)
        if metadata.store_event >= 0:
            self.stored(metadata)
        self.finish(request)
        metadata = self.step()
        if metadata.store_event >= 0:
            self.stored(metadata)
