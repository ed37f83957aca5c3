"""How long does a load wait for its first copy, while other threads of the engine compute?

    python bench/first_copy.py --blocks 1000 --busy 1

Python lets one thread run at a time, and who is busy gives his turn away every 5 ms. An engine that takes requests
in hashes their tokens in one thread and schedules in another, so a copier that gives its turn away on the way to
the first copy waits for them. The device here does nothing, in no time; slots are at random. Without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from hashlib import sha256
from random import Random
from typing import Any

import numpy as np
from _about import about, print_about

from forebay.copier.staged import StagedCopier
from forebay.copier.streams import Part, Staging, Table
from forebay.ids import BlockId, Key, Slot, TransferId
from forebay.transfers import CopyOrder, Direction

BLOCK_BYTES = 2 << 20
SLOTS = 30_000
CHUNK_S = 0.0024  # that the bus takes for a chunk


class Event:
    def __init__(self) -> None:
        self._passed_at = time.perf_counter() + CHUNK_S

    def query(self) -> bool:
        return time.perf_counter() >= self._passed_at

    def synchronize(self) -> None:
        pass


class Stream:
    def record(self) -> Event:
        return Event()

    def wait(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Device:
    """Takes everything, and remembers when it was given the first copy."""

    num_blocks = SLOTS
    bytes_per_block = BLOCK_BYTES
    first_copy_at: float | None = None

    def mark(self) -> Event:
        return Event()

    def stream(self, *, urgent: bool) -> Stream:
        return Stream()

    def staging(self, num_bytes: int) -> Staging:
        return Staging(1 << 40, num_bytes)

    def parts(self, num_bytes: int) -> list[Part]:
        return [Part(0, 1, 0, BLOCK_BYTES)]

    def upload(self, stream: object, columns: Any) -> Table:
        return Table(None, len(columns.blocks), True)

    def copy(self, *_: object) -> None:
        if self.first_copy_at is None:
            self.first_copy_at = time.perf_counter()

    def told(self, ticket: int) -> int:
        return 0

    def nothing(self, *_: object) -> None:
        pass

    enter = drop = gather = scatter = fill = seal = check = expect = release = nothing


class Pages:
    slots = ready = SLOTS
    bytes_per_slot = BLOCK_BYTES
    pinned = True

    def addresses(self, slots: Any) -> Any:
        return (slots * BLOCK_BYTES).view(np.uint64)

    def pieces(self, slots: Any) -> Any:
        return slots // 4096

    def close(self) -> None:
        pass


def compute(stop: threading.Event) -> None:
    while not stop.is_set():
        sha256(repr(tuple(range(16))).encode()).digest()


def measure(blocks: int, repeats: int) -> tuple[list[float], list[float]]:
    """Milliseconds from each order to its first copy, and those that submitting took."""
    device, random = Device(), Random(1)
    copier = StagedCopier(device, Pages())  # type: ignore[arg-type]
    keys = [Key(random.randbytes(32)) for _ in range(blocks)]
    waited, submitted = [], []
    for number in range(repeats):
        slots = [Slot(slot) for slot in random.sample(range(SLOTS), blocks)]
        targets = [BlockId(block) for block in random.sample(range(SLOTS), blocks)]
        order = CopyOrder(TransferId(number), Direction.LOAD, targets, slots, [], [], keys)
        device.first_copy_at = None
        started = time.perf_counter()
        copier.submit(order)
        submitted.append((time.perf_counter() - started) * 1e3)
        while not copier.poll():
            time.sleep(0.001)
        assert device.first_copy_at is not None
        waited.append((device.first_copy_at - started) * 1e3)
    copier.close()
    return waited, submitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100, 1000, 6250])
    parser.add_argument("--busy", type=int, default=1, help="threads that compute")
    parser.add_argument("--repeats", type=int, default=60)
    args = parser.parse_args()
    print_about(about(None))
    stop = threading.Event()
    for _ in range(args.busy):
        threading.Thread(target=compute, args=(stop,), daemon=True).start()
    print(f"{'blocks':>8}  {'first copy after, median and worst':>36}  {'submit, median and worst':>28}")
    for blocks in args.blocks:
        waited, submitted = measure(blocks, args.repeats)
        cells = [f"{statistics.median(each):.2f} {max(each):8.2f} ms" for each in (waited, submitted)]
        print(f"{blocks:>8,}  {cells[0]:>36}  {cells[1]:>28}")
    stop.set()


if __name__ == "__main__":
    main()
