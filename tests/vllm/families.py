"""Tiny models, one for each way in which vLLM lays out a KV cache. A config.json is all there is of each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.vllm import shims

VOCABULARY = 1024


@dataclass(frozen=True)
class Family:
    name: str
    model: dict[str, Any]
    """config.json"""
    block_tokens: tuple[int, ...]
    """Tokens to a block of each KV cache group that vLLM makes of it."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments that differ from the usual ones."""
    shim: Callable[[], AbstractContextManager[None]] | None = None
    """What vLLM lacks on a CPU; held while the engine is built."""
    prompt_tokens: int = 400
    """Several blocks, more than a window, and a rest for which every group matters: it begins within a chunk of
    local attention, and it is short where a state fades."""
    alone: bool = False
    """Whether prompts come one after the other, because here what vLLM says to one depends on which others are
    computed with it. In all other families it does not, to the last bit."""

    def __str__(self) -> str:
        return self.name


def _config(architecture: str, model_type: str, **settings: Any) -> dict[str, Any]:
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return common | settings


LLAMA = Family(
    "llama",
    _config("LlamaForCausalLM", "llama", num_key_value_heads=4),
    block_tokens=(32,),
)

MISTRAL_WINDOW = Family(
    "mistral_window",  # nothing but sliding windows
    _config("MistralForCausalLM", "mistral", sliding_window=128),
    block_tokens=(32,),
)

GEMMA2 = Family(
    "gemma2",
    _config(
        "Gemma2ForCausalLM",
        "gemma2",
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=128,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        tie_word_embeddings=True,
    ),
    block_tokens=(32, 32),
)

GEMMA4 = Family(
    "gemma4",  # pages of equal size that hold 64 tokens of a small head and 32 of a large one
    _config(
        "Gemma4ForCausalLM",
        "gemma4_text",
        num_global_key_value_heads=2,
        global_head_dim=64,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=0,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=0,
        enable_moe_block=False,
        attention_k_eq_v=False,
        use_double_wide_mlp=False,
        tie_word_embeddings=True,
    ),
    block_tokens=(64, 32),
)

COHERE2 = Family(
    "cohere2",
    _config(
        "Cohere2ForCausalLM",
        "cohere2",
        layer_norm_eps=1e-5,
        sliding_window=128,
        sliding_window_pattern=4,
        layer_types=[*["sliding_attention"] * 3, "full_attention"],
        logit_scale=0.25,
        tie_word_embeddings=True,
    ),
    block_tokens=(32, 32, 32, 32),
    engine={"num_gpu_blocks_override": 256},
)

GPT_OSS = Family(
    "gpt_oss",
    _config(
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=128,
        rope_theta=150000.0,
        swiglu_limit=7.0,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_bias=True,
        rope_scaling=None,
        torch_dtype="bfloat16",
    ),
    block_tokens=(32, 32),
    engine={"dtype": "bfloat16"},
)

LLAMA4 = Family(
    "llama4",
    _config(
        "Llama4ForCausalLM",
        "llama4_text",
        intermediate_size=128,
        intermediate_size_mlp=256,
        rope_theta=500000.0,
        attention_chunk_size=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
        attn_temperature_tuning=False,
    ),
    block_tokens=(32, 32, 32, 32),
    engine={"num_gpu_blocks_override": 256},
    prompt_tokens=450,
)

LFM2 = Family(
    "lfm2",
    _config(
        "Lfm2ForCausalLM",
        "lfm2",
        block_ff_dim=256,
        block_dim=128,
        conv_dim=128,
        conv_L_cache=3,
        conv_bias=False,
        block_auto_adjust_ff_dim=False,
        block_multiple_of=64,
        block_ffn_dim_multiplier=1.0,
        layer_types=["conv", "full_attention"] * 2,
        norm_eps=1e-5,
        rope_theta=1000000.0,
        tie_embedding=True,
        tie_word_embeddings=True,
    ),
    block_tokens=(32, 32),
    prompt_tokens=386,
    alone=True,
)

QWEN3_NEXT = Family(
    "qwen3_next",
    _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        full_attention_interval=2,
        layer_types=["linear_attention", "full_attention"] * 2,
        partial_rotary_factor=0.5,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        norm_topk_prob=True,
        torch_dtype="bfloat16",
    ),
    block_tokens=(288, 288),
    # Where the CPU can do more it keeps states in float32, and blocks are larger: the same everywhere, then.
    engine={"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "num_gpu_blocks_override": 64},
    prompt_tokens=580,
)

GRANITE_HYBRID = Family(
    "granite_hybrid",
    _config(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        layer_types=["mamba", "attention"] * 2,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_n_groups=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        mamba_conv_bias=True,
        mamba_proj_bias=False,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
        embedding_multiplier=1.0,
        logits_scaling=1.0,
        residual_multiplier=1.0,
        attention_multiplier=0.17,
        position_embedding_type="nope",
        tie_word_embeddings=True,
    ),
    block_tokens=(64, 64),
    shim=shims.mamba2_without_checkpoints,
)

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    _config(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        num_key_value_heads=4,
        num_hidden_layers=3,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
        scoring_func="softmax",
        norm_topk_prob=False,
    ),
    block_tokens=(16,),
    shim=shims.prefix_caching_with_mla,
    alone=True,
)

FAMILIES = (
    LLAMA,
    MISTRAL_WINDOW,
    GEMMA2,
    GEMMA4,
    COHERE2,
    GPT_OSS,
    LLAMA4,
    LFM2,
    QWEN3_NEXT,
    GRANITE_HYBRID,
    DEEPSEEK_V2,
)
