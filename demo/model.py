"""A model as users have one, a folder with weights and a tokenizer, made here: the same bytes every time."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")  # ids 0, 1 and 2
VISIBLE = range(33, 127)  # all that the model can say: text that can be read, and never an end
HEAD_DIM = 64
KV_HEADS = 2
VOCABULARY = 320  # 256 bytes and the special ones, rounded up
FLOAT_BYTES = 4
RECIPE = 1  # of what is made below: with another one, models on disk are made again


@dataclass(frozen=True)
class Size:
    """A Llama, in float32. Few heads for keys and values, as in models of today: KV is small beside the work that
    it takes to compute it."""

    name: str
    layers: int
    hidden: int
    inner: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * KV_HEADS * HEAD_DIM * FLOAT_BYTES

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // HEAD_DIM,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 1 << 16,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "demo_recipe": RECIPE,
        }


SMALL = Size("small", layers=8, hidden=640, inner=1792)  # 1,000 tokens: a second on one core
TINY = Size("tiny", layers=2, hidden=128, inner=256)
SIZES = {size.name: size for size in (SMALL, TINY)}


def model_folder(folder: Path, size: Size) -> Path:
    """Where the model is. It is made the first time, and again if it was made differently then."""
    model = folder / f"model-{size.name}"
    if not is_made(model, size):
        part = folder / f"model-{size.name}.part"  # interrupted, it is not taken for a model
        for stale in (part, model):
            shutil.rmtree(stale, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            save(part, size)
            part.rename(model)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return model


def is_made(model: Path, size: Size) -> bool:
    try:
        return bool(json.loads((model / "config.json").read_text()) == size.config())
    except (OSError, ValueError):
        return False


def save(folder: Path, size: Size) -> None:
    (folder / "config.json").write_text(json.dumps(size.config()))
    spoken = save_tokenizer(folder)
    save_weights(folder, size.config(), spoken)


def save_tokenizer(folder: Path, **settings: str) -> list[int]:
    """One token for each byte. An answer that goes back in with the next turn becomes the same tokens again, so
    that the turn begins with the KV of those before. Returns the tokens that can be answers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described | settings))
    return [ids[chr(byte)] for byte in VISIBLE]


def save_weights(folder: Path, config: dict[str, Any], spoken: list[int]) -> None:
    """Of a Llama with this config. The spread is so wide that every token depends on every part of the KV cache:
    wrong KV gives another answer."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    spread = 2.8 / hidden**0.5

    def normal(*shape: int, spread: float = spread) -> torch.Tensor:
        return torch.empty(shape).normal_(0, spread, generator=generator)

    head = torch.zeros(vocabulary, hidden)
    head[spoken] = normal(len(spoken), hidden)
    tensors = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, spread=0.02),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        tensors |= {
            f"{stem}.input_layernorm.weight": torch.ones(hidden),
            f"{stem}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{stem}.self_attn.q_proj.weight": normal(queries, hidden),
            f"{stem}.self_attn.k_proj.weight": normal(keys, hidden),
            f"{stem}.self_attn.v_proj.weight": normal(keys, hidden),
            f"{stem}.self_attn.o_proj.weight": normal(hidden, queries),
            f"{stem}.mlp.gate_proj.weight": normal(inner, hidden),
            f"{stem}.mlp.up_proj.weight": normal(inner, hidden),
            f"{stem}.mlp.down_proj.weight": normal(hidden, inner),
        }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
