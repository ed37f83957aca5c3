"""Do blocks come back with the bytes that were computed? Asked of every engine that gpu_peers.py compares.

An engine that brings back half of the bytes is fast, and with vLLM's dummy weights it gives the same tokens. So
documents are asked one by one, and what each of them leaves in the device's blocks is remembered as hashes. When
they have pushed each other out they are asked again, which says how much of each is cached, and once more with
another end behind that: what is on the device of the document then came back, and was not computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from _workloads import Ask, Shape, prompt

_AT_ONCE = 512
_FACTOR = 0x5851F42D4C957F2D


class Blocks:
    """Methods that a worker of vLLM gets besides its own: worker_extension_cls."""

    def begin_documents(self) -> None:
        self._documents: list[set[int]] = []
        self._before = self._hashes()

    def remember_document(self) -> int:
        """What is new in the device's blocks is the next document's. How many blocks that are."""
        now = self._hashes()
        self._documents.append(now - self._before)
        self._before = now
        return len(self._documents[-1])

    def count_document(self, nth: int) -> int:
        """How many of its blocks are on the device, as they were."""
        return len(self._documents[nth] & self._hashes())

    def _hashes(self) -> set[int]:
        """One for every block on the device, of all its layers."""
        import torch

        layers: list[Any] = self.model_runner.kv_caches  # type: ignore[attr-defined]
        count: int = self.cache_config.num_gpu_blocks  # type: ignore[attr-defined]
        total = torch.zeros(count, dtype=torch.int64, device=layers[0].device)
        if layers[0].is_cuda:
            torch.cuda.synchronize()
        for layer in layers:
            blocks = layer.movedim(layer.shape.index(count), 0).contiguous().view(count, -1).view(torch.int16)
            numbers = torch.Generator().manual_seed(blocks.shape[1])
            weights = torch.randint(-(2**62), 2**62, (blocks.shape[1],), generator=numbers).to(layer.device)
            for first in range(0, count, _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                total[some] = total[some] * _FACTOR + (blocks[some].to(torch.int64) * weights).sum(1)
        return set(total.tolist())


async def came_back(shape: Shape, ask: Ask, call: Callable[..., Awaitable[list[Any]]]) -> dict[str, int]:
    """Blocks that the engine said were cached when documents were asked again, and how many of them were there."""
    count = shape.device_blocks * shape.block_tokens // shape.document_tokens + 2
    documents = [prompt(shape, shape.document_tokens, "bytes", i) for i in range(count)]
    await call("begin_documents")
    for document in documents:
        await ask(document, 1)
        await call("remember_document")
    await asyncio.sleep(0.5)  # stores may still be on their way
    heads = [
        (await ask(document, 1)).cached_tokens // shape.block_tokens * shape.block_tokens for document in documents
    ]
    await asyncio.sleep(0.5)
    cached = right = 0
    for nth, (document, head) in enumerate(zip(documents, heads, strict=True)):
        end = prompt(shape, len(document) - head, "bytes", nth, "end")
        said = min(head, (await ask(document[:head] + end, 1)).cached_tokens) // shape.block_tokens
        (found,) = await call("count_document", args=(nth,))
        cached += said
        right += min(said, found)
    return {"cached": cached, "right": right}
