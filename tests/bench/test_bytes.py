"""The proof that blocks came back would notice if they had not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _bytes import Blocks, came_back
from _workloads import TINY, Answer, Tokens

COUNT = 6


class Worker(Blocks):
    def __init__(self, *layers: torch.Tensor) -> None:
        self.model_runner = SimpleNamespace(kv_caches=layers)
        self.cache_config = SimpleNamespace(num_gpu_blocks=COUNT)


def layer(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("shape", [(COUNT, 2, 32, 8), (2, COUNT, 32, 8)])
def test_one_number_that_differs_is_a_block_that_is_not_there(shape: tuple[int, ...]) -> None:
    first, second = layer(*shape), layer(*shape)
    empty = Worker(torch.zeros(shape), torch.zeros(shape))
    worker = Worker(first.transpose(-1, -2), second)
    empty.begin_documents()
    worker._documents, worker._before = [], empty._before
    assert worker.remember_document() == COUNT
    assert worker.count_document(0) == COUNT
    place = (1, 1, 5, 2)
    was = second[place].clone()
    second[place] += 1
    assert worker.count_document(0) == COUNT - 1
    second[place] = was
    half = first.select(shape.index(COUNT), 4)
    half[:] = half.flip(0)
    assert worker.count_document(0) == COUNT - 1, "the same numbers in another order"


def test_blocks_may_be_in_other_places() -> None:
    cache = layer(COUNT, 4)
    worker = Worker(torch.zeros(COUNT, 4))
    worker.begin_documents()
    worker.model_runner.kv_caches = [cache]
    worker.remember_document()
    cache.copy_(cache.flip(0))
    assert worker.count_document(0) == COUNT


def test_a_document_is_what_was_new_and_order_of_layers_counts() -> None:
    first, second = torch.zeros(COUNT, 4), torch.zeros(COUNT, 4)
    worker = Worker(first, second)
    worker.begin_documents()
    first[:2], second[:2] = layer(2, 4), 1
    assert worker.remember_document() == 2
    first[2:5] = layer(3, 4)
    assert worker.remember_document() == 3
    assert [worker.count_document(nth) for nth in range(2)] == [2, 3]
    first[0], second[0] = second[0].clone(), first[0].clone()
    assert [worker.count_document(nth) for nth in range(2)] == [1, 3]


def test_what_is_computed_again_does_not_count() -> None:
    """Of each document 24 blocks are cached. The last time it is asked with another end behind them."""
    asked: list[Tokens] = []
    there = {0: 24, 1: 23, 2: 7, 3: 0}
    head = 24 * TINY.block_tokens

    async def ask(tokens: Tokens, answer_tokens: int) -> Answer:
        again = tokens[:head] in [each[:head] for each in asked]
        asked.append(tokens)
        return Answer(len(tokens), head if again else 0, [1], 0.1, 0.1)

    async def call(method: str, args: tuple[int, ...] = ()) -> list[Any]:
        return [there[args[0]] if method == "count_document" else None]

    assert asyncio.run(came_back(TINY, ask, call)) == {"cached": 4 * 24, "right": 24 + 23 + 7 + 0}
    first, again, last = asked[:4], asked[4:8], asked[8:]
    assert first == again
    for document, other in zip(first, last, strict=True):
        assert len(document) == len(other)
        assert document[:head] == other[:head]
        assert not set(zip(document[head:], other[head:], strict=True)) & {(each, each) for each in document}
