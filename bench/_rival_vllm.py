"""The vLLM half of scheduler_cost.py: its device pool behind Forebay's contract, and its own CPU offload scheduler
(`SimpleCPUOffloadScheduler`, read at vLLM 0.32.0) through the same operations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from types import SimpleNamespace

import torch
from scheduler_cost import BYTES_PER_BLOCK, SPARE, TOKENS_PER_BLOCK, Laps, Prompt, expect, prefix_hashes
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, get_block_hash, make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler
from vllm.v1.simple_kv_offload.metadata import SimpleCPUOffloadWorkerMetadata

from forebay.ids import BlockId, Key, RequestId


class VllmDevice:
    """vLLM's BlockPool as a `forebay.engine.DevicePool`."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=TOKENS_PER_BLOCK)
        self.null_block = BlockId(self.pool.null_block.block_id)

    @property
    def num_free(self) -> int:
        return self.pool.get_num_free_blocks()

    def pin(self, blocks: Sequence[BlockId]) -> None:
        self.pool.touch(list(map(self.pool.blocks.__getitem__, blocks)))

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> None:
        if in_place:
            raise NotImplementedError("only lazy stores need it; the bench stores eagerly")
        self.pool.free_blocks(map(self.pool.blocks.__getitem__, blocks))

    def keys_of(self, blocks: Sequence[BlockId]) -> list[Key | None]:
        # vLLM names the group in every key; Forebay leaves it out for the first.
        hashes = [self.pool.blocks[block].block_hash for block in blocks]
        return [None if each is None else Key(get_block_hash(each)) for each in hashes]

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        run: list[BlockId] = []
        for key in keys[start:stop]:
            named = make_block_hash_with_group_id(BlockHash(key), 0)
            block = self.pool.cached_block_hash_to_block.get_one_block(named)
            if block is None:
                break
            run.append(BlockId(block.block_id))
        return run

    def next_evictions(self, count: int) -> tuple[list[BlockId], list[Key | None]]:
        blocks = list(islice(self.pool.free_block_queue.iter_blocks_after(None), count))
        ids = [BlockId(each.block_id) for each in blocks]
        return ids, self.keys_of(ids)

    def take(self, count: int) -> list[KVCacheBlock]:
        return self.pool.get_new_blocks(count)

    def table(self, handles: list[KVCacheBlock]) -> tuple[list[int], ...]:
        """What an adapter has to do with the KVCacheBlocks that vLLM hands to it."""
        return KVCacheBlocks((handles,)).get_block_ids()

    def cache(self, handles: list[KVCacheBlock], prompt: Prompt) -> None:
        self.pool.cache_full_blocks(prompt, handles, 0, len(handles), TOKENS_PER_BLOCK, 0)

    def forget(self, handles: list[KVCacheBlock]) -> None:
        self.pool.evict_blocks({each.block_id for each in handles})
        self.pool.free_blocks(handles[::-1])


def vllm_scheduler(device: VllmDevice, slots: int) -> SimpleCPUOffloadScheduler:
    spec = FullAttentionSpec(block_size=TOKENS_PER_BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
    expect(spec.page_size_bytes == BYTES_PER_BLOCK, f"a block has {spec.page_size_bytes} bytes")
    size = device.num_blocks * BYTES_PER_BLOCK
    tensor = KVCacheTensor(size=size, layers=["layer"], layer_stride=size, block_stride=BYTES_PER_BLOCK)
    config = SimpleNamespace(  # all that it reads of a VllmConfig when it stores eagerly
        kv_events_config=None,
        speculative_config=None,
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, world_size=1),
        model_config=SimpleNamespace(max_model_len=device.num_blocks * TOKENS_PER_BLOCK),
        max_in_flight_tokens=8192,
        num_prefill_lookahead_tokens=0,
    )
    scheduler = SimpleCPUOffloadScheduler(
        config,
        KVCacheConfig(device.num_blocks, [tensor], [KVCacheGroupSpec(["layer"], spec)]),
        cpu_capacity_bytes=slots * BYTES_PER_BLOCK,
        scheduler_block_size=TOKENS_PER_BLOCK,
        hash_block_size=TOKENS_PER_BLOCK,
    )
    scheduler.bind_gpu_block_pool(device.pool)
    return scheduler


def vllm_round(blocks: int) -> Laps:
    device = VllmDevice(blocks + SPARE)
    scheduler = vllm_scheduler(device, blocks + SPARE)
    first, second = (Prompt(RequestId(name), prefix_hashes(blocks)) for name in ("first", "second"))
    tokens = first.num_computed_tokens = blocks * TOKENS_PER_BLOCK
    laps = Laps()
    handles = device.take(blocks)
    device.cache(handles, first)
    laps.start()
    scheduler.update_state_after_alloc(first, KVCacheBlocks((handles,)), 0)
    laps.stop("admit")
    planned = SchedulerOutput.make_empty()
    planned.scheduled_new_reqs = [SimpleNamespace(req_id=first.id, block_ids=device.table(handles))]
    planned.num_scheduled_tokens = {first.id: 1}
    laps.start()
    store = scheduler.build_connector_meta(planned)
    laps.stop("plan store")
    done = KVConnectorOutput(
        kv_connector_worker_meta=SimpleCPUOffloadWorkerMetadata({store.store_event: 1}),
    )
    laps.start()
    scheduler.update_connector_output(done)
    laps.stop("commit")
    scheduler.request_finished_all_groups(first, device.table(handles))
    device.forget(handles)
    laps.start()
    answer = scheduler.get_num_new_matched_tokens(second, 0)
    laps.stop("match")
    expect(answer == (tokens, True), f"vLLM's match is {answer}, not {tokens} tokens")
    handles = device.take(blocks)
    idle = SchedulerOutput.make_empty()
    laps.start()
    scheduler.update_state_after_alloc(second, KVCacheBlocks((handles,)), tokens)
    load = scheduler.build_connector_meta(idle)
    laps.stop("plan load")
    done = KVConnectorOutput(finished_recving={second.id})
    laps.start()
    scheduler.update_connector_output(done)
    laps.stop("finish load")
    expect(len(store.store_gpu_blocks) == len(load.load_gpu_blocks) == blocks, "vLLM's copies are missing")
    expect(load.load_cpu_blocks == store.store_cpu_blocks, "vLLM does not load what it stored")
    expect(load.load_gpu_blocks == device.table(handles)[0], "vLLM does not load into the blocks of the request")
    expect(all(each.ref_cnt == 1 for each in handles), "vLLM still holds device blocks")
    free = scheduler.cpu_block_pool.get_num_free_blocks()
    expect(free == blocks + SPARE - 1 and not scheduler.has_pending_stores(), "vLLM still holds host blocks")
    return laps
