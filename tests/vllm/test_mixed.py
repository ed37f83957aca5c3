"""Long mixed traffic through one engine with everything going wrong at once."""

from __future__ import annotations

import gc
import time
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pytest

import forebay
from tests.vllm.families import GEMMA2, LLAMA, Family
from tests.vllm.harness import Engine, Tokens, prompts
from tests.vllm.proof import counted_preemptions, nothing_is_left

PATIENCE_S = 240.0
CLEAR_CHOICE = 1e-3
"""A prompt is only used if none of its tokens was a closer call than this, in log-probability: batches of another
shape round differently, and a tie may then go the other way whatever the cache does."""


KNOWN: dict[str, list[tuple[Tokens, int, Tokens]]] = {}  # by family: prompts, how many tokens to say, and which


def _own_bytes() -> int:
    """What Forebay's own lines have allocated and not freed. The engine around it grows for a while anyway."""
    gc.collect()
    own = tracemalloc.take_snapshot().filter_traces(
        [tracemalloc.Filter(True, f"{Path(forebay.__file__).parent}/*")]
    )
    return sum(each.size for each in own.statistics("filename"))


def _conversations(rng: Random, count: int) -> list[tuple[Tokens, int]]:
    """Prompts of which many continue others, and how many tokens to say to each."""
    asked: list[tuple[Tokens, int]] = []
    for seed in range(count):
        [prompt] = prompts(1, rng.randint(40, 200), seed=1000 + seed)
        for turn in range(rng.randint(1, 4)):
            asked.append((prompt, rng.randint(2, 40)))
            [more] = prompts(1, rng.randint(20, 100), seed=2000 + 10 * seed + turn)
            prompt = prompt + more
    return asked


def _reference(family: Family, asked: list[tuple[Tokens, int]]) -> list[tuple[Tokens, int, Tokens]]:
    """What a vLLM without Forebay says, of those prompts where it had no doubt."""
    clear = []
    with Engine(family, num_gpu_blocks_override=512) as engine:
        ids = [engine.submit(prompt, most, logprobs=2) for prompt, most in asked]
        engine.run()
        for (prompt, most), each in zip(asked, ids, strict=True):
            chances = [
                sorted((chance.logprob for chance in position.values()), reverse=True)
                for position in engine.outputs[each].outputs[0].logprobs
            ]
            if all(best - second > CLEAR_CHOICE for best, second, *_ in chances):
                clear.append((prompt, most, engine.tokens(each)))
    assert len(clear) > len(asked) / 2
    return clear


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("family", "lazy", "count"), [(LLAMA, False, 1000), (LLAMA, True, 300), (GEMMA2, True, 1200)], ids=str
)
def test_mixed_traffic_with_failing_copies_preemptions_and_aborts(family: Family, lazy: bool, count: int) -> None:
    rng = Random(7)
    if family.name not in KNOWN:
        KNOWN[family.name] = _reference(family, _conversations(Random(7), 60))
    known = KNOWN[family.name]
    offload: dict[str, Any] = {
        "cpu_bytes_to_use": "12MB",
        "lazy_offload": lazy,
        "inject_faults": {"fail_chance": 0.05, "delay_polls": 2, "seed": 11},
    }
    blocks = 40 if family is LLAMA else 90
    with (
        Engine(family, offload, num_gpu_blocks_override=blocks, max_num_batched_tokens=256) as engine,
        counted_preemptions(engine) as preemptions,
    ):
        running: dict[str, Tokens] = {}
        submitted = finished = aborted = 0
        own: list[int] = []
        tracemalloc.start()
        deadline = time.monotonic() + PATIENCE_S
        while submitted < count or running:
            assert time.monotonic() < deadline, f"{len(running)} requests hang"
            while submitted < count and len(running) < 12:
                prompt, most, said = rng.choice(known)
                running[engine.submit(prompt, most)] = said
                submitted += 1
                if submitted in (count // 2, count):
                    own.append(_own_bytes())
            if running and rng.random() < 0.02:
                each = rng.choice(list(running))
                engine.abort(each)
                del running[each]
                aborted += 1
            for output in engine.step():
                if output.finished and output.request_id in running:
                    assert engine.tokens(output.request_id) == running.pop(output.request_id)
                    del engine.outputs[output.request_id]  # the harness keeps them, and memory is looked at here
                    finished += 1
            if rng.random() < 0.02:
                engine.manager.check()
        nothing_is_left(engine)
        stats = engine.manager.stats
        assert finished + aborted == count
        assert aborted > count / 50
        assert preemptions
        assert stats.loaded_blocks
        assert stats.load_failures
        assert stats.store_failures
        assert stats.recomputes
        assert own[1] < 1.1 * own[0] + 50_000, f"{own} bytes when half of the requests were in, and at the end"
        tracemalloc.stop()
