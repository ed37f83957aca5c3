"""LoRA adapters for the small Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.vllm.families import LLAMA

RANK = 8


def save_adapter(folder: Path, number: int) -> Any:
    """A LoRARequest for an adapter strong enough to change what the model says. Each number gives another."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder.mkdir()
    generator = torch.Generator().manual_seed(number)
    hidden = LLAMA.model["hidden_size"]
    tensors = {}
    for layer in range(LLAMA.model["num_hidden_layers"]):
        for name in ("q_proj", "v_proj"):
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(hidden, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return LoRARequest(f"adapter{number}", number, str(folder))
