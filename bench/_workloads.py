"""What gpu_peers.py asks of every engine: four workloads over one way to ask, with the same prompts each time.

    documents  long prompts, one token out, all at once; the first round is new, the others repeat it
    chat       sessions that grow from turn to turn, a few at a time; all take a turn before the next turn
    miss       prompts that never repeat
    fits       prompts that repeat and that the device keeps

A workload is a list of phases (rounds, turns, slices), each measured on its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

from _turns import Turn

SEED = 20240607
HEAD_START_S = 0.02
FIRST_TOKEN = 3  # those below mean something to a tokenizer

Tokens = list[int]


@dataclass(frozen=True)
class Shape:
    """How large everything is. Device and host sizes belong to it: they decide what has to be offloaded."""

    name: str
    vocabulary: int
    block_tokens: int
    device_blocks: int
    host_bytes: int
    max_model_len: int
    documents: int
    document_tokens: int
    rounds: int
    sessions: int
    first_turn_tokens: int
    more_tokens: int  # that each turn adds to the prompt, the last answer among them
    turns: int
    answer_tokens: int
    at_once: int
    miss_slices: int
    miss_prompts: int
    miss_tokens: int
    fits_slices: int
    fits_prompts: int
    fits_tokens: int


FULL = Shape(
    name="full",
    vocabulary=128_000,
    block_tokens=16,
    device_blocks=4096,
    host_bytes=60_000_000_000,
    max_model_len=20_000,
    documents=8,
    document_tokens=16_000,
    rounds=3,
    sessions=32,
    first_turn_tokens=6_000,
    more_tokens=1_000,
    turns=3,
    answer_tokens=64,
    at_once=8,
    miss_slices=6,
    miss_prompts=8,
    miss_tokens=4_000,
    fits_slices=24,  # short ones, and they fall into two kinds: as requests arrive before or after a step begins
    fits_prompts=8,
    fits_tokens=3_000,
)
QUICK = replace(FULL, name="quick", rounds=2, sessions=16, turns=2, miss_slices=3, fits_slices=3)
TINY = Shape(  # for a CPU and a model of a few layers: tries the bench, says nothing about speed
    name="tiny",
    vocabulary=1_000,
    block_tokens=32,
    device_blocks=64,
    host_bytes=200_000_000,
    max_model_len=1_100,
    documents=4,
    document_tokens=800,
    rounds=3,
    sessions=6,
    first_turn_tokens=300,
    more_tokens=100,
    turns=3,
    answer_tokens=8,
    at_once=3,
    miss_slices=2,
    miss_prompts=3,
    miss_tokens=200,
    fits_slices=2,
    fits_prompts=3,
    fits_tokens=150,
)
SHAPES = {shape.name: shape for shape in (FULL, QUICK, TINY)}


@dataclass(frozen=True)
class Answer:
    prompt_tokens: int
    cached_tokens: int
    tokens: Tokens
    ttft_s: float
    total_s: float

    @property
    def token_s(self) -> float | None:
        """Time per output token after the first."""
        return (self.total_s - self.ttft_s) / (len(self.tokens) - 1) if len(self.tokens) > 1 else None


Ask = Callable[[Tokens, int], Awaitable[Answer]]
Phases = list[dict[str, Any]]


def prompt(shape: Shape, count: int, *name: object) -> Tokens:
    """So many tokens; the same for the same name, and nothing in common with those of any other."""
    numbers = random.Random("/".join(map(str, (SEED, *name))))
    return numbers.choices(range(FIRST_TOKEN, shape.vocabulary), k=count)


def document_prompts(shape: Shape) -> list[Tokens]:
    return [prompt(shape, shape.document_tokens, "document", i) for i in range(shape.documents)]


def chat_prompts(shape: Shape) -> list[Tokens]:
    return [prompt(shape, shape.first_turn_tokens, "chat", i) for i in range(shape.sessions)]


def next_turn(shape: Shape, session: int, turn: int, before: Tokens, answer: Tokens) -> Tokens:
    new = prompt(shape, shape.more_tokens - len(answer), "chat", session, "turn", turn)
    return before + answer + new


def miss_prompts(shape: Shape, slice_: int) -> list[Tokens]:
    return [prompt(shape, shape.miss_tokens, "miss", slice_, i) for i in range(shape.miss_prompts)]


def fits_prompts(shape: Shape) -> list[Tokens]:
    return [prompt(shape, shape.fits_tokens, "fits", i) for i in range(shape.fits_prompts)]


def step_lengths(shape: Shape) -> list[int]:
    """How many tokens a step of the chats computes: what is new in a turn, of one chat or of several. Turns differ
    by less than a percent, so they alternate."""
    new = []
    for turn in range(2, shape.turns + 1):
        before = shape.first_turn_tokens + (turn - 2) * shape.more_tokens + shape.answer_tokens
        known = (before - 1) // shape.block_tokens * shape.block_tokens  # nobody has computed the last token
        new.append(shape.first_turn_tokens + (turn - 1) * shape.more_tokens - known)
    return [chats * new[chats % len(new)] for chats in range(1, shape.at_once + 1) if new]


def warm_up_prompts(shape: Shape) -> tuple[list[Tokens], list[Tokens], list[Tokens]]:
    """Documents, prompts that take one step each, and short ones: together, they push a document out."""
    steps = [prompt(shape, length, "warm", "step", length) for length in step_lengths(shape)]
    short = [prompt(shape, shape.first_turn_tokens // 10, "warm", "short", i) for i in range(shape.at_once)]
    left = shape.device_blocks * shape.block_tokens - sum(map(len, steps + short))
    count = max(1, -(-left // shape.document_tokens))
    return [prompt(shape, shape.document_tokens, "warm", i) for i in range(count)], steps, short


async def phase(
    ask: Ask,
    prompts: Iterable[Tokens],
    answer_tokens: int,
    at_once: int,
    head_start_s: float = 0.0,
    turn: Turn = nullcontext,
) -> tuple[dict[str, Any], Any]:
    """Ask them all, so many at a time; what it took, and the answers in the order of the prompts. With a head
    start, the first is asked so long before the others, all of which have to be asked at once then."""
    gate = asyncio.Semaphore(at_once)

    first_tokens_at = []

    async def one(tokens: Tokens, after_s: float) -> Answer:
        async with gate:
            await asyncio.sleep(after_s)
            asked = time.perf_counter()
            answer = await ask(tokens, answer_tokens)
            first_tokens_at.append(asked + answer.ttft_s)
            return answer

    todo = [one(tokens, head_start_s if i else 0.0) for i, tokens in enumerate(prompts)]
    async with turn():
        started = time.perf_counter()
        answers = await asyncio.gather(*todo)
        seconds = time.perf_counter() - started
    asked = sum(answer.prompt_tokens for answer in answers)
    told = sum(len(answer.tokens) for answer in answers)
    measured = {
        "at": started,
        "last_first_token_at": max(first_tokens_at),
        "seconds": seconds,
        "share_cached": sum(answer.cached_tokens for answer in answers) / asked,
        "tokens_per_s": (asked + told) / seconds,
        "ttft_s": [answer.ttft_s for answer in answers],
        "token_s": [answer.token_s for answer in answers if answer.token_s is not None],
    }
    return measured, answers


async def warm_up(shape: Shape, ask: Ask) -> Phases:
    """Every kernel and direction once before the clock starts, and every length to a percent. Not counted. For a
    length that is new to them libraries load a kernel, and the driver waits until the device has done all that it
    was given, copies too."""
    long, steps, short = warm_up_prompts(shape)
    phases = []
    for prompts, answer_tokens, at_once in (
        (long, 1, len(long)),
        (steps, 1, 1),
        (short, shape.answer_tokens, len(short)),
        (long[:1], 1, 1),
    ):
        phases.append((await phase(ask, prompts, answer_tokens, at_once))[0])
    return phases


async def documents(shape: Shape, ask: Ask, turn: Turn = nullcontext) -> Phases:
    prompts = document_prompts(shape)
    return [(await phase(ask, prompts, 1, len(prompts), turn=turn))[0] for _ in range(shape.rounds)]


async def chat(shape: Shape, ask: Ask, turn: Turn = nullcontext) -> Phases:
    prompts, phases = chat_prompts(shape), []
    for number in range(1, shape.turns + 1):
        measured, answers = await phase(ask, prompts, shape.answer_tokens, shape.at_once, turn=turn)
        phases.append(measured)
        prompts = [next_turn(shape, i, number + 1, prompts[i], answers[i].tokens) for i in range(shape.sessions)]
    return phases


async def miss(shape: Shape, ask: Ask, turn: Turn = nullcontext) -> Phases:
    slices = [miss_prompts(shape, i) for i in range(shape.miss_slices)]
    # Whether the first step has one prompt or two would be a race between the engine and those who ask, and says
    # how many requests decode beside how many prefills: 10.5 or 10.8 ms per token, whoever serves them.
    return [(await phase(ask, each, shape.answer_tokens, len(each), HEAD_START_S, turn))[0] for each in slices]


async def fits(shape: Shape, ask: Ask, turn: Turn = nullcontext) -> Phases:
    """The first time all is new, which is not counted."""
    prompts = fits_prompts(shape)
    phases = [
        (await phase(ask, prompts, shape.answer_tokens, len(prompts), turn=turn))[0]
        for _ in range(shape.fits_slices + 1)
    ]
    return phases[1:]


WORKLOADS: dict[str, Callable[[Shape, Ask, Turn], Awaitable[Phases]]] = {
    "documents": documents,
    "chat": chat,
    "miss": miss,
    "fits": fits,
}


def as_dict(shape: Shape) -> dict[str, Any]:
    return asdict(shape)
