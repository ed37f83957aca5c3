"""Regions, orders, and copiers that can be stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Event

import torch

from forebay.copier.arena import Arena
from forebay.copier.staged import StagedCopier
from forebay.copier.torch_copier import TorchCopier
from forebay.ids import BlockId, Slot, TransferId
from forebay.transfers import CopyOrder, Direction, Outcome, Report


def make_regions(num_blocks: int = 8, widths: Sequence[int] = (64, 24), gap: int = 8) -> list[torch.Tensor]:
    """Rows with gaps. Block b of region r is filled with bytes that differ from those of any other."""
    regions = []
    for number, width in enumerate(widths):
        backing = torch.zeros(num_blocks * (width + gap), dtype=torch.uint8)
        region = backing.as_strided((num_blocks, width), (width + gap, 1))
        for block in range(num_blocks):
            region[block] = torch.arange(width) * (number + 3) + block * 29 + 1
        regions.append(region)
    return regions


def block_bytes(regions: Sequence[torch.Tensor], block: int) -> bytes:
    return b"".join(bytes(region[block].tolist()) for region in regions)


def slot_bytes(copier: TorchCopier | StagedCopier, slot: int) -> bytes:
    if isinstance(copier, StagedCopier):
        return copier.pages.row(slot).tobytes()
    return bytes(copier.arena[slot].tolist())


def _order(number: int, direction: Direction, pairs: dict[int, int], moves: dict[int, int] | None) -> CopyOrder:
    """`pairs` from block to slot; `moves` from destination to source."""
    moves = moves or {}
    return CopyOrder(
        TransferId(number),
        direction,
        [BlockId(block) for block in pairs],
        [Slot(slot) for slot in pairs.values()],
        [BlockId(source) for source in moves.values()],
        [BlockId(destination) for destination in moves],
    )


def store(number: int, pairs: dict[int, int]) -> CopyOrder:
    return _order(number, Direction.STORE, pairs, None)


def load(number: int, pairs: dict[int, int], moves: dict[int, int] | None = None) -> CopyOrder:
    return _order(number, Direction.LOAD, pairs, moves)


def poll_until(copier: TorchCopier | StagedCopier, enough: Callable[[list[Report]], bool]) -> list[Report]:
    """The test's own timeout ends this if it never happens."""
    reports: list[Report] = []
    while True:
        reports += copier.poll()
        if enough(reports):
            return reports
        time.sleep(0.001)


def run(copier: TorchCopier | StagedCopier, *orders: CopyOrder) -> dict[int, Outcome]:
    """Submit, wait for all, and see that nothing is reported twice."""
    for order in orders:
        copier.submit(order)
    reports = poll_until(copier, lambda reports: len(reports) >= len(orders))
    assert sorted(report.transfer_id for report in reports) == sorted(order.id for order in orders)
    assert {report.rank for report in reports} == {copier.rank}
    assert copier.poll() == []
    return {report.transfer_id: report.outcome for report in reports}


@contextmanager
def held(monkeypatch: object) -> Iterator[tuple[Event, list[int]]]:
    """Copies wait until the event is set. The list tells which orders were begun."""
    go, begun = Event(), []
    copy = Arena.copy

    def wait_and_copy(self: Arena, order: CopyOrder, sums: dict[int, int]) -> None:
        begun.append(order.id)
        go.wait()
        copy(self, order, sums)

    monkeypatch.setattr(Arena, "copy", wait_and_copy)  # type: ignore[attr-defined]
    try:
        yield go, begun
    finally:
        go.set()  # or the thread would wait for ever
