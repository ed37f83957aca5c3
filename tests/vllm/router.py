"""A router in front of an engine: it knows of blocks only what the engine publishes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from tests.vllm.harness import Engine

PATIENCE_MS = 30_000

Place = tuple[int, int]
"""KV cache group and hash of a block, as events have them."""


class Subscriber:
    """Listens to vLLM's publisher over a real socket, and misses nothing."""

    def __init__(self) -> None:
        import msgspec
        import zmq
        from vllm.distributed.kv_events import KVEventBatch

        self._batch = KVEventBatch
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.subscribe("kv")
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")  # the publisher connects to such an address
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://127.0.0.1:{port}",
            "topic": "kv",
        }
        self._next: int | None = None  # the number of the next batch
        self._marks = 0

    def listen(self, engine: Engine) -> None:
        """Wait for the connection: what is published before it is lost."""
        for _ in range(PATIENCE_MS // 10):
            self._mark(engine)
            if self._socket.poll(10):
                self.take(engine)
                return
        raise TimeoutError("nothing was heard of the publisher")

    def take(self, engine: Engine) -> list[Any]:
        """What was published since the last time."""
        mark, events = self._mark(engine), []
        while True:
            if not self._socket.poll(PATIENCE_MS):
                raise TimeoutError("nothing more is published")
            _, number, payload = self._socket.recv_multipart()
            position = int.from_bytes(number, "big")
            if self._next is not None and position != self._next:
                raise AssertionError(f"batch {position} came instead of {self._next}")
            self._next = position + 1
            batch = self._decoder.decode(payload)
            if batch.ts == mark:
                return events
            events += batch.events

    def _mark(self, engine: Engine) -> float:
        """Publish a batch without events behind all others."""
        self._marks += 1
        engine.scheduler.kv_event_publisher.publish(self._batch(ts=float(self._marks), events=[]))
        return float(self._marks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._socket.close(linger=0)
        self._context.term()


class Router:
    """Where blocks are, by medium."""

    def __init__(self) -> None:
        self.places: dict[str, set[Place]] = {"GPU": set(), "CPU": set()}

    def hear(self, events: Iterable[Any]) -> None:
        for event in events:
            match type(event).__name__:
                case "BlockStored":
                    self.places[event.medium].update((event.group_idx, each) for each in event.block_hashes)
                case "BlockRemoved":
                    self.places[event.medium].difference_update(
                        (event.group_idx, each) for each in event.block_hashes
                    )
                case _:  # AllBlocksCleared names no medium
                    for places in self.places.values():
                        places.clear()


def on_host(scheduler: Any) -> set[Place]:
    """What Forebay's host pool has, from its own index."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    layout = scheduler._layout
    return {
        (layout.group_ids[layout.kv.group_of(key)], maybe_convert_block_hash(key[: layout.kv.bytes_per_hash]))
        for key in scheduler.manager.pool.index()
    }


def on_device(engine: Engine) -> set[Place]:
    """What vLLM's pool has, from its own index."""
    from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

    return {
        (get_group_id(key), maybe_convert_block_hash(get_block_hash(key)))
        for key in engine.block_pool.cached_block_hash_to_block._cache
    }
