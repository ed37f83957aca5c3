"""What gpu_answers.py asks: sessions that share beginnings and come back turn after turn, some asked twice at
once, some given up midway. Which, is in the seed, so that every engine gets the same."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

SEED = 20240607
FIRST_TOKEN = 3
ABORTED = 0.05
TWINS = 0.03

Tokens = list[int]
Between = tuple[int, int]


@dataclass(frozen=True)
class Sizes:
    name: str
    model: dict[str, Any]
    """What differs from Llama-3.1-8B's config.json."""
    answers: int
    """That are compared, unless asked for otherwise."""
    block_tokens: int
    device_blocks: int
    """For about a quarter of the requests that are there at a time, so that some are preempted."""
    host_bytes: int
    max_model_len: int
    batched_tokens: int
    at_once: int
    beginnings: int
    beginning_tokens: int
    first_tokens: Between
    more_tokens: Between
    turns: int
    answer_tokens: Between

    @property
    def vocabulary(self) -> int:
        size: int = self.model["vocab_size"]
        return size


LARGE = Sizes(
    name="large",
    model={
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32_000,
        "max_position_embeddings": 8192,
    },
    answers=1_500,
    block_tokens=16,
    device_blocks=1_000,
    host_bytes=16_000_000_000,
    max_model_len=2_048,
    batched_tokens=4_096,
    at_once=64,
    beginnings=8,
    beginning_tokens=256,
    first_tokens=(300, 500),
    more_tokens=(80, 160),
    turns=6,
    answer_tokens=(16, 80),
)
SMALL = Sizes(  # for a CPU
    name="small",
    model={
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1_024,
        "max_position_embeddings": 8192,
    },
    answers=200,
    block_tokens=32,
    device_blocks=40,
    host_bytes=400_000_000,
    max_model_len=600,
    batched_tokens=512,
    at_once=16,
    beginnings=4,
    beginning_tokens=64,
    first_tokens=(60, 120),
    more_tokens=(20, 60),
    turns=5,
    answer_tokens=(8, 24),
)
SIZES = {sizes.name: sizes for sizes in (LARGE, SMALL)}


@dataclass(frozen=True)
class Question:
    name: str
    turn: int
    prompt: Tokens
    answer_tokens: int
    abort_after_steps: int | None = None
    """It is given up so many steps after it was asked, waiting, loading or running."""
    abort_after_tokens: int | None = None
    """It is given up once it has so many tokens."""

    @property
    def is_aborted(self) -> bool:
        return self.abort_after_steps is not None or self.abort_after_tokens is not None


def questions(sizes: Sizes, answers: int) -> list[Question]:
    """At least so many that are not given up, of whole sessions. Prompts do not depend on answers: they are the
    same after an answer that was wrong."""
    beginnings = [_tokens(sizes, sizes.beginning_tokens, "beginning", i) for i in range(sizes.beginnings)]
    found: list[Question] = []
    session = kept = 0
    while kept < answers:
        numbers = random.Random(f"{SEED}/session/{session}")
        prompt = numbers.choice(beginnings) + _tokens(sizes, numbers.randint(*sizes.first_tokens), session, 0)
        for turn in range(sizes.turns):
            if turn:
                prompt = prompt + _tokens(sizes, numbers.randint(*sizes.more_tokens), session, turn)
            found.append(_question(sizes, numbers, f"session {session} turn {turn}", turn, prompt))
            if numbers.random() < TWINS:
                found.append(_question(sizes, numbers, f"session {session} turn {turn} again", turn, prompt))
        kept = sum(not each.is_aborted for each in found)
        session += 1
    return found


def in_order(asked: list[Question], seed: int) -> list[Question]:
    """All sessions take a turn before the next turn, within a turn in an order of the seed's own."""
    numbers = random.Random(f"{SEED}/order/{seed}")
    places = {each.name.removesuffix(" again"): numbers.random() for each in asked}
    return sorted(asked, key=lambda each: (each.turn, places[each.name.removesuffix(" again")]))


def _question(sizes: Sizes, numbers: random.Random, name: str, turn: int, prompt: Tokens) -> Question:
    answer_tokens = numbers.randint(*sizes.answer_tokens)
    if numbers.random() >= ABORTED:
        return Question(name, turn, prompt, answer_tokens)
    if numbers.random() < 0.5:
        return Question(name, turn, prompt, answer_tokens, abort_after_steps=numbers.randint(0, 12))
    return Question(name, turn, prompt, answer_tokens, abort_after_tokens=numbers.randint(1, answer_tokens - 1))


def _tokens(sizes: Sizes, count: int, *name: object) -> Tokens:
    numbers = random.Random("/".join(map(str, (SEED, *name))))
    return numbers.choices(range(FIRST_TOKEN, sizes.vocabulary), k=count)
