"""vLLM's BlockPool as the core's device pool, and the host pool as callers of vLLM's class read it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from forebay.ids import BlockId, Key, group_suffix
from forebay.pool import HostPool

_GROUP_BYTES = 4


class BlockPoolDevice:
    """Implements forebay.engine.DevicePool.

    vLLM gives a block its hash when it is allocated, before the step that computes it. Orders are carried out
    after that step's forward pass, so by then whatever has a hash has its content.
    """

    def __init__(self, pool: BlockPool, group_ids: Sequence[int], bytes_per_hash: int) -> None:
        self._pool = pool
        self._hash = bytes_per_hash
        ours = [group_suffix(number) for number in range(len(group_ids))]
        theirs = [number.to_bytes(_GROUP_BYTES, "big") for number in group_ids]
        self._theirs = dict(zip(ours, theirs, strict=True))
        self._ours = dict(zip(theirs, ours, strict=True))
        self.num_blocks: int = pool.num_gpu_blocks
        self.null_block = BlockId(pool.null_block.block_id)
        self._place: dict[BlockId, int] = {}  # in the eviction order, of blocks that were seen near its head
        self._last_place = 0
        self._waiting: set[BlockId] = set()  # pinned out of the eviction order, and nobody used them since
        self._known: dict[bytes | None, Key | None] = {}  # by vLLM's name, of blocks that were seen near the head

    @property
    def num_free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def pin(self, blocks: Sequence[BlockId]) -> None:
        chosen = self._get(blocks)
        if self._place:
            self._waiting.update(
                block
                for block, each in zip(blocks, chosen, strict=True)
                if not each.ref_cnt and block in self._place
            )
        self._pool.touch(chosen)

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> int:
        chosen = self._get(blocks)
        self._pool.free_blocks(chosen)
        if not self._waiting:
            return 0
        returning = [each for each in chosen if each.block_id in self._waiting and not each.ref_cnt]
        self._waiting.difference_update(
            block for block, each in zip(blocks, chosen, strict=True) if not each.ref_cnt
        )
        if not in_place or not returning:
            return 0
        self._put_back(returning)
        return len(returning)

    def keys_of(self, blocks: Sequence[BlockId]) -> list[Key | None]:
        return [self._key(each.block_hash) for each in self._get(blocks)]

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        find, run = self._pool.cached_block_hash_to_block.get_one_block, []
        for key in keys[start:stop]:
            block = find(key[: self._hash] + self._theirs[key[self._hash :]])
            if block is None:
                break
            run.append(BlockId(block.block_id))
        return run

    def next_evictions(self, count: int) -> tuple[list[BlockId], list[Key | None]]:
        # In many steps, and mostly the same blocks: so their keys are kept, and nothing is called for each.
        head: list[KVCacheBlock] = list(islice(self._pool.free_block_queue.iter_blocks_after(None), count))
        blocks = cast("list[BlockId]", [each.block_id for each in head])
        names: list[bytes | None] = [each.block_hash for each in head]
        self._number(blocks, names)
        if len(self._known) > 2 * self.num_blocks:
            self._known = {}
        known = self._known
        try:
            return blocks, list(map(known.__getitem__, names))
        except KeyError:  # some are new here
            known.update((name, self._key(name)) for name in set(names).difference(known))
            return blocks, list(map(known.__getitem__, names))

    def used(self, blocks: Iterable[BlockId]) -> None:
        """A request was given these blocks: they have lost their place in the eviction order."""
        seen = self._place.keys() & blocks
        for block in seen:
            del self._place[block]
        self._waiting -= seen

    def _get(self, blocks: Iterable[BlockId]) -> list[KVCacheBlock]:
        return list(map(self._pool.blocks.__getitem__, blocks))

    def _key(self, name: bytes | None) -> Key | None:
        if name is None:
            return None
        suffix = self._ours.get(name[self._hash :])
        return None if suffix is None else Key(name[: self._hash] + suffix)

    def _number(self, blocks: Iterable[BlockId], names: Iterable[bytes | None]) -> None:
        """Note the order of the blocks at the head. Whatever comes later into the order gets a higher number."""
        place = self._place
        for block, name in zip(blocks, names, strict=True):
            if block not in place and name is not None:
                self._last_place += 1
                place[block] = self._last_place

    def _put_back(self, returning: list[KVCacheBlock]) -> None:
        """They are at the tail of the queue now. Put them back behind those that stood before them."""
        queue, place = self._pool.free_block_queue, self._place
        for block in returning:
            queue.remove(block)
        last = max(place[BlockId(block.block_id)] for block in returning)
        ahead: list[KVCacheBlock] = []
        for block in queue.iter_blocks_after(None):
            # A block without a key has nothing to lose and stays in front. One that was never seen near the head
            # has come in behind all of these.
            if place.get(BlockId(block.block_id), -1 if block.block_hash is None else last + 1) > last:
                break
            ahead.append(block)
        queue.popleft_n(len(ahead))
        merged = sorted(ahead + returning, key=lambda block: place.get(BlockId(block.block_id), -1))
        queue.prepend_n(merged)


class CpuBlockPool:
    """The part of vLLM's BlockPool that callers read of the host pool."""

    def __init__(self, pool: HostPool) -> None:
        self._pool = pool

    def get_num_free_blocks(self) -> int:
        """Slots that could be taken now: empty ones, and cached ones that nobody uses."""
        return self._pool.ready - self._pool.pinned - self._pool.filling
