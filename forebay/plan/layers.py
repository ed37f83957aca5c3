"""What each layer of a model keeps for a prompt, by the model's `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from forebay.amounts import counted
from forebay.errors import is_whole

Config = Mapping[str, Any]

CACHE_DTYPES: Mapping[str, int] = {
    "auto": 2,  # vLLM's default for models of 16 and of 32 bits
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of a number in the KV cache, by vLLM's `--kv-cache-dtype`."""


class UnclearModelError(Exception):
    """What a config.json does not say, or says in a way that is not understood."""


class UnevenError(Exception):
    """Which numbers of ranks the model can be spread over: the one that was asked for is none of them."""


class Kind(Enum):
    FULL = "full attention"  # all tokens
    WINDOW = "sliding window"  # the last so many
    CHUNK = "chunked local attention"  # those of the current chunk
    STATE = "recurrent state"  # none, but one state


class Layer(NamedTuple):
    """On one rank. Layers that are equal are kept alike."""

    kind: Kind
    bytes_per_token: int
    """0 for a state."""
    reach_tokens: int | None = None
    """How far a window or a chunk goes."""
    state_bytes: int = 0


class Ranks(NamedTuple):
    """How the model is spread, and what its numbers take."""

    tensor_parallel: int
    number_bytes: int
    """Of keys and values."""
    state_number_bytes: int
    """Of convolutions in states; those of the state itself may have more."""


# Every layer is full attention, unless the config says otherwise in the usual fields.
_PLAIN = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "olmo2", "granite"),
    *("glm4", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "gemma", "cohere", "starcoder2", "stablelm"),
)
# What transformers takes where a config.json says nothing, and files of these models often do not.
_DEFAULTS: Mapping[str, Config] = {
    "gemma2": {"sliding_window": 4096, "sliding_window_pattern": 2, "head_dim": 256},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "gemma4_text": {"sliding_window": 512, "sliding_window_pattern": 6, "head_dim": 256},
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "gpt_oss": {"sliding_window": 128, "sliding_window_pattern": 2, "head_dim": 64},
    "llama4_text": {"attention_chunk_size": 8192, "head_dim": 128},
    "qwen2": {"use_sliding_window": False},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {"full_attention_interval": 4, "head_dim": 256},
}
_WINDOWED = ("gemma2", "gemma3_text", "gemma4_text", "cohere2", "gpt_oss")
_SEES_MORE = {"cohere2": 1}  # its window does not count the token itself
_NO_ROPE_INTERVAL = 4
# Where one of these is set, layers differ, in a way of that type's own.
_OTHERWISE = (
    *("sliding_window_pattern", "full_attention_interval", "attention_chunk_size", "hybrid_override_pattern"),
    *("attn_layer_indices", "attn_layer_period", "attn_type_list", "linear_attn_config", "mamba_d_state"),
    *("ssm_state_size", "compress_ratios", "interleaved_sliding_window"),
)
# Where one of these is set, heads of keys and values are counted in a way of that type's own.
_OTHER_HEADS = ("multi_query_group_num", "block_configs", "attn_config")
_ENCODERS = ("bert", "electra", "mpnet")  # within the name of a type: roberta and modernbert too
_MOST_LAYERS = 100_000


def text_config(config: Config) -> Config:
    """Of a model that also sees or hears: the part that keeps KV."""
    for field in ("text_config", "llm_config", "language_config"):
        inner = config.get(field)
        if isinstance(inner, Mapping):
            return inner
    return config


def is_known(config: Config) -> bool:
    """Whether this type of model was looked at, and not only has the usual fields."""
    kind = _type(config)
    return kind in _PLAIN or kind in _DEFAULTS or kind in _STATES_OF_TYPES


def layers_of(config: Config, ranks: Ranks) -> list[Layer]:
    """In the model's order. Raises UnclearModelError and UnevenError."""
    config = {
        **_DEFAULTS.get(_type(config), {}),
        **{key: value for key, value in config.items() if value is not None},
    }
    if config.get("index_topk"):
        raise UnclearModelError("sparse attention with an index of its own is not counted")
    if unclear := [field for field in _OTHER_HEADS if config.get(field)]:
        raise UnclearModelError(f"{unclear[0]} of {_type(config) or 'this model'} is not understood")
    if config.get("is_encoder_decoder") or _is_encoder(config):
        raise UnclearModelError(f"{_type(config) or 'this model'} is an encoder, or has one")
    shared = config.get("num_kv_shared_layers") or 0  # the last so many read what layers before them keep
    kinds = [*_kinds(config)]
    if not is_whole(shared) or not 0 <= shared < len(kinds):
        raise UnclearModelError(f"num_kv_shared_layers is {shared!r}")
    return [_layer(kind, config, ranks) for kind in kinds[: len(kinds) - shared]]


def _type(config: Config) -> str:
    kind = str(config.get("model_type", ""))
    return {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "llama4": "llama4_text"}.get(kind, kind)


def _is_encoder(config: Config) -> bool:
    return any(each in _type(config) for each in _ENCODERS) and not config.get("is_decoder")


