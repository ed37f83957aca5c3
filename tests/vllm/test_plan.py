"""The planner's replay is what a real vLLM does with the same requests, one at a time: the same cached tokens,
request by request, and the same counts of everything that Forebay did."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest import mock

import pytest

from forebay import FullAttention, KVLayout
from forebay.config import Mode
from forebay.plan.replay import Replaying, Setup
from forebay.plan.request import TraceRequest
from tests.plan.paths import Path, random_paths
from tests.vllm.families import LLAMA, VOCABULARY
from tests.vllm.harness import Engine, Tokens

BLOCK = 32
BYTES_PER_BLOCK = 4 * BLOCK * 2 * 4 * 32 * 4  # layers, tokens, K and V, heads, dim, float32
DEVICE_BLOCKS = 40
SLOTS = 70
BATCH = 128


def _prompt(path: Path, tokens: int) -> Tokens:
    blocks = (Random(block) for block in path)
    return [rng.randrange(3, VOCABULARY) for rng in blocks for _ in range(BLOCK)][:tokens]


@contextmanager
def _pace_of_the_bus(engine: Engine) -> Iterator[None]:
    """Copies end before the next step, and are reported in it."""
    step, copier = engine.step, engine.worker.worker_handler._copier

    def step_and_wait() -> Any:
        outputs = step()
        while len(copier._ended) < len(copier._unsettled):
            time.sleep(0.0005)
        return outputs

    with mock.patch.object(engine, "step", step_and_wait):
        yield


@pytest.mark.parametrize(("mode", "policy"), [(Mode.EAGER, "lru"), (Mode.LAZY, "lru"), (Mode.LAZY, "s3fifo")])
def test_replay_is_what_vllm_does(mode: Mode, policy: str) -> None:
    layout = KVLayout((FullAttention(BLOCK),), tokens_per_hash=BLOCK, bytes_per_block=BYTES_PER_BLOCK)
    replaying = Replaying(BLOCK, Setup(layout, DEVICE_BLOCKS, SLOTS, mode, policy, BATCH))
    offload = {
        "cpu_bytes_to_use": SLOTS * BYTES_PER_BLOCK,
        "lazy_offload": mode is Mode.LAZY,
        "eviction_policy": policy,
    }
    rng = Random(7)
    sizes: dict[str, Any] = {
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "max_num_batched_tokens": BATCH,
        "max_num_seqs": 1,
        "max_model_len": (DEVICE_BLOCKS - 1) * BLOCK,
    }
    with Engine(LLAMA, offload, **sizes) as engine, _pace_of_the_bus(engine):
        assert engine.manager.pool.capacity == SLOTS
        from_host = from_device = 0
        for path in random_paths(seed=11, requests=80, max_new=6, reach=20):
            tokens, output_tokens = len(path) * BLOCK - rng.randrange(BLOCK), rng.choice([1, 1, 2, 3, 5, 20, 40])
            served = replaying.serve(TraceRequest(0.0, tokens, output_tokens, path))
            if served is None:
                continue
            asked = engine.submit(_prompt(path, tokens), output_tokens)
            engine.settle()
            assert engine.outputs[asked].num_cached_tokens == sum(served)
            from_device, from_host = from_device + served.device_tokens, from_host + served.host_tokens
        assert from_device > 20 * BLOCK
        assert from_host > 20 * BLOCK
        ours, theirs = replaying.manager, engine.manager
        assert ours is not None
        for each in ("hit_tokens", "moved_blocks", "stored_blocks", "loaded_blocks", "lookups", "miss_tokens"):
            assert getattr(ours.stats, each) == getattr(theirs.stats, each), each
        assert ours.pool.evictions == theirs.pool.evictions > 0
