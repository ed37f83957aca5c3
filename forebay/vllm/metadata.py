"""What scheduler and workers tell each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from forebay.ids import BlockId, RequestId, TransferId
from forebay.transfers import CopyOrder


class Verdict(NamedTuple):
    """The scheduler's word on a load that the workers would not end by themselves, or not in this way: every rank
    repeats it to the engine, which takes outcomes from ranks only."""

    request_id: RequestId
    transfer_id: TransferId | None
    """The load, if ranks were told of one. A rank that has reported it already has nothing to add."""
    failed: bool
    blocks: list[BlockId]
    """What has to be computed if it failed, for releases that hear of failures by block."""


@dataclass
class SimpleCPUOffloadMetadata(KVConnectorMetadata):
    """Scheduler → workers: the step's transfers. vLLM's names are views of them."""

    loads: list[CopyOrder] = field(default_factory=list)
    stores: list[CopyOrder] = field(default_factory=list)
    waiting: list[RequestId] = field(default_factory=list)
    """Who waits for each of the loads."""
    verdicts: list[Verdict] = field(default_factory=list)
    slots: int = 0
    """How many the scheduler counts on; a rank with fewer must not go on."""
    idle: bool = False
    """Whether the step computes nothing."""
    need_flush: bool = False
    """Whether requests were preempted. Blocks that are being copied are pinned, so nothing has to be flushed."""

    @property
    def load_event(self) -> int:
        return self.loads[0].id if self.loads else -1

    @property
    def load_gpu_blocks(self) -> list[int]:
        return list(chain.from_iterable(order.blocks for order in self.loads))

    @property
    def load_cpu_blocks(self) -> list[int]:
        return list(chain.from_iterable(order.slots for order in self.loads))

    @property
    def load_event_to_reqs(self) -> dict[int, list[RequestId]]:
        return {order.id: [request_id] for order, request_id in zip(self.loads, self.waiting, strict=True)}

    @property
    def store_event(self) -> int:
        return self.stores[0].id if self.stores else -1

    @property
    def store_gpu_blocks(self) -> list[int]:
        return list(chain.from_iterable(order.blocks for order in self.stores))

    @property
    def store_cpu_blocks(self) -> list[int]:
        return list(chain.from_iterable(order.slots for order in self.stores))


@dataclass
class SimpleCPUOffloadWorkerMetadata(KVConnectorWorkerMetadata):
    """Workers → scheduler: how many ranks have ended which transfers since the last step."""

    completed_store_events: dict[int, int]
    completed_load_events: dict[int, int] = field(default_factory=dict)
    failed_events: dict[int, int] = field(default_factory=dict)
    """Of both directions. Not counted among the completed."""
    mismatched_events: dict[int, int] = field(default_factory=dict)
    """Loads whose bytes were not those that were stored. Not counted among the failed."""
    ready: dict[int, int] = field(default_factory=dict)
    """By rank: how many of its slots can be used by now, if that has changed."""
    meanwhile: Callable[[], Meanwhile] | None = field(default=None, compare=False, repr=False)
    """What has ended since, if the scheduler can ask: in the worker's own process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "meanwhile": None}

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SimpleCPUOffloadWorkerMetadata:
        if not isinstance(other, SimpleCPUOffloadWorkerMetadata):
            raise TypeError(f"expected SimpleCPUOffloadWorkerMetadata, got {type(other).__name__}")
        return SimpleCPUOffloadWorkerMetadata(
            _added(self.completed_store_events, other.completed_store_events),
            _added(self.completed_load_events, other.completed_load_events),
            _added(self.failed_events, other.failed_events),
            _added(self.mismatched_events, other.mismatched_events),
            # Of several steps of one rank the last one counts, and slots only become more.
            dict(Counter(self.ready) | Counter(other.ready)),
        )


class Meanwhile(NamedTuple):
    """Transfers that have ended well, and the requests that waited for them."""

    meta: SimpleCPUOffloadWorkerMetadata
    finished: set[str]


def nothing_meanwhile() -> Meanwhile:
    return Meanwhile(SimpleCPUOffloadWorkerMetadata({}), set())


def _added(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return dict(Counter(one) + Counter(other))


@dataclass
class RankSlots(KVConnectorHandshakeMetadata):
    """A rank → scheduler, once, before the first request."""

    slots: int
    """What the memory given to this rank holds of its own layers."""
    num_blocks: int
    """Blocks on its device. Block numbers mean the same on every rank, or nothing can be copied."""
    ready: int
    """How many of the slots can be used by now. The rank tells when they become more."""
    rank: int
    bytes_per_slot: int
    """What a slot holds of this rank's layers, without padding."""
