"""vLLM's block pool behind the core's contract."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.vllm.driving import BLOCK, HandRequest


class Order:
    """What the eviction order should be: a list in which pinned blocks keep their places."""

    def __init__(self, pool: Any) -> None:
        self.blocks: list[int] = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        self.pinned: set[int] = set()

    @property
    def seen(self) -> list[int]:
        return [block for block in self.blocks if block not in self.pinned]


def _device(blocks: int) -> tuple[Any, Any]:
    from vllm.v1.core.block_pool import BlockPool

    from forebay.vllm.device import BlockPoolDevice

    pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK)
    return pool, BlockPoolDevice(pool, [0], 32)


@pytest.mark.parametrize("seed", range(60))
def test_blocks_that_were_stored_lazily_go_back_to_their_places(seed: int) -> None:
    rng = Random(seed)
    pool, device = _device(rng.randint(8, 40))
    order = Order(pool)
    held: list[list[Any]] = []  # blocks of requests
    pins: list[list[int]] = []
    for number in range(200):
        match rng.choice(["take", "free", "pin", "pin", "unpin", "hit"]):
            case "take":
                count = rng.randint(1, 4)
                if count <= pool.get_num_free_blocks():
                    blocks = pool.get_new_blocks(count)
                    device.used([block.block_id for block in blocks])
                    if rng.random() < 0.8:
                        request = HandRequest(
                            f"{number}", list(range(number * 1000, number * 1000 + count * BLOCK))
                        )
                        pool.cache_full_blocks(request, blocks, 0, count, BLOCK, 0)
                    for block in blocks:
                        order.blocks.remove(block.block_id)
                    held.append(blocks)
            case "free" if held:
                blocks = held.pop(rng.randrange(len(held)))
                pool.free_blocks(reversed(blocks))
                gone = [each for each in reversed(blocks) if not each.ref_cnt]
                order.blocks[:0] = [each.block_id for each in gone if each.block_hash is None]
                order.blocks += [each.block_id for each in gone if each.block_hash is not None]
            case "pin":
                blocks, keys = device.next_evictions(rng.randint(1, 12))
                assert blocks == order.seen[: len(blocks)]
                assert keys == device.keys_of(blocks)
                chosen = [block for block, key in zip(blocks, keys, strict=True) if key and rng.random() < 0.6]
                if chosen:
                    device.pin(chosen)
                    order.pinned.update(chosen)
                    pins.append(chosen)
            case "unpin" if pins:
                blocks = pins.pop(rng.randrange(len(pins)))
                device.unpin(blocks[::-1], in_place=True)
                for block in blocks[::-1]:
                    order.pinned.discard(block)
                    if block not in order.blocks and not pool.blocks[block].ref_cnt:
                        order.blocks.append(block)  # somebody used it meanwhile
            case "hit":
                cached = [block for block in pool.blocks[1:] if block.block_hash is not None]
                if cached:
                    block = rng.choice(cached)
                    pool.touch([block])
                    device.used([block.block_id])
                    if block.block_id in order.blocks:
                        order.blocks.remove(block.block_id)
                    held.append([block])
        assert [block.block_id for block in pool.free_block_queue.get_all_free_blocks()] == order.seen
    for blocks in pins:
        device.unpin(blocks, in_place=True)
    for blocks in held:
        pool.free_blocks(blocks)
    assert device.num_free == pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks[1:])


def test_keys_leave_out_the_number_of_the_first_group_and_know_the_others() -> None:
    from vllm.v1.core.block_pool import BlockPool

    from forebay.ids import make_key
    from forebay.vllm.device import BlockPoolDevice

    pool = BlockPool(16, enable_caching=True, hash_block_size=BLOCK)
    device = BlockPoolDevice(pool, [0, 2], 32)  # the engine's group 1 is not cached by prefix
    request = HandRequest("one", list(range(2 * BLOCK)))
    blocks = pool.get_new_blocks(6)
    for group in range(3):
        pool.cache_full_blocks(request, blocks[2 * group : 2 * group + 2], 0, 2, BLOCK, group)
    first, last = request.block_hashes
    ids = [block.block_id for block in blocks]
    expected = [make_key(first, 0), make_key(last, 0), None, None, make_key(first, 1), make_key(last, 1)]
    assert device.keys_of(ids) == expected
    assert device.find_run([make_key(first, 0), make_key(last, 0)], 0, 2) == ids[:2]
    assert device.find_run([make_key(first, 1), make_key(last, 1)], 0, 2) == ids[4:]
    assert device.find_run([make_key(first, 1), make_key(b"\0" * 32, 1), make_key(last, 1)], 0, 3) == ids[4:5]
    assert device.keys_of([device.null_block]) == [None]
    pool.free_blocks(blocks)
    for _ in range(2):
        queued, keys = device.next_evictions(16)
        assert keys == device.keys_of(queued)
        assert keys[-6:] == expected


def test_two_blocks_of_one_content_have_its_key() -> None:
    pool, device = _device(16)
    for name in "ab":
        blocks = pool.get_new_blocks(2)
        pool.cache_full_blocks(HandRequest(name, list(range(2 * BLOCK))), blocks, 0, 2, BLOCK, 0)
        pool.free_blocks(blocks)
    for _ in range(2):
        queued, keys = device.next_evictions(16)
        assert keys == device.keys_of(queued)
        assert [keys.count(key) for key in keys if key is not None] == [2, 2, 2, 2]


def test_keys_of_blocks_that_are_gone_are_not_kept_for_good() -> None:
    pool, device = _device(16)
    for number in range(100):
        blocks = pool.get_new_blocks(2)
        tokens = list(range(number * 1000, number * 1000 + 2 * BLOCK))
        pool.cache_full_blocks(HandRequest(f"{number}", tokens), blocks, 0, 2, BLOCK, 0)
        pool.free_blocks(blocks)
        queued, keys = device.next_evictions(16)
        assert keys == device.keys_of(queued)
    assert len(device._known) <= 3 * 16