def _kinds(config: Config) -> Iterator[str]:
    """What each layer is, in the words of `layer_types`."""
    layers = whole(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    if layers > _MOST_LAYERS:
        raise UnclearModelError(f"{layers:,} layers")
    kind, all_layers = _type(config), counted(layers, "layer")
    given = config.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != layers:
            raise UnclearModelError(f"layer_types does not have a kind for each of {all_layers}")
        yield from map(str, given)
    elif kind == "llama4_text":
        no_rope = config.get("no_rope_layers") or [
            (number + 1) % _NO_ROPE_INTERVAL for number in range(layers)
        ]  # 0: none, and all tokens are seen
        if not isinstance(no_rope, list) or len(no_rope) != layers:
            raise UnclearModelError(f"no_rope_layers does not have a number for each of {all_layers}")
        yield from ("chunked_attention" if each else "full_attention" for each in no_rope)
    elif kind == "qwen3_next":
        yield from _every(whole(config, "full_attention_interval"), layers, "linear_attention")
    elif kind in _WINDOWED:
        yield from _every(whole(config, "sliding_window_pattern"), layers, "sliding_attention")
    elif kind in _STATES_OF_TYPES:
        raise UnclearModelError("layer_types is missing")
    elif unclear := [field for field in _OTHERWISE if config.get(field)]:
        raise UnclearModelError(f"{unclear[0]} of {kind or 'this model'} is not understood")
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        yield from ["sliding_attention"] * layers
    else:
        yield from ["full_attention"] * layers


def _every(interval: int, layers: int, others: str) -> Iterator[str]:
    """Each so many-th layer sees everything."""
    for number in range(1, layers + 1):
        yield others if number % interval else "full_attention"


def _layer(kind: str, config: Config, ranks: Ranks) -> Layer:
    match kind:
        case "full_attention" | "attention":
            return Layer(Kind.FULL, _bytes_per_token(config, ranks, sees_all=True))
        case "sliding_attention":
            window = whole(config, "sliding_window") + _SEES_MORE.get(_type(config), 0)
            return Layer(Kind.WINDOW, _bytes_per_token(config, ranks, sees_all=False), window)
        case "chunked_attention":
            chunk = whole(config, "attention_chunk_size")
            return Layer(Kind.CHUNK, _bytes_per_token(config, ranks, sees_all=False), chunk)
    state = _STATES.get(kind)
    if state is None:
        raise UnclearModelError(f"layers of the kind {kind!r} are not counted")
    return Layer(Kind.STATE, 0, None, state(config, ranks))


def _bytes_per_token(config: Config, ranks: Ranks, *, sees_all: bool) -> int:
    if "kv_lora_rank" in config:  # MLA: every rank has all of it
        return (whole(config, "kv_lora_rank") + whole(config, "qk_rope_head_dim")) * ranks.number_bytes
    heads = whole(config, "num_attention_heads", "n_head", "n_heads")
    width = config.get("head_dim")
    kv_heads = config.get("num_key_value_heads") or config.get("num_kv_heads") or heads
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = 1  # the newer falcons say so too, and have several
    if sees_all and _type(config) == "gemma4_text":
        width = config.get("global_head_dim") or width
        kv_heads = config.get("num_global_key_value_heads") or kv_heads
    if width is None:
        width = whole(config, "hidden_size", "n_embd", "d_model") // heads
    if not is_whole(width) or not is_whole(kv_heads) or width < 1 or kv_heads < 1:
        raise UnclearModelError("heads of keys and values do not have a size")
    parallel = ranks.tensor_parallel
    if kv_heads % parallel and parallel % kv_heads:
        raise UnevenError(f"a divisor or a multiple of the model's {counted(kv_heads, 'head')} of keys and values")
    # With more ranks than heads, several ranks have the same one.
    return 2 * max(1, kv_heads // parallel) * width * ranks.number_bytes


# --- states ---------------------------------------------------------------------------------------------


def _mamba2(config: Config, ranks: Ranks) -> int:
    heads, width = whole(config, "mamba_n_heads"), whole(config, "mamba_d_head")
    groups, size = whole(config, "mamba_n_groups"), whole(config, "mamba_d_state")
    if groups % ranks.tensor_parallel:
        groups = ranks.tensor_parallel  # each rank has the group that its heads need
    mixed = heads * width + 2 * groups * size
    return _state(config, ranks, mixed, whole(config, "mamba_d_conv"), heads * width * size)


def _gated_delta_net(config: Config, ranks: Ranks) -> int:
    keys = whole(config, "linear_num_key_heads") * whole(config, "linear_key_head_dim")
    values = whole(config, "linear_num_value_heads") * whole(config, "linear_value_head_dim")
    kernel = whole(config, "linear_conv_kernel_dim")
    return _state(config, ranks, 2 * keys + values, kernel, values * whole(config, "linear_key_head_dim"))


def _short_convolution(config: Config, ranks: Ranks) -> int:
    return _state(config, ranks, whole(config, "conv_dim", "hidden_size"), whole(config, "conv_L_cache"), 0)


def _state(config: Config, ranks: Ranks, mixed: int, kernel: int, remembered: int) -> int:
    """The last inputs of a convolution over `mixed` numbers, and so many numbers beside."""
    if mixed % ranks.tensor_parallel or remembered % ranks.tensor_parallel:
        raise UnevenError("so many ranks that the states of the model come out even")
    number_bytes = CACHE_DTYPES.get(str(config.get("mamba_ssm_dtype")), ranks.state_number_bytes)
    total = mixed * (kernel - 1) * ranks.state_number_bytes + remembered * number_bytes
    return total // ranks.tensor_parallel


_STATES: Mapping[str, Callable[[Config, Ranks], int]] = {
    "mamba": _mamba2,
    "linear_attention": _gated_delta_net,
    "conv": _short_convolution,
}
_STATES_OF_TYPES = ("granitemoehybrid", "qwen3_next", "lfm2")


def whole(config: Config, *fields: str) -> int:
    """The first of these fields that is there."""
    for field in fields:
        value = config.get(field)
        if value is not None:
            if not is_whole(value) or value < 1:
                raise UnclearModelError(f"{field} is {value!r}")
            return value
    raise UnclearModelError(f"{fields[0]} is missing")
