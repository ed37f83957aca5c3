from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import ChunkedLocal, ConfigError, FullAttention, Recurrent, SlidingWindow
from forebay.plan.known_models import KNOWN_MODELS
from forebay.plan.layers import CACHE_DTYPES, Kind
from forebay.plan.models import ModelKV, load_model, model_of

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def kinds(model: ModelKV) -> list[tuple[Kind, int, int | None]]:
    return [(group.kind, group.layers, group.window_tokens) for group in model.groups]


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 131_072),
        ("llama-3.1-70b", 327_680),
        ("qwen2.5-7b", 57_344),
        ("qwen3-30b-a3b", 98_304),
        ("mistral-7b-v0.3", 131_072),
        ("deepseek-v3", 70_272),
        ("gemma-3-27b", 507_904),
        ("gpt-oss-120b", 73_728),
        ("granite-4.0-h-small", 16_384),
        ("qwen3-next-80b-a3b", 24_576),
    ],
)
def test_models_by_name(name: str, bytes_per_token: int) -> None:
    """Each counted by hand: two bytes for each number of 2 * layers * heads * width, or of 576 a layer for MLA."""
    model = load_model(name)
    assert model.bytes_per_token == model.total_bytes_per_token == bytes_per_token
    assert model.bytes_per_block(512) == 512 * bytes_per_token
    assert not model.notes


@pytest.mark.parametrize("name", KNOWN_MODELS)
@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_model_by_name_can_be_planned_with(name: str, tensor_parallel: int) -> None:
    model = load_model(name, tensor_parallel=tensor_parallel)
    layout = model.layout(16)
    assert layout.bytes_per_block > 0
    assert model.host_bytes_per_token(16) >= model.bytes_per_token


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama-3.1-8B", "llama-3.1-8b", "LLAMA-3.1-8B-Instruct"]
)
def test_names_are_taken_as_people_write_them(name: str) -> None:
    assert load_model(name).name == "llama-3.1-8b"


def test_a_config_in_a_folder_or_as_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load_model(tmp_path).bytes_per_token == 131_072
    assert load_model(tmp_path / "config.json").bytes_per_token == 131_072


@pytest.mark.parametrize(("ranks", "each"), [(1, 131_072), (2, 65_536), (8, 16_384), (16, 16_384)])
def test_ranks_share_heads_until_there_is_one_on_each(ranks: int, each: int) -> None:
    model = load_model("llama-3.1-8b", tensor_parallel=ranks)
    assert model.bytes_per_token == each
    assert model.total_bytes_per_token == each * ranks
    assert model.total_bytes_per_block(16) == 16 * each * ranks


def test_every_rank_has_all_of_mla() -> None:
    model = load_model("deepseek-v3", tensor_parallel=8)
    assert model.bytes_per_token == 70_272
    assert model.total_bytes_per_token == 8 * 70_272


@pytest.mark.parametrize(
    ("dtype", "each"),
    [("auto", 131_072), ("bfloat16", 131_072), ("fp8", 65_536), ("fp8_e4m3", 65_536), ("float32", 262_144)],
)
def test_the_cache_dtype_counts(dtype: str, each: int) -> None:
    assert load_model("llama-3.1-8b", cache_dtype=dtype).bytes_per_token == each


def test_fp8_is_for_keys_and_values_not_for_states() -> None:
    plain, small = (load_model("granite-4.0-h-small", cache_dtype=dtype) for dtype in ("auto", "fp8"))
    assert small.bytes_per_token == plain.bytes_per_token // 2
    assert [group.state_bytes for group in small.groups] == [group.state_bytes for group in plain.groups]


def test_windows_cap_what_the_device_keeps() -> None:
    model = load_model("gemma-3-27b")
    assert kinds(model) == [(Kind.WINDOW, 52, 1024), (Kind.FULL, 10, None)]
    window, full = (group.bytes_per_token for group in model.groups)
    assert model.device_bytes(1000) == 1000 * (window + full)
    assert model.device_bytes(100_000) == 1024 * window + 100_000 * full
    assert model.device_bytes(0) == 0
    layout = model.layout(16)
    assert layout.groups == (*[SlidingWindow(16, window_tokens=1024)] * 6, FullAttention(16))
    assert layout.bytes_per_block == 10 * 16 * 8192
    assert model.host_bytes_per_token(16) == 7 * 10 * 8192, "62 layers, in 7 groups of 10"


