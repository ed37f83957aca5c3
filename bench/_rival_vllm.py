"""The vLLM half of scheduler_cost.py: one round of the same calls, through vLLM's own CPU offload scheduler and
through Forebay's class of that name, both over vLLM's own BlockPool. Read at vLLM 0.32.0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from scheduler_cost import BYTES_PER_BLOCK, SPARE, TOKENS_PER_BLOCK, Laps, Prompt, expect, prefix_hashes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload import manager as vllm_manager
from vllm.v1.simple_kv_offload import metadata as vllm_metadata

import forebay.vllm
from forebay.ids import RequestId


def make_scheduler(kind: type, pool: BlockPool, slots: int) -> Any:
    spec = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    expect(spec.page_size_bytes == BYTES_PER_BLOCK, f"a block has {spec.page_size_bytes} bytes")
    size = pool.num_gpu_blocks * BYTES_PER_BLOCK
    tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=BYTES_PER_BLOCK)
    config = SimpleNamespace(  # all that the two read of a VllmConfig when they store eagerly
        kv_events_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        model_config=SimpleNamespace(max_model_len=pool.num_gpu_blocks * TOKENS_PER_BLOCK),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8192, max_num_seqs=256),
        max_in_flight_tokens=8192,
        num_prefill_lookahead_tokens=0,
    )
    scheduler = kind(
        config,
        KVCacheConfig(pool.num_gpu_blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)]),
        cpu_capacity_bytes=slots * BYTES_PER_BLOCK,
        scheduler_block_size=TOKENS_PER_BLOCK,
        hash_block_size=TOKENS_PER_BLOCK,
    )
    scheduler.bind_gpu_block_pool(pool)
    return scheduler


def vllm_round(blocks: int) -> Laps:
    return _round(blocks, vllm_manager.SimpleCPUOffloadScheduler, vllm_metadata.SimpleCPUOffloadWorkerMetadata)


def forebay_round(blocks: int) -> Laps:
    return _round(blocks, forebay.vllm.SimpleCPUOffloadScheduler, forebay.vllm.SimpleCPUOffloadWorkerMetadata)


def _round(blocks: int, scheduler_kind: type, worker_metadata: type) -> Laps:
    pool = BlockPool(2 * blocks + SPARE, enable_caching=True, hash_block_size=TOKENS_PER_BLOCK)
    scheduler = make_scheduler(scheduler_kind, pool, blocks + SPARE)
    first, second = (Prompt(RequestId(name), prefix_hashes(blocks)) for name in ("first", "second"))
    tokens = first.num_computed_tokens = blocks * TOKENS_PER_BLOCK
    laps = Laps()
    handles = pool.get_new_blocks(blocks)
    pool.cache_full_blocks(first, handles, 0, blocks, TOKENS_PER_BLOCK, 0)
    table = KVCacheBlocks((handles,))
    laps.start()
    scheduler.update_state_after_alloc(first, table, 0)
    laps.stop("admit")
    planned = _first_step(first, table)
    laps.start()
    store = scheduler.build_connector_meta(planned)
    laps.stop("plan store")
    done = KVConnectorOutput(kv_connector_worker_meta=worker_metadata({store.store_event: 1}))
    laps.start()
    scheduler.update_connector_output(done)
    laps.stop("commit")
    scheduler.request_finished_all_groups(first, table.get_block_ids())
    pool.evict_blocks({each.block_id for each in handles})
    pool.free_blocks(handles[::-1])
    laps.start()
    answer = scheduler.get_num_new_matched_tokens(second, 0)
    laps.stop("match")
    expect(answer == (tokens, True), f"the match is {answer}, not {tokens} tokens")
    laps.ask_again(lambda: scheduler.get_num_new_matched_tokens(second, 0))
    handles = pool.get_new_blocks(blocks)
    table, idle = KVCacheBlocks((handles,)), SchedulerOutput.make_empty()
    laps.start()
    scheduler.update_state_after_alloc(second, table, tokens)
    load = scheduler.build_connector_meta(idle)
    laps.stop("plan load")
    done = KVConnectorOutput(finished_recving={second.id})
    laps.start()
    scheduler.update_connector_output(done)
    laps.stop("finish load")
    expect(len(store.store_gpu_blocks) == len(load.load_gpu_blocks) == blocks, "copies are missing")
    expect(load.load_cpu_blocks == store.store_cpu_blocks, "the load does not read what the store wrote")
    expect(load.load_gpu_blocks == table.get_block_ids()[0], "the load does not write the request's blocks")
    expect(all(each.ref_cnt == 1 for each in handles), "device blocks are still held")
    free = scheduler.cpu_block_pool.get_num_free_blocks()
    expect(free >= blocks + SPARE - 1 and not scheduler.has_pending_stores(), "host blocks are still held")
    other = Prompt(RequestId("other"), prefix_hashes(2 * blocks)[blocks:])
    other.num_computed_tokens = tokens
    handles = pool.get_new_blocks(blocks)
    pool.cache_full_blocks(other, handles, 0, blocks, TOKENS_PER_BLOCK, 0)
    table = KVCacheBlocks((handles,))
    scheduler.update_state_after_alloc(other, table, 0)
    planned = _first_step(other, table)
    laps.start()
    store = scheduler.build_connector_meta(planned)
    laps.stop("when full")
    expect(len(store.store_gpu_blocks) == blocks, "nothing was evicted")
    return laps


def _first_step(prompt: Prompt, table: KVCacheBlocks) -> SchedulerOutput:
    planned = SchedulerOutput.make_empty()
    planned.scheduled_new_reqs = [SimpleNamespace(req_id=prompt.id, block_ids=table.get_block_ids())]
    planned.num_scheduled_tokens = {prompt.id: 1}
    return planned
