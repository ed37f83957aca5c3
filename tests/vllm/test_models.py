"""What the planner counts from a config.json is what vLLM makes of it."""

from __future__ import annotations

import pytest

from forebay.plan.models import model_of
from tests.vllm.families import FAMILIES, QWEN3_NEXT, Family
from tests.vllm.harness import Engine


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_groups_and_bytes_are_those_of_vllm(family: Family) -> None:
    from forebay.vllm import compat
    from forebay.vllm.layout import EngineLayout

    config = family.model | ({"mamba_ssm_dtype": "float32"} if family is QWEN3_NEXT else {})
    dtype = family.engine.get("dtype", "float32")
    counted = model_of(config, family.name, cache_dtype=dtype).layout(min(32, *family.block_tokens))
    with Engine(family) as engine:
        vllm_config, kv = engine._engine.vllm_config, engine.scheduler.kv_cache_config
        layout = EngineLayout.of(vllm_config, kv, None, None).kv
        block_bytes = compat.device_bytes(kv) // kv.num_blocks
    assert counted.groups == layout.groups
    assert counted.bytes_per_block == block_bytes
    assert counted.tokens_per_hash == layout.tokens_per_hash