def test_states_do_not_grow() -> None:
    model = load_model("granite-4.0-h-small")
    assert kinds(model) == [(Kind.STATE, 36, None), (Kind.FULL, 4, None)]
    state = 36 * 2 * ((8192 + 2 * 128) * 3 + 8192 * 128)
    assert model.groups[0].state_bytes == state
    assert model.device_bytes(10) == 10 * 16_384 + state
    assert model.device_bytes(20) - model.device_bytes(10) == 10 * 16_384
    assert {type(group) for group in model.layout(16).groups} == {Recurrent, FullAttention}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LLAMA, [(Kind.FULL, 32, None)]),
        ({**LLAMA, "sliding_window": 4096}, [(Kind.WINDOW, 32, 4096)]),
        ({**LLAMA, "sliding_window": 4096, "use_sliding_window": False}, [(Kind.FULL, 32, None)]),
        ({**LLAMA, "model_type": "qwen2", "sliding_window": 131_072}, [(Kind.FULL, 32, None)]),
        ({**LLAMA, "model_type": "gemma2"}, [(Kind.WINDOW, 16, 4096), (Kind.FULL, 16, None)]),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024},
            [(Kind.WINDOW, 29, 1024), (Kind.FULL, 5, None)],
        ),
        (
            {**LLAMA, "sliding_window": 64, "layer_types": ["sliding_attention"] * 31 + ["full_attention"]},
            [(Kind.WINDOW, 31, 64), (Kind.FULL, 1, None)],
        ),
        ({**LLAMA, "model_type": "llama4_text"}, [(Kind.CHUNK, 24, 8192), (Kind.FULL, 8, None)]),
        ({"model_type": "mistral3", "text_config": LLAMA}, [(Kind.FULL, 32, None)]),
        ({**LLAMA, "num_kv_shared_layers": 12}, [(Kind.FULL, 20, None)]),
    ],
)
def test_kinds_of_layers(config: dict[str, Any], expected: list[tuple[Kind, int, int | None]]) -> None:
    assert kinds(model_of(config, "model")) == expected


def test_the_defaults_of_a_short_config_are_those_of_its_type() -> None:
    """As google's gemma-3-4b has it."""
    short = {"model_type": "gemma3_text", "num_hidden_layers": 34, "hidden_size": 2560, "sliding_window": 1024}
    assert model_of({"model_type": "gemma3", "text_config": short}, "x").groups == load_model("gemma-3-4b").groups


def test_chunks_are_groups_of_their_own() -> None:
    layout = load_model("llama-4-scout-17b-16e").layout(16)
    assert layout.groups == (*[ChunkedLocal(16, chunk_tokens=8192)] * 3, FullAttention(16))


def test_a_type_that_is_not_known_is_said() -> None:
    assert model_of({**LLAMA, "model_type": "newest"}, "x").notes == (
        "newest is not known: taken for what its fields say",
    )


def test_bytes_may_be_given() -> None:
    model = load_model(kv_bytes_per_token=1000, tensor_parallel=4)
    assert (model.bytes_per_token, model.total_bytes_per_token) == (250, 1000)
    assert model.layout(16).bytes_per_block == 4000
    assert load_model("anything", kv_bytes_per_token=1000).name == "anything"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lama-3.1-8b",), "model: expected a folder with a config.json, or a name such as llama-3.1-8b, "),
        ((None,), "model: expected a config.json, a name, or kv_bytes_per_token, got None"),
    ],
)
def test_models_that_cannot_be_found_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_model(*arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"layer_types": ["full_attention"]}, "layer_types does not have a kind for each of 32 layers"),
        ({"layer_types": ["hyena"] * 32}, "layers of the kind 'hyena' are not counted"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"head_dim": 0.5}, "heads of keys and values do not have a size"),
        ({"index_topk": 2048}, "sparse attention with an index of its own is not counted"),
        ({"sliding_window_pattern": "LLLG"}, "sliding_window_pattern of llama is not understood"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"},
            "hybrid_override_pattern of nemotron_h is not understood",
        ),
        ({"model_type": "granitemoehybrid"}, "layer_types is missing"),
        ({"num_kv_shared_layers": "x"}, "num_kv_shared_layers is 'x'"),
        ({"num_kv_shared_layers": 32}, "num_kv_shared_layers is 32"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1"),
        (
            {"model_type": "llama4_text", "no_rope_layers": 5},
            "no_rope_layers does not have a number for each of 32 layers",
        ),
        ({"num_hidden_layers": 10**12}, "1,000,000,000,000 layers"),
        (
            {"model_type": "chatglm", "multi_query_group_num": 2},
            "multi_query_group_num of chatglm is not understood",
        ),
        ({"model_type": "nemotron-nas", "block_configs": [{}]}, "block_configs of nemotron-nas is not understood"),
        ({"model_type": "dbrx", "attn_config": {"kv_n_heads": 8}}, "attn_config of dbrx is not understood"),
        ({"model_type": "xlm-roberta"}, "xlm-roberta is an encoder, or has one"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "t5 is an encoder, or has one"),
    ],
)
def test_configs_that_do_not_say_enough_are_named(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ConfigError) as caught:
        load_model(tmp_path)
    assert str(caught.value) == (
        f"model: expected a config.json from which the KV cache can be counted ({reason}), or kv_bytes_per_token, "
        f"got '{tmp_path}'"
    )


