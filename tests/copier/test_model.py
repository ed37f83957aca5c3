"""Random orders and faults against plain dicts: after every batch all bytes are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.copier import InjectedFaults
from forebay.copier.faults import GARBAGE, Fates
from forebay.copier.pages import HostPages
from forebay.copier.staged import StagedCopier
from forebay.copier.torch_copier import TorchCopier
from forebay.ids import Rank
from forebay.transfers import CopyOrder, Direction, Outcome
from tests.copier.builders import block_bytes, load, make_regions, run, slot_bytes, store
from tests.copier.fake_gpu import FakeGpu

BLOCKS, SLOTS = 12, 10


@dataclass
class Batch:
    """Orders that may be on their way together: nobody writes what another reads or writes, as pins see to it."""

    rng: Random
    blocks: list[int] = field(default_factory=lambda: list(range(BLOCKS)))
    slots: list[int] = field(default_factory=lambda: list(range(SLOTS)))

    def __post_init__(self) -> None:
        self.rng.shuffle(self.blocks)
        self.rng.shuffle(self.slots)

    def order(self, number: int) -> CopyOrder:
        rng = self.rng
        wrong = rng.random() < 0.05
        pairs = {}
        for _ in range(min(rng.randint(0, 3), len(self.blocks), len(self.slots))):
            pairs[self.blocks.pop()] = self.slots.pop()
        if wrong:
            pairs[rng.choice([-1, BLOCKS])] = 0
        if rng.random() < 0.5:
            return store(number, pairs)
        # Sources may be destinations of other moves of this order, and of the load itself.
        own = [self.blocks.pop() for _ in range(min(rng.randint(0, 4), len(self.blocks)))]
        sources = own + [block for block in pairs if 0 <= block < BLOCKS]
        moves = {block: rng.choice(sources) for block in own if rng.random() < 0.8}
        return load(number, pairs, moves)


@dataclass
class Model:
    device: dict[int, bytes]
    host: dict[int, bytes]

    def carry_out(self, order: CopyOrder, garbage: bytes | None) -> None:
        device, host = dict(self.device), dict(self.host)
        for block, slot in zip(order.blocks, order.slots, strict=True):
            if order.direction is Direction.STORE:
                self.host[slot] = garbage or device[block]
            else:
                self.device[block] = garbage or host[slot]
        for source, block in zip(order.move_from, order.move_to, strict=True):
            self.device[block] = garbage or device[source]


def is_wrong(order: CopyOrder) -> bool:
    return not all(0 <= block < BLOCKS for block in order.blocks)


faults = st.builds(
    InjectedFaults,
    fail_chance=st.sampled_from([0.0, 0.3]),
    only=st.sampled_from([None, "load", "store"]),
    delay_polls=st.sampled_from([0, 2]),
    kill_nth=st.lists(st.integers(1, 12), max_size=2).map(tuple),
    ranks=st.sampled_from([None, (1,), (0, 2)]),
    seed=st.integers(0, 3),
)


Either = TorchCopier | StagedCopier
Make = Callable[[list[torch.Tensor], Rank, InjectedFaults, Random], Either]


def on_the_host(regions: list[torch.Tensor], rank: Rank, faults: InjectedFaults, rng: Random) -> TorchCopier:
    return TorchCopier(regions, SLOTS, rank=rank, faults=faults)


def on_a_device(regions: list[torch.Tensor], rank: Rank, faults: InjectedFaults, rng: Random) -> StagedCopier:
    gpu = FakeGpu(regions, rng)
    pages = HostPages(SLOTS, gpu.bytes_per_block, threads=1)
    assert pages.wait(30)
    sizes = {"load_staging_bytes": rng.choice([150, 300]), "store_staging_bytes": rng.choice([60, 200])}
    return StagedCopier(gpu, pages, rank=rank, faults=faults, few_wait_s=0.001, **sizes)


@pytest.mark.parametrize("make", [on_the_host, on_a_device])
@given(
    seed=st.integers(0, 2**32),
    faults=faults,
    widths=st.sampled_from([(8,), (16, 64), (12, 4, 20), (3, 1)]),
    gap=st.sampled_from([0, 4, 8]),
    batches=st.integers(1, 5),
)
def test_all_bytes_are_where_the_reports_say(
    make: Make, seed: int, faults: InjectedFaults, widths: tuple[int, ...], gap: int, batches: int
) -> None:
    rng = Random(seed)
    regions = make_regions(BLOCKS, widths, gap)
    rank = Rank(1)
    copier = make(regions, rank, faults, rng)
    for slot in range(SLOTS):
        row = copier.pages.row(slot) if isinstance(copier, StagedCopier) else copier.arena[slot]
        row[:] = slot + 100
    garbage = bytes([GARBAGE]) * copier.bytes_per_block
    model = Model(
        {block: block_bytes(regions, block) for block in range(BLOCKS)},
        {slot: slot_bytes(copier, slot) for slot in range(SLOTS)},
    )
    fates = Fates(faults, rank)
    number = 0
    for _ in range(batches):
        batch = Batch(rng)
        orders = [batch.order(number + each) for each in range(rng.randint(1, 5))]
        number += len(orders)
        fated = [fates.draw(order.direction) for order in orders]
        outcomes = run(copier, *orders)
        killed = any(fate.kills for fate in fated)
        for order, fate in zip(orders, fated, strict=True):
            outcome = outcomes[order.id]
            if fate.kills or fate.fails or is_wrong(order):
                assert outcome is Outcome.FAILED
                if is_wrong(order):
                    continue
                # Behind a killed thread an order may have failed before its own fate came to pass.
                if killed and not garbled(order, regions, copier, garbage):
                    assert not fate.kills or sum(each.kills for each in fated) > 1
                    continue
                model.carry_out(order, garbage)
            elif outcome is Outcome.DONE:
                model.carry_out(order, None)
            else:
                assert killed, "nothing fails for no reason"
        assert {block: block_bytes(regions, block) for block in range(BLOCKS)} == model.device
        assert {slot: slot_bytes(copier, slot) for slot in range(SLOTS)} == model.host
    copier.close()


def garbled(order: CopyOrder, regions: list[torch.Tensor], copier: Either, garbage: bytes) -> bool:
    """Whether all that it writes is garbage. If only some is, that is left from an earlier order."""
    if order.direction is Direction.STORE:
        return all(slot_bytes(copier, slot) == garbage for slot in order.slots)
    return all(block_bytes(regions, block) == garbage for block in [*order.blocks, *order.move_to])
