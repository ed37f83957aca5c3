"""Tests of the tests: what the others compare would notice wrong bytes."""

from __future__ import annotations

import pytest

from tests.vllm.families import FAMILIES, LLAMA, Family
from tests.vllm.harness import Engine, prompts, reference


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_wrong_bytes_in_any_one_group_change_the_tokens(family: Family) -> None:
    [prompt] = prompts(1, family.prompt_tokens)
    with Engine(family) as engine:
        assert engine.block_tokens == family.block_tokens
        request = engine.submit(prompt)
        blocks: list[set[int]] = [set() for _ in family.block_tokens]
        while not engine.tokens(request):
            engine.step()
            for seen, now in zip(blocks, engine.block_ids(request), strict=True):
                seen.update(now)
        engine.run()
        [right] = engine.generate([prompt])
        assert engine.cached_tokens[0] > family.prompt_tokens // 2
        for group, seen in enumerate(blocks):
            seen.discard(engine.block_pool.null_block.block_id)
            engine.spoil_device(group, seen)
            assert engine.generate([prompt]) != [right], f"group {group}"
            engine.spoil_device(group, seen)
            assert engine.generate([prompt]) == [right], f"group {group}"


def test_engines_of_one_process_say_the_same() -> None:
    asked = prompts(2)
    expected = reference(LLAMA, asked)
    assert expected.cold == expected.hit
    for _ in range(2):
        with Engine(LLAMA) as engine:
            assert engine.generate(asked) == expected.cold
            engine.forget_device()
            assert engine.generate(asked) == expected.cold
            assert engine.cached_tokens == [0, 0]
