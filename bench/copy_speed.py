"""How fast do blocks move between a GPU and the host, next to one large pinned copy in the same run?

    python bench/copy_speed.py [--gigabytes 4] [--repeats 5] [--verify all|off] [--json FILE]

For the layouts of real models: GB/s of loads, of stores, and of both at once, through the copier that an engine
uses, from the order to the report. `pieces` is what the device has of a block side by side; slots are whole
blocks. Slots are drawn at random: with neighbours in one order it is faster still. `DMA alone` copies piece by
piece between device and host, without staging memory: what the driver's batched copy makes of such pieces by
itself. Numbers are medians. `submit` is what an order of 256 blocks costs the engine's thread, `one block` the
time from an order of one block to its report, both in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from forebay.copier.checksum import Verify
from forebay.copier.cuda import cuda_copier
from forebay.copier.cuda.driver import Driver
from forebay.copier.pages import HostPages
from forebay.copier.staged import StagedCopier
from forebay.ids import BlockId, Key, Slot, TransferId
from forebay.transfers import CopyOrder, Direction, Outcome

KIB, MIB = 1 << 10, 1 << 20
BLOCKS_PER_ORDER = 256


class Layout(NamedTuple):
    name: str
    pieces: int
    """Of every block."""
    piece_bytes: int
    least: float | None
    """Share of the large copy that it must reach."""

    @property
    def bytes_per_block(self) -> int:
        return self.pieces * self.piece_bytes


LAYOUTS = (
    Layout("8B, layers side by side", 1, 2 * MIB, 0.95),
    Layout("8B, layer by layer", 32, 64 * KIB, 0.75),
    Layout("8B, keys and values apart", 64, 32 * KIB, 0.60),
    Layout("MLA, 61 layers", 61, 18 * KIB, 0.60),
    Layout("70B TP8, layer by layer", 80, 8 * KIB, 0.60),
    Layout("70B TP8, layers side by side", 1, 640 * KIB, None),
    Layout("hybrid, 12 pages", 12, 1088 * KIB, None),
)


def regions_of(layout: Layout, blocks: int) -> list[torch.Tensor]:
    """Random bytes: zeros move no faster, but would hide a copy that does not happen."""
    memory = torch.randint(0, 256, (layout.pieces, blocks, layout.piece_bytes), dtype=torch.uint8, device="cuda")
    return list(memory.unbind(0))


class Race:
    """One layout, one copier, everything registered."""

    def __init__(self, layout: Layout, total_bytes: int, verify: Verify) -> None:
        self.layout = layout
        self.blocks = max(BLOCKS_PER_ORDER, total_bytes // layout.bytes_per_block)
        self.bytes = self.blocks * layout.bytes_per_block
        self.regions = regions_of(layout, 2 * self.blocks)
        self.copier: StagedCopier = cuda_copier(self.regions, 2 * self.blocks, verify=verify)
        while self.copier.ready < self.copier.slots:
            time.sleep(0.01)
        self._number = 0
        self._submit_s: list[float] = []

    def orders(self, direction: Direction, half: int) -> list[CopyOrder]:
        """All blocks of one half of the device and of the slots, in random pairs; the same for both directions."""
        rng = Random(half)
        first = half * self.blocks
        blocks = rng.sample(range(first, first + self.blocks), self.blocks)
        slots = rng.sample(range(first, first + self.blocks), self.blocks)
        orders = []
        for begin in range(0, self.blocks, BLOCKS_PER_ORDER):
            some = slice(begin, begin + BLOCKS_PER_ORDER)
            self._number += 1
            keys = [Key(slot.to_bytes(32, "little")) for slot in slots[some]]
            orders.append(
                CopyOrder(
                    TransferId(self._number),
                    direction,
                    [BlockId(block) for block in blocks[some]],
                    [Slot(slot) for slot in slots[some]],
                    [],
                    [],
                    keys,
                )
            )
        return orders

    def seconds(self, *directions: Direction) -> float:
        orders = [order for half, each in enumerate(directions) for order in self.orders(each, half)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for order in orders:
            self.copier.submit(order)
        submitted = time.perf_counter()
        left = len(orders)
        while left:
            reports = self.copier.poll()
            assert all(report.outcome is Outcome.DONE for report in reports), reports
            left -= len(reports)
            time.sleep(0.0001)
        self._submit_s.append((submitted - begin) / len(orders))
        return time.perf_counter() - begin

    @property
    def submit_us(self) -> float:
        return statistics.median(self._submit_s) * 1e6

    def one_block_us(self) -> float:
        """From the order of one block to its report."""
        [order, *_] = self.orders(Direction.LOAD, 0)
        one = order._replace(blocks=order.blocks[:1], slots=order.slots[:1], keys=order.keys[:1])
        begin = time.perf_counter()
        self.copier.submit(one)
        while not self.copier.poll():
            time.sleep(0.00002)
        return (time.perf_counter() - begin) * 1e6

    def proves_itself(self) -> None:
        """Store, spoil the device, load: equal bytes, or no number is worth printing."""
        self.seconds(Direction.STORE)
        before = [region[: self.blocks].clone() for region in self.regions]
        for region in self.regions:
            region[: self.blocks] = 0x5A
        self.seconds(Direction.LOAD)
        assert all(
            torch.equal(region[: self.blocks], was) for region, was in zip(self.regions, before, strict=True)
        )

    def dma_alone(self, direction: Direction) -> float:
        """Seconds for the same blocks, piece by piece, by the driver's batched copy."""
        driver, pages = Driver(), self.copier.pages
        stream = torch.cuda.Stream()
        calls = []
        for each in self.orders(direction, 0):
            slots = pages.addresses(np.array(each.slots, dtype=np.int64)).astype(np.int64)
            blocks = np.array(each.blocks, dtype=np.int64)
            on_host = np.concatenate([slots + n * self.layout.piece_bytes for n in range(self.layout.pieces)])
            on_device = np.concatenate([region.data_ptr() + blocks * region.stride(0) for region in self.regions])
            sizes = np.full(len(on_host), self.layout.piece_bytes, dtype=np.uint64)
            to, of = (on_host, on_device) if direction is Direction.STORE else (on_device, on_host)
            calls.append((to.astype(np.uint64), of.astype(np.uint64), sizes))
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for to, of, sizes in calls:
            driver.copy(stream.cuda_stream, to, of, sizes)
        stream.synchronize()
        return time.perf_counter() - begin


