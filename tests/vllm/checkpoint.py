"""A model as users have one: a folder with weights, a tokenizer and a chat template. Everything is made here."""

from __future__ import annotations

import json
from pathlib import Path

from demo.model import save_tokenizer, save_weights
from tests.vllm.families import LLAMA

_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_checkpoint(folder: Path) -> str:
    """The small Llama, with weights for which every token depends on every part of the KV cache. Returns where."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA.model))
    save_weights(folder, LLAMA.model, save_tokenizer(folder, chat_template=_TEMPLATE))
    return str(folder)
