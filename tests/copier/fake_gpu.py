"""A device of a few lines: streams that run in any order the events allow, over real memory of this process.

Nothing happens by itself. `run` carries out what comes next in streams drawn at random; whoever waits for an event
runs the device until it is passed. So a missing wait shows as wrong bytes in some order, and no clock is needed.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from threading import RLock
from typing import Any

import numpy as np
import torch

from forebay.copier.streams import Addresses, Columns, Part, Staging, Table
from forebay.copier.tiles import Tiles

WORDS_PER_TILE = 4


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.passed = False

    def query(self) -> bool:
        self._gpu.run(1)
        return self.passed

    def synchronize(self) -> None:
        while not self.passed:
            assert self._gpu.run(1) or self._gpu.held, "waits for something that nobody will do"


class FakeStream:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu
        self.todo: deque[Callable[[], None] | FakeEvent] = deque()

    def give(self, work: Callable[[], None]) -> None:
        with self._gpu.lock:
            self._gpu.calls += 1
            if self._gpu.calls in self._gpu.refused:
                raise RuntimeError("out of luck")
            self.todo.append(work)

    def record(self) -> FakeEvent:
        event = FakeEvent(self._gpu)

        def passed() -> None:
            event.passed = True

        with self._gpu.lock:
            self.todo.append(passed)
        return event

    def wait(self, event: Any) -> None:
        with self._gpu.lock:
            self.todo.append(event)

    def synchronize(self) -> None:
        self.record().synchronize()


class FakeGpu:
    def __init__(self, regions: Sequence[torch.Tensor], rng: Random) -> None:
        self._regions = regions
        self._tiles = Tiles.of(
            [(region.data_ptr(), region.stride(0), region.size(1)) for region in regions], WORDS_PER_TILE
        )
        self.num_blocks = regions[0].size(0)
        self.bytes_per_block = self._tiles.bytes_per_block
        self._rng = rng
        self.lock = RLock()
        self.compute = FakeStream(self)
        self._streams = [self.compute]
        self._stagings: list[Any] = []
        self.most_staging_bytes = 1 << 40
        self._sums: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self.held = False
        """Nothing happens meanwhile."""
        self.calls = 0
        self.refused: set[int] = set()
        """Calls that fail, by number."""

    @property
    def copying(self) -> list[FakeStream]:
        """All streams but the engine's."""
        return self._streams[1:]

    def run(self, count: int) -> int:
        """Carry out so much of what can be; returns how much there was."""
        with self.lock:
            for done in range(0 if self.held else count):
                ready = [stream for stream in self._streams if self._head(stream)]
                if not ready:
                    return done
                work = self._rng.choice(ready).todo.popleft()
                assert not isinstance(work, FakeEvent)
                work()
        return 0 if self.held else count

    @staticmethod
    def _head(stream: FakeStream) -> bool:
        while stream.todo and isinstance(stream.todo[0], FakeEvent) and stream.todo[0].passed:
            stream.todo.popleft()
        return bool(stream.todo) and not isinstance(stream.todo[0], FakeEvent)

    # --- as a copier sees it ----------------------------------------------------------------------------

    def enter(self) -> None:
        pass

    def mark(self) -> FakeEvent:
        return self.compute.record()

    def stream(self, *, urgent: bool) -> FakeStream:
        stream = FakeStream(self)
        self._streams.append(stream)
        return stream

    def staging(self, num_bytes: int) -> Staging:
        if num_bytes > self.most_staging_bytes:
            raise MemoryError(num_bytes)
        memory = np.zeros(num_bytes, dtype=np.uint8)
        self._stagings.append(memory)
        return Staging(memory.ctypes.data, num_bytes)

    def parts(self, num_bytes: int) -> list[Part]:
        return self._tiles.parts(num_bytes)

    def upload(self, stream: Any, columns: Columns) -> Table:
        rows = [[int(number) for number in column] for column in columns]
        memory: dict[str, Any] = {"sums": [0] * len(rows[0])}  # nothing to be seen before the stream got there
        stream.give(lambda: memory.update(zip(Columns._fields, rows, strict=True)))
        return Table(memory, len(rows[0]), any(rows[3]))

    def drop(self, table: Table) -> None:
        table.memory.clear()

    def gather(self, stream: Any, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        stream.give(lambda: self._move(table, first, count, part, staging, gather=True))

    def scatter(self, stream: Any, table: Table, first: int, count: int, part: Part, staging: Staging) -> None:
        stream.give(lambda: self._move(table, first, count, part, staging, gather=False))

    def _move(self, table: Table, first: int, count: int, part: Part, staging: Staging, *, gather: bool) -> None:
        assert count * part.num_bytes <= staging.num_bytes
        for nth in range(count):
            row = first + nth
            block = table.memory["blocks"][row]
            for address, stride, start, length in self._tiles.table[part.first_tile :][: part.num_tiles].tolist():
                size = length * self._tiles.word_bytes
                on_device = address + block * stride
                staged = staging.address + nth * part.num_bytes + start - part.offset
                target, source = (staged, on_device) if gather else (on_device, staged)
                ctypes.memmove(target, source, size)
                table.memory["sums"][row] += _sum(start, ctypes.string_at(target, size))

    def copy(self, stream: Any, destinations: Addresses, sources: Addresses, sizes: Addresses) -> None:
        copies = list(zip(destinations.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._rng.shuffle(copies)
        for destination, source, size in copies:
            stream.give(lambda *, to=destination, of=source, size=size: ctypes.memmove(to, of, size))

    def fill(self, stream: Any, staging: Staging, byte: int) -> None:
        stream.give(lambda: ctypes.memset(staging.address, byte, staging.num_bytes))

    def seal(self, stream: Any, table: Table, ticket: int) -> None:
        def seal() -> None:
            for slot, total in self._totals(table).items():
                self._sums[slot] = total
            self._told[ticket] = 0

        stream.give(seal)

    def check(self, stream: Any, table: Table, ticket: int) -> None:
        def check() -> None:
            totals = self._totals(table)
            self._told[ticket] = sum(self._sums.get(slot) != total for slot, total in totals.items())

        stream.give(check)

    @staticmethod
    def _totals(table: Table) -> dict[int, int]:
        rows = table.memory
        columns = zip(rows["slots"], rows["seeds"], rows["wanted"], rows["sums"], strict=True)
        return {slot: (seed + total) % 2**64 for slot, seed, wanted, total in columns if wanted}

    def release(self) -> None:
        self._regions = ()

    def expect(self, ticket: int) -> None:
        self._told.pop(ticket, None)

    def told(self, ticket: int) -> int | None:
        return self._told.get(ticket)


def _sum(start: int, data: bytes) -> int:
    return int.from_bytes(
        hashlib.blake2b(data, digest_size=8, salt=start.to_bytes(8, "little")).digest(), "little"
    )
