"""A model as users have one: a folder with weights, a tokenizer and a chat template. Everything is made here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.families import LLAMA

SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>")  # ids 0, 1 and 2, as in the model's config
_VISIBLE = range(33, 127)
_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_checkpoint(folder: Path) -> str:
    """The small Llama, with weights for which every token depends on every part of the KV cache. Returns where."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA.model))
    ids = _save_tokenizer(folder)
    _save_weights(folder, LLAMA.model, spoken=[ids[chr(byte)] for byte in _VISIBLE])
    return str(folder)


def _save_tokenizer(folder: Path) -> dict[str, int]:
    """One token for each byte. What comes out of the model goes back in as the same tokens, so that the next turn
    of a conversation begins with the KV of the turns before, answers included."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": SPECIAL[0],
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ids


def _save_weights(folder: Path, model: dict[str, Any], spoken: list[int]) -> None:
    """Random numbers, the same every time. Only `spoken` tokens can be answers: text that can be read, and no end
    before the length that was asked for."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, spread: float = 0.25) -> torch.Tensor:
        return torch.empty(shape).normal_(0, spread, generator=generator)

    hidden, inner, vocabulary = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    queries = model["num_attention_heads"] * model["head_dim"]
    keys = model["num_key_value_heads"] * model["head_dim"]
    head = torch.zeros(vocabulary, hidden)
    head[spoken] = normal(len(spoken), hidden)
    tensors = {
        "model.embed_tokens.weight": normal(vocabulary, hidden, spread=0.02),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": head,
    }
    for layer in range(model["num_hidden_layers"]):
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