def test_bad_numbers_are_named(tmp_path: Path) -> None:
    for wrong, named in [
        ({"tensor_parallel": 0}, "tensor_parallel: expected a whole number of at least 1, got 0"),
        (
            {"tensor_parallel": 3},
            "a divisor or a multiple of the model's 8 heads of keys and values, got 3",
        ),
        ({"cache_dtype": "int3"}, f"cache_dtype: expected one of {', '.join(CACHE_DTYPES)}, got 'int3'"),
        ({"kv_bytes_per_token": 0}, "kv_bytes_per_token: expected a whole number of at least 1, got 0"),
    ]:
        with pytest.raises(ConfigError) as caught:
            load_model("llama-3.1-8b", **wrong)  # type: ignore[arg-type]
        assert named in str(caught.value)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"a config\.json that is a JSON object"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a config\.json that can be read"):
        load_model(tmp_path)


def test_a_config_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 100_000)
    with pytest.raises(ConfigError, match=r"a config\.json that can be read \(nested too deeply\)"):
        load_model(tmp_path)


@pytest.mark.parametrize(("newer", "heads"), [(True, 8), (False, 1)])
def test_falcons_with_one_head_of_keys_and_values_and_with_several(newer: bool, heads: int) -> None:
    """As falcon-40b and falcon-7b have it: both say multi_query."""
    falcon = {
        "model_type": "falcon",
        "num_hidden_layers": 60,
        "hidden_size": 8192,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "multi_query": True,
        "new_decoder_architecture": newer,
    }
    assert model_of(falcon, "falcon").bytes_per_token == 2 * 60 * heads * 64 * 2


FIELDS = (
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "layer_types"),
    *(
        "num_kv_shared_layers",
        "no_rope_layers",
        "sliding_window",
        "kv_lora_rank",
        "qk_rope_head_dim",
        "text_config",
    ),
    *("attention_chunk_size", "sliding_window_pattern", "full_attention_interval", "multi_query", "model_type"),
    "text_config",
)
ODD = st.none() | st.booleans() | st.integers(-2, 40) | st.floats() | st.text(max_size=3)


@given(
    st.sampled_from(["llama", "gemma2", "llama4_text", "qwen3_next", "gemma4_text", "lfm2", "odd"]),
    st.dictionaries(st.sampled_from(FIELDS), ODD | st.lists(ODD, max_size=3) | st.dictionaries(st.text(), ODD)),
)
def test_whatever_a_config_says_it_is_counted_or_named(kind: str, change: dict[str, Any]) -> None:
    try:
        model = model_of({**LLAMA, "model_type": kind, **change}, "x")
    except ConfigError as error:
        said = str(error)
    else:
        assert model.layout(16).bytes_per_block > 0
        return
    assert said.startswith("model: expected a config.json from which the KV cache can be counted")


@given(layers=st.integers(1, 40), heads=st.sampled_from([1, 2, 4, 8]), ranks=st.sampled_from([1, 2, 4, 8, 16]))
def test_no_bytes_are_lost_between_ranks(layers: int, heads: int, ranks: int) -> None:
    config = {**LLAMA, "num_hidden_layers": layers, "num_key_value_heads": heads}
    alone, spread = model_of(config, "x"), model_of(config, "x", tensor_parallel=ranks)
    assert spread.total_bytes_per_token == alone.bytes_per_token * max(1, ranks // heads)
