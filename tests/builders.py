"""Small things that tests are built from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from forebay import (
    Answer,
    BlockId,
    CopyOrder,
    FullAttention,
    Hit,
    Key,
    KVLayout,
    Mode,
    OffloadConfig,
    OffloadManager,
    Outcome,
    Outcomes,
    Progress,
    Rank,
    Report,
    RequestId,
    Step,
)
from forebay.testing import Faults, ManualClock, TinyDevicePool, TinyRequest
from tests.watched import WatchedEngine

FULL = KVLayout((FullAttention(4),), tokens_per_hash=4, bytes_per_block=16)


def config(slots: int = 64, **settings: Any) -> OffloadConfig:
    return OffloadConfig(capacity_bytes=16 * slots, **settings)


def make_engine(layout: KVLayout = FULL, *, slots: int = 64, num_blocks: int = 64, **kwargs: Any) -> WatchedEngine:
    names = (
        "mode",
        "eviction_policy",
        "load_deadline_s",
        "wait_deadline_s",
        "store_deadline_s",
        "min_load_tokens",
    )
    settings = {name: kwargs.pop(name) for name in names if name in kwargs}
    return WatchedEngine(layout, config(slots, **settings), num_blocks=num_blocks, **kwargs)


def prompt(tokens: int, family: int = 0) -> list[int]:
    return [1000 * family + i for i in range(tokens)]


def hold(engine: WatchedEngine, **faults: Any) -> None:
    for copier in engine.copiers:
        copier.faults = Faults(hold=True, **faults)


def release(engine: WatchedEngine, **faults: Any) -> None:
    for copier in engine.copiers:
        copier.faults = Faults(**faults)


def served(engine: WatchedEngine, tokens: list[int], max_new_tokens: int = 1) -> TinyRequest:
    """Run one request to its end and let every copy finish."""
    request = engine.submit(tokens, max_new_tokens)
    engine.run()
    return request


def lose_device(engine: WatchedEngine) -> None:
    """Everything the device cached is evicted; only the host still has it."""
    engine.device.reset()


class Desk:
    """A manager driven by hand, without an engine around it: one call at a time, over a real device pool."""

    def __init__(
        self,
        layout: KVLayout = FULL,
        *,
        slots: int = 64,
        ready: int | None = None,
        num_blocks: int = 256,
        ranks: int = 1,
        mode: Mode = Mode.EAGER,
        max_batched_tokens: int = 64,
        engine_reserves: bool = False,
        **settings: Any,
    ) -> None:
        self.layout = layout
        self.clock = ManualClock()
        self.ranks = ranks
        self.device = TinyDevicePool(num_blocks)
        self.manager = OffloadManager(
            layout,
            config(slots, mode=mode, **settings),
            self.device,
            ranks=ranks,
            ready=ready,
            max_batched_tokens=max_batched_tokens,
            engine_reserves=engine_reserves,
            events=True,
            clock=self.clock,
        )
        self._number = 0

    def request(self, tokens: Sequence[int], **settings: Any) -> TinyRequest:
        self._number += 1
        return TinyRequest(RequestId(f"d{self._number}"), list(tokens), 1, self.layout.tokens_per_hash, **settings)

    def compute(self, request: TinyRequest, tokens: int | None = None) -> list[list[BlockId]]:
        """Blocks for the first tokens of a request, cached under its keys as if they had been computed."""
        tokens = request.num_tokens if tokens is None else tokens
        keys: list[list[Any]] = [[] for _ in self.layout.groups]
        self.layout.extend_keys(keys, request.hashes)
        table = []
        for group, group_keys in zip(self.layout.groups, keys, strict=True):
            blocks = self.device.take(-(-tokens // group.span_tokens))
            assert blocks is not None
            for block, key in zip(blocks[: tokens // group.span_tokens], group_keys, strict=False):
                self.device.cache(block, key)
            table.append(blocks)
        return table

    def blocks_for(self, tokens: int) -> list[list[BlockId]]:
        table = []
        for group in self.layout.groups:
            blocks = self.device.take(-(-tokens // group.span_tokens))
            assert blocks is not None
            table.append(blocks)
        return table

    def step(self, *progress: Progress) -> Step:
        step = self.manager.step(progress)
        self.check()
        return step

    def report(
        self,
        *orders: CopyOrder,
        ranks: Sequence[int] | None = None,
        failed: bool = False,
        outcome: Outcome = Outcome.DONE,
    ) -> Outcomes:
        outcome = Outcome.FAILED if failed else outcome
        outcomes = self.manager.report(
            Report(order.id, Rank(rank), outcome)
            for order in orders
            for rank in (range(self.ranks) if ranks is None else ranks)
        )
        self.check()
        return outcomes

    def store(self, tokens: Sequence[int]) -> TinyRequest:
        """Compute a prompt, store it, finish it and give its device blocks back, keys and all."""
        request = self.request(tokens)
        table = self.compute(request)
        self.manager.allocated(request, table, 0, 0)
        step = self.step(Progress(request.id, request.num_tokens))
        self.report(*step.stores)
        self.end(request, table)
        return request

    def end(self, request: TinyRequest, table: list[list[BlockId]], confirmed: int | None = None) -> None:
        self.manager.finish(request.id, request.num_tokens if confirmed is None else confirmed)
        for blocks in table:
            self.device.free(reversed(blocks))
        self.check()

    def check(self) -> None:
        self.manager.check()
        self.device.check()
        assert +self.manager.device_pins() == +self.device.pins


def keys_of(desk: Desk, request: TinyRequest) -> list[Key]:
    """Of its first group."""
    keys: list[list[Key]] = [[] for _ in desk.layout.groups]
    desk.layout.extend_keys(keys, request.hashes)
    return keys[0]


def tokens_of(answer: Answer) -> int:
    assert isinstance(answer, Hit), answer
    return answer.tokens
