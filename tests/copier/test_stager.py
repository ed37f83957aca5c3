"""Orders as streams carry them out, in any order that the events allow."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.copier.stager import LANES, Flight, Stager, Work
from forebay.copier.streams import Columns, Event
from forebay.copier.tiles import Tiles
from forebay.transfers import CopyOrder, Direction
from tests.copier.builders import block_bytes, load, make_regions, store
from tests.copier.fake_gpu import WORDS_PER_TILE, FakeGpu

BLOCKS, SLOTS = 12, 16
STAGINGS = st.sampled_from([40, 100, 300, 4096])  # less than a block, a few blocks, all


class FakeSlots:
    """Slots in pieces that touch: nobody may copy over the end of one."""

    def __init__(self, bytes_per_slot: int, slots_per_piece: int = 5) -> None:
        self.bytes_per_slot = bytes_per_slot
        self.memory = np.zeros((SLOTS, bytes_per_slot), dtype=np.uint8)
        self._slots_per_piece = slots_per_piece

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        return (self.memory.ctypes.data + slots * self.bytes_per_slot).astype(np.uint64)

    def pieces(self, slots: np.ndarray) -> np.ndarray:
        return slots // self._slots_per_piece


class Bench:
    """Both directions, over one device."""

    def __init__(self, seed: int, widths: tuple[int, ...] = (64, 24), staging_bytes: int = 300) -> None:
        self.rng = Random(seed)
        self.regions = make_regions(BLOCKS, widths)
        self.gpu = FakeGpu(self.regions, self.rng)
        self.slots = FakeSlots(self.gpu.bytes_per_block)
        staging = {each: self.gpu.staging(LANES * staging_bytes) for each in Direction}
        self.stagers = {each: Stager(self.gpu, self.slots, each, staging[each]) for each in Direction}
        self.tickets = 0

    def issue(self, order: CopyOrder, mark: Event | None, *, seeds: list[int] | None = None) -> Flight:
        rows = len(order.slots)
        columns = Columns.unverified(order.blocks, order.slots)
        if seeds is not None:
            columns = Columns(order.blocks, order.slots, seeds, [1] * rows)
        work = Work(columns, mark, order.move_from, order.move_to)
        self.tickets += 1
        flights = []
        for flight in self.stagers[order.direction].issue(work, self.tickets):
            flights.append(flight)
            self.gpu.run(self.rng.randint(0, 4))
        assert all(flight is flights[0] for flight in flights)
        return flights[0]

    def land(self, flight: Flight) -> int | None:
        assert flight.error is None, flight.error
        assert flight.done is not None
        flight.done.synchronize()
        return self.gpu.told(flight.ticket)

    def block(self, block: int) -> bytes:
        return block_bytes(self.regions, block)

    def slot(self, slot: int) -> bytes:
        return self.slots.memory[slot].tobytes()

    def write(self, block: int, byte: int) -> None:
        for region in self.regions:
            region[block] = byte


@given(seed=st.integers(0, 2**32), widths=st.sampled_from([(8,), (64, 24), (12, 4, 20), (3, 1)]), staging=STAGINGS)
def test_bytes_go_there_and_come_back(seed: int, widths: tuple[int, ...], staging: int) -> None:
    bench = Bench(seed, widths, staging)
    rng = bench.rng
    blocks = rng.sample(range(BLOCKS), rng.randint(1, BLOCKS))
    slots = rng.sample(range(SLOTS), len(blocks))
    before = [bench.block(block) for block in range(BLOCKS)]
    seeds = [rng.getrandbits(40) for _ in blocks]
    assert bench.land(bench.issue(store(1, dict(zip(blocks, slots, strict=True))), None, seeds=seeds)) == 0
    assert [bench.slot(slot) for slot in slots] == [before[block] for block in blocks]
    assert [bench.block(block) for block in range(BLOCKS)] == before
    targets = rng.sample(range(BLOCKS), len(blocks))
    assert bench.land(bench.issue(load(2, dict(zip(targets, slots, strict=True))), None, seeds=seeds)) == 0
    expected = dict(enumerate(before)) | {to: before[of] for to, of in zip(targets, blocks, strict=True)}
    assert {block: bench.block(block) for block in range(BLOCKS)} == expected


@given(seed=st.integers(0, 2**32), staging=STAGINGS)
def test_a_store_reads_what_the_engine_has_written_before_the_mark(seed: int, staging: int) -> None:
    bench = Bench(seed, staging_bytes=staging)
    blocks = list(range(6))
    for block in blocks:
        bench.gpu.compute.give(lambda *, block=block: bench.write(block, 200 + block))
    flight = bench.issue(store(1, {block: block for block in blocks}), bench.gpu.mark())
    bench.land(flight)
    assert [set(bench.slot(slot)) for slot in blocks] == [{200 + block} for block in blocks]


@given(seed=st.integers(0, 2**32), staging=STAGINGS)
def test_a_load_writes_after_the_engine_has_read_what_was_there(seed: int, staging: int) -> None:
    bench = Bench(seed, staging_bytes=staging)
    blocks = list(range(6))
    bench.land(bench.issue(store(1, {block + 6: block for block in blocks}), None))
    before = [bench.block(block) for block in blocks]
    read: list[bytes] = []
    for block in blocks:
        bench.gpu.compute.give(lambda *, block=block: read.append(bench.block(block)))
    bench.land(bench.issue(load(2, {block: block for block in blocks}), bench.gpu.mark()))
    assert read == before
    assert [bench.block(block) for block in blocks] == [bench.block(block + 6) for block in blocks]


@given(seed=st.integers(0, 2**32), staging=st.sampled_from([200, 300, 4096]))
def test_moves_read_before_anything_is_written(seed: int, staging: int) -> None:
    bench = Bench(seed, staging_bytes=staging)
    rng = bench.rng
    bench.slots.memory[:] = 7
    own = rng.sample(range(BLOCKS), rng.randint(2, 6))
    loaded = own[: rng.randint(0, 1)]
    moves = {block: rng.choice([0, *own]) for block in own[len(loaded) :]}
    expected = {block: bench.block(block) for block in range(BLOCKS)}
    expected[0] = bytes([99]) * bench.gpu.bytes_per_block
    bench.gpu.compute.give(lambda: bench.write(0, 99))  # computed in the very step that orders the moves
    flight = bench.issue(load(1, {block: slot for slot, block in enumerate(loaded)}, moves), bench.gpu.mark())
    bench.land(flight)
    expected |= {to: expected[of] for to, of in moves.items()}
    expected |= dict.fromkeys(loaded, bytes([7]) * bench.gpu.bytes_per_block)
    assert {block: bench.block(block) for block in range(BLOCKS)} == expected


def test_more_moves_than_fit_go_one_after_the_other_unless_they_overlap() -> None:
    bench = Bench(0, staging_bytes=100)
    before = [bench.block(block) for block in range(BLOCKS)]
    bench.land(bench.issue(load(1, {}, dict.fromkeys(range(5), 11)), bench.gpu.mark()))
    assert [bench.block(block) for block in range(BLOCKS)] == [before[11]] * 5 + before[5:]
    before = [bench.block(block) for block in range(BLOCKS)]
    flight = bench.issue(load(1, {}, {block: block + 1 for block in range(5)}), bench.gpu.mark())
    assert flight.error == "ForebayError: 5 moves at once do not fit into 100 bytes of staging"
    bench.gpu.run(1000)
    assert [bench.block(block) for block in range(BLOCKS)] == before


@given(seed=st.integers(0, 2**32), staging=STAGINGS)
def test_orders_one_after_the_other_share_staging_memory(seed: int, staging: int) -> None:
    bench = Bench(seed, staging_bytes=staging)
    flights = [bench.issue(store(n, {n: n, n + 6: n + 6}), bench.gpu.mark(), seeds=[n, n + 6]) for n in range(6)]
    back = [bench.land(flight) for flight in flights]
    before = [bench.block(block) for block in range(BLOCKS)]
    loads = [bench.issue(load(n, {n: 11 - n, n + 6: 5 - n}), None, seeds=[11 - n, 5 - n]) for n in range(6)]
    back += [bench.land(flight) for flight in loads]
    assert back == [0] * 12
    assert [bench.block(block) for block in range(BLOCKS)] == before[::-1]


@pytest.mark.parametrize("harm", ["flip", "swap", "other key", "never stored"])
def test_wrong_bytes_are_noticed(harm: str) -> None:
    bench = Bench(1)
    bench.land(bench.issue(store(1, {0: 0, 1: 1, 2: 2}), None, seeds=[10, 11, 12]))
    seeds = [10, 11, 12]
    slots = [0, 1, 2]
    if harm == "flip":
        bench.slots.memory[1, 70] ^= 4
    elif harm == "swap":
        bench.slots.memory[[0, 1]] = bench.slots.memory[[1, 0]]
    elif harm == "other key":
        seeds[2] = 13
    else:
        slots[2] = 9
    flight = bench.issue(load(2, dict(zip([5, 6, 7], slots, strict=True))), None, seeds=seeds)
    assert bench.land(flight) == (2 if harm == "swap" else 1)


def test_nothing_is_told_before_the_last_byte_is_there() -> None:
    for seed in range(50):
        bench = Bench(seed)
        flight = bench.issue(store(1, {block: block for block in range(BLOCKS)}), None)
        while bench.gpu.told(flight.ticket) is None:
            assert bench.gpu.run(1)
        assert [bench.slot(block) for block in range(BLOCKS)] == [bench.block(block) for block in range(BLOCKS)]


@given(seed=st.integers(0, 2**32), refused=st.integers(1, 20), direction=st.sampled_from(Direction))
def test_what_was_given_before_a_refusal_has_ended_when_the_flight_has(
    seed: int, refused: int, direction: Direction
) -> None:
    bench = Bench(seed, staging_bytes=200)
    bench.gpu.refused = {refused}
    if direction is Direction.STORE:
        order = store(1, {block: block for block in range(BLOCKS)})
    else:
        order = load(1, {block: block for block in range(4)}, {block: block + 4 for block in range(4)})
    flight = bench.issue(order, bench.gpu.mark())
    assert flight.done is not None
    flight.done.synchronize()
    after = bench.slots.memory.copy()
    assert not any(stream.todo for stream in bench.gpu.copying), "something was still on its way"
    bench.gpu.run(1000)
    assert (bench.slots.memory == after).all()
    if bench.gpu.calls >= refused:
        assert flight.error is not None
        assert "out of luck" in flight.error
        assert bench.gpu.told(flight.ticket) is None


def test_neighbours_travel_together_but_not_over_the_end_of_a_piece() -> None:
    bench = Bench(0, staging_bytes=4096)
    width = bench.gpu.bytes_per_block
    seen: list[int] = []
    copy = bench.gpu.copy

    def watched(stream: object, to: np.ndarray, of: np.ndarray, sizes: np.ndarray) -> None:
        seen.extend(sizes.tolist())
        copy(stream, to, of, sizes)

    bench.gpu.copy = watched  # type: ignore[method-assign]
    bench.land(bench.issue(store(1, {0: 3, 1: 9, 2: 4, 3: 2, 4: 5, 5: 6, 6: 12}), None))
    assert seen == [3 * width, 2 * width, width, width]  # 2-3-4 | 5-6 | 9 | 12


def test_an_order_of_nothing_lands() -> None:
    bench = Bench(0)
    assert bench.land(bench.issue(store(1, {}), bench.gpu.mark())) == 0
    assert bench.land(bench.issue(load(2, {}), bench.gpu.mark())) == 0


@given(
    regions=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 3)).map(
            lambda each: (4096 + 8 * each[0], 8 * (each[1] + each[2]), each[1] * 8 // (each[2] or 1) or 1)
        ),
        min_size=1,
        max_size=5,
    ),
    num_bytes=st.integers(1, 800),
)
def test_tiles_cover_a_block_once(regions: list[tuple[int, int, int]], num_bytes: int) -> None:
    tiles = Tiles.of(regions, WORDS_PER_TILE)
    assert tiles.bytes_per_block == sum(width for _, _, width in regions)
    place = 0
    for _, _, start, length in tiles.table.tolist():
        assert start == place
        place += length * tiles.word_bytes
    assert place == tiles.bytes_per_block
    parts = tiles.parts(num_bytes)
    assert [part.offset for part in parts] == [
        sum(each.num_bytes for each in parts[:n]) for n in range(len(parts))
    ]
    assert sum(part.num_tiles for part in parts) == len(tiles.table)
    assert all(part.num_bytes <= max(num_bytes, WORDS_PER_TILE * tiles.word_bytes) for part in parts)