def large_copies(total_bytes: int, repeats: int) -> dict[str, float]:
    """GB/s of one pinned copy, each way and both at once."""
    driver = Driver()
    pages = HostPages(
        2, total_bytes, register=driver.register, unregister=driver.unregister, piece_bytes=total_bytes
    )
    pages.wait()
    assert pages.pinned
    device = torch.empty((2, total_bytes), dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    hosts = pages.addresses(np.array([0, 1], dtype=np.int64))
    size = np.array([total_bytes], dtype=np.uint64)

    def seconds(loads: bool, stores: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if loads:
            driver.copy(streams[0].cuda_stream, np.array([device[0].data_ptr()], dtype=np.uint64), hosts[:1], size)
        if stores:
            driver.copy(streams[1].cuda_stream, hosts[1:], np.array([device[1].data_ptr()], dtype=np.uint64), size)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    found = {
        "load": total_bytes / _median(lambda: seconds(True, False), repeats) / 1e9,
        "store": total_bytes / _median(lambda: seconds(False, True), repeats) / 1e9,
        "both": 2 * total_bytes / _median(lambda: seconds(True, True), repeats) / 1e9,
    }
    pages.close()
    return found


def _median(measure: Callable[[], float], repeats: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeats))


def measured(layout: Layout, total_bytes: int, repeats: int, verify: Verify) -> dict[str, Any]:
    race = Race(layout, total_bytes, verify)
    race.proves_itself()
    race.seconds(Direction.STORE, Direction.STORE)  # both halves hold something
    row = {
        "layout": layout.name,
        "pieces": f"{layout.pieces} x {layout.piece_bytes // KIB} KiB",
        "load": race.bytes / _median(lambda: race.seconds(Direction.LOAD), repeats) / 1e9,
        "store": race.bytes / _median(lambda: race.seconds(Direction.STORE), repeats) / 1e9,
        "both": 2 * race.bytes / _median(lambda: race.seconds(Direction.LOAD, Direction.STORE), repeats) / 1e9,
        "dma load": race.bytes / _median(lambda: race.dma_alone(Direction.LOAD), 1) / 1e9,
        "dma store": race.bytes / _median(lambda: race.dma_alone(Direction.STORE), 1) / 1e9,
        "submit us": race.submit_us,
        "one block us": _median(race.one_block_us, 20),
    }
    race.copier.close()
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verify", choices=[each.value for each in Verify], default=Verify.ALL.value)
    parser.add_argument("--layouts", type=int, nargs="*", help="only these, by number from 0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("copy_speed: expected a CUDA device, got none", file=sys.stderr)
        return 2
    torch.cuda.init()
    torch.cuda.current_stream().synchronize()
    torch.ones(1, device="cuda")
    total = int(args.gigabytes * 1e9)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, verify {args.verify}, {args.gigabytes} GB")
    print("batched copy:", "yes" if Driver().has_batch_copy else "no")
    large = large_copies(total, args.repeats)
    print("one large pinned copy, GB/s: " + ", ".join(f"{way} {speed:.1f}" for way, speed in large.items()))
    head = f"{'layout':30} {'pieces':>14} | {'load':>6} {'':>5} {'store':>6} {'':>5} {'both':>6} {'/one':>5} "
    print(head + f"| {'DMA alone':>13} | {'submit':>7} {'one block':>9} | at least")
    rows = []
    for number, layout in enumerate(LAYOUTS):
        if args.layouts is not None and number not in args.layouts:
            continue
        row = measured(layout, total, args.repeats, Verify(args.verify))
        rows.append(row)
        one = max(row["load"], row["store"])
        shares = {way: row[way] / large[way] for way in ("load", "store")}
        kept = layout.least is None or min(shares.values()) >= layout.least
        print(
            f"{row['layout']:30} {row['pieces']:>14} | {row['load']:6.1f} {shares['load']:5.0%} "
            f"{row['store']:6.1f} {shares['store']:5.0%} {row['both']:6.1f} {row['both'] / one:5.2f} "
            f"| {row['dma load']:6.1f} {row['dma store']:6.1f} "
            f"| {row['submit us']:7.0f} {row['one block us']:9.0f} | "
            + ("-" if layout.least is None else f"{layout.least:.0%} {'yes' if kept else 'NO'}"),
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"large": large, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
