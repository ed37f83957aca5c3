"""A vLLM model's KV cache in the core's words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from forebay.errors import LayoutError
from forebay.groups import ChunkedLocal, FullAttention, Recurrent, SlidingWindow
from tests.vllm.driving import BLOCK, chunked, full, kv_cache_config, mamba, vllm_config, window


def _layout(specs: list[Any], **settings: Any) -> Any:
    from forebay.vllm.layout import EngineLayout

    return EngineLayout.of(vllm_config(**settings), kv_cache_config(specs, 64), 64, BLOCK)


def test_every_kind_of_group_has_its_counterpart() -> None:
    layout = _layout([full(), window(40, 32), chunked(64), mamba(64)])
    assert layout.kv.groups == (
        FullAttention(16),
        SlidingWindow(32, window_tokens=40),
        ChunkedLocal(16, chunk_tokens=64),
        Recurrent(64),
    )
    assert layout.group_ids == (0, 1, 2, 3)
    assert (layout.kv.tokens_per_hash, layout.kv.bytes_per_block, layout.kv.bytes_per_hash) == (BLOCK, 1024, 32)


def test_layers_that_differ_in_size_only_count_as_one_kind() -> None:
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    specs = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": window(40), "b": window(40)})
    assert _layout([specs]).kv.groups == (SlidingWindow(16, window_tokens=40),)


def test_groups_that_vllm_does_not_cache_are_left_out() -> None:
    from vllm.v1.kv_cache_interface import HiSparseHotSpec

    class Uncached(HiSparseHotSpec):  # type: ignore[misc]
        def __init__(self) -> None:
            object.__setattr__(self, "block_size", 16)

    config = kv_cache_config([full(), full(), window(40)], 64)
    config.kv_cache_groups[1].kv_cache_spec = Uncached()
    from forebay.vllm.layout import EngineLayout

    layout = EngineLayout.of(vllm_config(), config, 16, 16)
    assert layout.kv.groups == (FullAttention(16), SlidingWindow(16, window_tokens=40))
    assert layout.group_ids == (0, 2)


def test_a_group_whose_blocks_are_on_the_host_already_is_refused() -> None:
    """HiSparse: its block numbers are those of another pool, and mean other blocks in the device's."""
    from forebay.vllm.layout import EngineLayout

    config = kv_cache_config([full(), full()], 64)
    config.kv_cache_groups[1].host_resident = True
    with pytest.raises(LayoutError, match=r"kv_cache_groups\[1\]: expected blocks on the device"):
        EngineLayout.of(vllm_config(), config, 16, 16)


def test_a_kind_nobody_knows_is_refused_with_one_line() -> None:
    import torch
    from vllm.v1.kv_cache_interface import CrossAttentionSpec

    spec = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    with pytest.raises(
        LayoutError, match=r"kv_cache_groups\[1\]: expected full attention, .* got 'CrossAttention"
    ):
        _layout([full(), spec])


def test_drafters_are_those_that_vllm_drops_a_block_for() -> None:
    speculative = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: True)
    assert [group.drafter for group in _layout([full(), mamba()], speculative_config=speculative).kv.groups] == [
        True,
        False,  # drafters have no recurrent layers
    ]
    config = kv_cache_config([full(), window(40)], 64)
    config.kv_cache_groups[1].is_eagle_group = True
    from forebay.vllm.layout import EngineLayout

    layout = EngineLayout.of(vllm_config(speculative_config=speculative), config, 16, 16)
    assert [group.drafter for group in layout.kv.groups] == [False, True]
    kept = SimpleNamespace(use_eagle=lambda: True, use_eagle_block_drop=lambda: False)
    assert not _layout([full()], speculative_config=kept).kv.groups[0].drafter


def test_context_parallel_ranks_share_the_tokens_of_full_attention() -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=4, world_size=4, rank=0)
    assert _layout([full()], parallel_config=parallel).kv.groups == (FullAttention(16, 4),)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_hashes_have_the_length_that_vllm_gives_them(algorithm: str) -> None:
    from vllm.utils.hashing import get_hash_fn_by_name

    from forebay.vllm import compat

    config = vllm_config(cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm))
    one_block = get_hash_fn_by_name(algorithm)((b"parent", (1, 2, 3), None))
    assert compat.hash_bytes(config) == len(one_block)
