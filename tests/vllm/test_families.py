"""Every kind of KV cache that vLLM has, stored on the host and brought back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.families import FAMILIES, Family
from tests.vllm.harness import HOST_BYTES, Engine, prompts, reference_or_skip

# Steps small enough that what lazy mode keeps safe is only a part of the device.
SMALL_STEPS = {"max_num_batched_tokens": 512}


@pytest.mark.compat
@pytest.mark.parametrize("lazy", [False, True], ids=["eager", "lazy"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_what_comes_back_from_the_host_gives_the_same_tokens(family: Family, lazy: bool) -> None:
    asked = prompts(4, family.prompt_tokens)
    expected = reference_or_skip(family, asked, **SMALL_STEPS)
    offload: dict[str, Any] = {"cpu_bytes_to_use": HOST_BYTES, "lazy_offload": lazy}
    with Engine(family, offload, **SMALL_STEPS) as engine:
        assert engine.generate(asked) == expected.cold
        assert engine.cached_tokens == [0] * 4

        _lose(engine, lazy)
        assert engine.generate(asked) == expected.hit
        assert engine.cached_tokens == expected.hit_tokens
        assert engine.manager.stats.loaded_blocks > 0

        _lose(engine, lazy)
        with engine.spoilt_host(asked[1]):
            spoilt = engine.generate(asked)
        wrong = [number for number, said in enumerate(spoilt) if said != expected.hit[number]]
        assert wrong == [1]
        assert engine.cached_tokens == expected.hit_tokens

        engine.settle()
        engine.manager.check()


def _lose(engine: Engine, lazy: bool) -> None:
    """The device loses what was asked last: because it is told to, or to other prompts. Lazy mode stores nothing
    before that."""
    from forebay.vllm import compat

    if lazy:
        engine.push_out(engine.asked)
    if not lazy or compat.LOCAL_HITS_DIVERGE:
        # Such a release asks for nothing where attention blocks are left of what was pushed out, and computes it.
        engine.forget_device()
