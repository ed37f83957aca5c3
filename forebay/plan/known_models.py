"""Models by name: the fields of their public config.json that say what the KV cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _gqa(model_type: str, layers: int, heads: int, kv_heads: int, head_dim: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        **more,
    }


def _mla(model_type: str, layers: int) -> dict[str, Any]:
    return {"model_type": model_type, "num_hidden_layers": layers, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def _mamba2(layers: int, attention: tuple[int, ...], heads: int) -> dict[str, Any]:
    kinds = ["attention" if number in attention else "mamba" for number in range(layers)]
    state = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1}
    return {"layer_types": kinds, "mamba_n_heads": heads, **state}


_DELTA_NET = {
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_EVERY_TENTH = (5, 15, 25, 35)

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _gqa("llama", 32, 32, 8, 128),
    "llama-3.1-70b": _gqa("llama", 80, 64, 8, 128),
    "llama-3.1-405b": _gqa("llama", 126, 128, 8, 128),
    "llama-3.2-1b": _gqa("llama", 16, 32, 8, 64),
    "llama-3.2-3b": _gqa("llama", 28, 24, 8, 128),
    "llama-3.3-70b": _gqa("llama", 80, 64, 8, 128),
    "llama-4-scout-17b-16e": _gqa("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192),
    "llama-4-maverick-17b-128e": _gqa("llama4_text", 48, 40, 8, 128, attention_chunk_size=8192),
    "qwen2.5-0.5b": _gqa("qwen2", 24, 14, 2, 64),
    "qwen2.5-1.5b": _gqa("qwen2", 28, 12, 2, 128),
    "qwen2.5-3b": _gqa("qwen2", 36, 16, 2, 128),
    "qwen2.5-7b": _gqa("qwen2", 28, 28, 4, 128),
    "qwen2.5-14b": _gqa("qwen2", 48, 40, 8, 128),
    "qwen2.5-32b": _gqa("qwen2", 64, 40, 8, 128),
    "qwen2.5-72b": _gqa("qwen2", 80, 64, 8, 128),
    "qwen2.5-coder-32b": _gqa("qwen2", 64, 40, 8, 128),
    "qwen3-0.6b": _gqa("qwen3", 28, 16, 8, 128),
    "qwen3-1.7b": _gqa("qwen3", 28, 16, 8, 128),
    "qwen3-4b": _gqa("qwen3", 36, 32, 8, 128),
    "qwen3-8b": _gqa("qwen3", 36, 32, 8, 128),
    "qwen3-14b": _gqa("qwen3", 40, 40, 8, 128),
    "qwen3-32b": _gqa("qwen3", 64, 64, 8, 128),
    "qwen3-30b-a3b": _gqa("qwen3_moe", 48, 32, 4, 128),
    "qwen3-235b-a22b": _gqa("qwen3_moe", 94, 64, 4, 128),
    "qwen3-coder-480b-a35b": _gqa("qwen3_moe", 62, 96, 8, 128),
    "qwen3-next-80b-a3b": _gqa("qwen3_next", 48, 16, 2, 256, **_DELTA_NET),
    "mistral-7b-v0.1": _gqa("mistral", 32, 32, 8, 128, sliding_window=4096),
    "mistral-7b-v0.3": _gqa("mistral", 32, 32, 8, 128),
    "mistral-nemo-2407": _gqa("mistral", 40, 32, 8, 128),
    "mistral-small-24b-2501": _gqa("mistral", 40, 32, 8, 128),
    "mixtral-8x7b-v0.1": _gqa("mixtral", 32, 32, 8, 128),
    "gemma-2-9b": _gqa("gemma2", 42, 16, 8, 256, sliding_window=4096),
    "gemma-2-27b": _gqa("gemma2", 46, 32, 16, 128, sliding_window=4096),
    "gemma-3-1b": _gqa("gemma3_text", 26, 4, 1, 256, sliding_window=512),
    "gemma-3-4b": _gqa("gemma3_text", 34, 8, 4, 256, sliding_window=1024),
    "gemma-3-12b": _gqa("gemma3_text", 48, 16, 8, 256, sliding_window=1024),
    "gemma-3-27b": _gqa("gemma3_text", 62, 32, 16, 128, sliding_window=1024),
    "gpt-oss-20b": _gqa("gpt_oss", 24, 64, 8, 64, sliding_window=128),
    "gpt-oss-120b": _gqa("gpt_oss", 36, 64, 8, 64, sliding_window=128),
    "phi-4": _gqa("phi3", 40, 40, 10, 128),
    "glm-4.5": _gqa("glm4_moe", 92, 96, 8, 128),
    "glm-4.5-air": _gqa("glm4_moe", 46, 96, 8, 128),
    "deepseek-v2-lite": _mla("deepseek_v2", 27),
    "deepseek-v3": _mla("deepseek_v3", 61),
    "deepseek-r1": _mla("deepseek_v3", 61),
    "kimi-k2": _mla("kimi_k2", 61),
    "granite-4.0-h-micro": _gqa("granitemoehybrid", 40, 32, 8, 64, **_mamba2(40, _EVERY_TENTH, 64)),
    "granite-4.0-h-tiny": _gqa("granitemoehybrid", 40, 12, 4, 128, **_mamba2(40, _EVERY_TENTH, 48)),
    "granite-4.0-h-small": _gqa("granitemoehybrid", 40, 32, 8, 128, **_mamba2(40, _EVERY_TENTH, 128)),
}
