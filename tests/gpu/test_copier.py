"""Real bytes between a real GPU and real pinned memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from forebay.copier import InjectedFaults
from forebay.copier.checksum import Verify
from forebay.copier.cuda import cuda_copier
from forebay.copier.cuda.driver import CudaError, Driver
from forebay.copier.regions import block_regions
from forebay.copier.staged import StagedCopier
from forebay.ids import Key
from forebay.transfers import CopyOrder, Direction, Outcome, Report
from tests.copier.builders import load, poll_until, store

DONE, FAILED, MISMATCH = Outcome.DONE, Outcome.FAILED, Outcome.MISMATCH
BLOCKS, SLOTS = 64, 96
KIB, MIB = 1 << 10, 1 << 20


def keyed(order: CopyOrder) -> CopyOrder:
    return order._replace(keys=[Key(f"{slot:32}".encode()) for slot in order.slots])


def run(copier: StagedCopier, *orders: CopyOrder) -> dict[int, Outcome]:
    for order in orders:
        copier.submit(order)
    reports: list[Report] = poll_until(copier, lambda reports: len(reports) >= len(orders))  # type: ignore[arg-type]
    assert sorted(report.transfer_id for report in reports) == sorted(order.id for order in orders)
    return {report.transfer_id: report.outcome for report in reports}


Make = Callable[..., tuple[list[torch.Tensor], StagedCopier]]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[StagedCopier] = []

    def make(
        tensors: list[torch.Tensor] | None = None, **settings: object
    ) -> tuple[list[torch.Tensor], StagedCopier]:
        if tensors is None:
            tensors = list(torch.zeros((8, BLOCKS, 64 * KIB), dtype=torch.uint8, device="cuda").unbind(0))
        regions = block_regions(tensors, BLOCKS)
        for region in regions:
            region.copy_(torch.randint(0, 256, region.shape, dtype=torch.uint8, device="cuda"))
        copier = cuda_copier(regions, SLOTS, **settings)  # type: ignore[arg-type]
        made.append(copier)
        assert copier.pages.wait(60)
        return regions, copier

    yield make
    torch.cuda.synchronize()
    for copier in made:
        copier.close()


def content(regions: list[torch.Tensor], block: int) -> bytes:
    return b"".join(region[block].cpu().numpy().tobytes() for region in regions)


# --- layouts ----------------------------------------------------------------------------------------------
# As releases lay them out that cannot run where these tests ran: shapes and strides are theirs.


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda")


def keys_and_values_in_the_block() -> list[torch.Tensor]:
    """[blocks, tokens, heads, keys and values], a tensor per layer: FlashAttention from 0.26 on, NHD."""
    return [zeros(BLOCKS, 16, 8, 256).permute(0, 2, 1, 3) for _ in range(6)]


def keys_first() -> list[torch.Tensor]:
    """[2, blocks, …], a tensor per layer: backends before 0.26, and Triton's."""
    return [zeros(2, BLOCKS, 16, 8, 128) for _ in range(6)]


def cross_layer() -> list[torch.Tensor]:
    """[blocks, layers, tokens, heads, …]: what `prefer_cross_layer_blocks` gives, 0.26 to 0.28."""
    return [zeros(BLOCKS, 6, 16, 8, 256)]


def cross_layer_by_head() -> list[torch.Tensor]:
    """[blocks, heads, layers, tokens, …]: the same with HND."""
    return [zeros(BLOCKS, 8, 6, 16, 256)]


def one_allocation() -> list[torch.Tensor]:
    """BLHNC: each layer a view of one allocation in which the blocks come first, 0.29 and newer."""
    whole = zeros(BLOCKS, 6, 8, 16, 256)
    return [whole[:, layer] for layer in range(6)]


def latent() -> list[torch.Tensor]:
    """MLA: 576 numbers for each token."""
    return [zeros(BLOCKS, 16, 576) for _ in range(6)]


def eight_bits_with_scales() -> list[torch.Tensor]:
    """fp8 with an indexer's cache of odd width beside it: words of 4 bytes only."""
    return [zeros(BLOCKS, 64, 656, dtype=torch.uint8), zeros(BLOCKS, 64, 132, dtype=torch.uint8)]


def hybrid() -> list[torch.Tensor]:
    """A page that attention and two states share, padded: conv state, recurrent state, then nothing."""
    page = zeros(BLOCKS, 70_000, dtype=torch.uint8)
    conv = page[:, :6_144].view(torch.bfloat16)
    ssm = page[:, 6_144 : 6_144 + 32_768].view(torch.float32)
    attention = [zeros(BLOCKS, 2, 16, 2, 256) for _ in range(2)]
    return [conv, ssm, *attention]


def kernel_blocks() -> list[torch.Tensor]:
    """Blocks of 64 tokens that a kernel sees as four of 16."""
    return [zeros(4 * BLOCKS, 16, 2, 128) for _ in range(3)]


def odd() -> list[torch.Tensor]:
    return [zeros(BLOCKS, 7, dtype=torch.uint8), zeros(BLOCKS, 1001, dtype=torch.uint8)]


LAYOUTS = [
    keys_and_values_in_the_block,
    keys_first,
    cross_layer,
    cross_layer_by_head,
    one_allocation,
    latent,
    eight_bits_with_scales,
    hybrid,
    kernel_blocks,
    odd,
]


@pytest.mark.parametrize("staging", [64 * MIB, 300 * KIB, 20 * KIB], ids=["all", "some", "parts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_byte_for_byte(
    make: Make, layout: Callable[[], list[torch.Tensor]], staging: int
) -> None:
    regions, copier = make(layout(), load_staging_bytes=staging, store_staging_bytes=staging)
    before = [content(regions, block) for block in range(BLOCKS)]
    slots = torch.randperm(SLOTS)[:BLOCKS].tolist()
    assert run(copier, keyed(store(1, dict(enumerate(slots))))) == {1: DONE}
    assert [copier.pages.row(slot).tobytes() for slot in slots] == before
    for region in regions:
        region.fill_(0x5A)
    back = torch.randperm(BLOCKS).tolist()
    assert run(copier, keyed(load(2, {back[block]: slots[block] for block in range(48)}))) == {2: DONE}
    spoiled = b"\x5a" * copier.bytes_per_block
    expected = {back[block]: before[block] if block < 48 else spoiled for block in range(BLOCKS)}
    assert {block: content(regions, block) for block in range(BLOCKS)} == expected


def test_moves(make: Make) -> None:
    regions, copier = make(load_staging_bytes=MIB)
    before = [content(regions, block) for block in range(BLOCKS)]
    run(copier, keyed(store(1, {0: 0})))
    moves = {1: 2, 2: 3, 3: 1, **{block: block - 20 for block in range(30, 50)}}
    assert run(copier, keyed(load(2, {5: 0}, moves))) == {2: DONE}
    expected = {to: before[of] for to, of in moves.items()} | {5: before[0]}
    assert all(content(regions, block) == expected.get(block, before[block]) for block in range(BLOCKS))


# --- order ------------------------------------------------------------------------------------------------


def a_while(milliseconds: float = 2.0) -> None:
    """Keep the engine's stream busy."""
    torch.cuda._sleep(int(milliseconds * 1e6 * 1.7))


def stores_that_came_too_early(copier: StagedCopier, regions: list[torch.Tensor], rounds: int) -> int:
    """The engine writes blocks, slowly; the store that was ordered behind it must have what was written."""
    wrong = 0
    for number in range(rounds):
        value = number % 250 + 1
        a_while()
        for region in regions:
            region[:16] = value
        assert run(copier, store(2 * number, {block: block for block in range(16)})) == {2 * number: DONE}
        torch.cuda.synchronize()
        wrong += any((copier.pages.row(slot) != value).any() for slot in range(16))
    return wrong


def loads_that_came_too_early(copier: StagedCopier, regions: list[torch.Tensor], rounds: int) -> int:
    """The engine still reads blocks, slowly, that a load will write: it must see what was there before."""
    wrong = 0
    for slot in range(16):
        copier.pages.row(slot)[:] = 0xEE
    for number in range(rounds):
        for region in regions:
            region[:16] = 0x11
        torch.cuda.synchronize()
        a_while()
        seen = [region[:16].clone() for region in regions]
        assert run(copier, load(2 * number + 1, {block: block for block in range(16)})) == {2 * number + 1: DONE}
        torch.cuda.synchronize()
        wrong += any((each != 0x11).any().item() for each in seen)
        assert all((region[:16] == 0xEE).all() for region in regions)
    return wrong


@pytest.mark.parametrize("too_early", [stores_that_came_too_early, loads_that_came_too_early])
def test_copies_wait_for_the_engine(
    make: Make,
    too_early: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[..., None],
) -> None:
    regions, copier = make(verify=Verify.OFF)
    rounds = 100
    assert too_early(copier, regions, rounds) == 0
    # And without the wait? Then this test would have seen it.
    monkeypatch.setattr(type(copier), "_mark", lambda self: None)
    wrong = too_early(copier, regions, rounds)
    print(f"{too_early.__name__} without the wait: {wrong} of {rounds}")  # noqa: T201 - for the log
    assert wrong > rounds // 2


def test_memory_that_the_engine_has_freed_and_still_writes_is_not_used(make: Make) -> None:
    _, copier = make()
    for number in range(20):
        freed = [
            torch.empty(1 << size, dtype=torch.int64, device="cuda") for size in range(9, 16) for _ in range(4)
        ]
        a_while(10)
        for each in freed:
            each.fill_(1 << 45)  # an address that nobody has
        del each, freed
        count = 7 * number % BLOCKS + 1
        orders = [keyed(store(number, {block: block for block in range(count)}))]
        assert run(copier, *orders) == {number: DONE}
    torch.cuda.synchronize()


def test_submitting_does_not_block(make: Make) -> None:
    _, copier = make()
    run(copier, keyed(store(1, {block: block for block in range(BLOCKS)})))
    a_while(200)
    copier.submit(keyed(load(2, {block: block for block in range(BLOCKS)})))
    assert copier.poll() == []
    assert not torch.cuda.current_stream().query(), "submitting has waited for the engine's work"
    poll_until(copier, lambda reports: len(reports) == 1)  # type: ignore[arg-type]


# --- failure ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["flip", "reuse", "early"])
def test_what_goes_wrong_in_silence_is_noticed(make: Make, spoil: str) -> None:
    only = "store" if spoil == "flip" else "load"
    _, copier = make(faults=InjectedFaults(fail_chance=1.0, spoil=spoil, only=only))  # type: ignore[arg-type]
    outcomes = run(copier, keyed(store(1, {block: block for block in range(BLOCKS)})))
    assert outcomes == {1: DONE}
    a_while(20)
    assert run(copier, keyed(load(2, {block: block for block in range(BLOCKS)}))) == {2: MISMATCH}


def test_every_flipped_bit_is_noticed(make: Make) -> None:
    _, copier = make()
    run(copier, keyed(store(1, {0: 0})))
    for number in range(64):
        place = (number * 7919 * 64) % copier.bytes_per_block
        copier.pages.row(0)[place] ^= 1 << number % 8
        assert run(copier, keyed(load(2, {1: 0}))) == {2: MISMATCH}, place
        copier.pages.row(0)[place] ^= 1 << number % 8
        assert run(copier, keyed(load(3, {1: 0}))) == {3: DONE}


def test_failures_and_killed_threads(make: Make) -> None:
    regions, copier = make(faults=InjectedFaults(fail_chance=0.3, kill_nth=(5, 11), seed=3))
    before = [content(regions, block) for block in range(BLOCKS)]
    held: dict[int, bytes] = {}
    failed = 0
    for number in range(40):
        block, slot = number % BLOCKS, number % 8
        if number % 2 == 0:
            [outcome] = run(copier, keyed(store(number, {block: slot}))).values()
            held.pop(slot, None)
            if outcome is DONE:
                held[slot] = content(regions, block)
        elif held:
            slot = min(held)
            [outcome] = run(copier, keyed(load(number, {63: slot}))).values()
            if outcome is DONE:
                assert content(regions, 63) == held[slot]
        failed += outcome is FAILED
    assert failed > 5
    assert [content(regions, block) for block in range(40)] == before[:40]


def test_without_a_batched_copy(make: Make) -> None:
    regions, copier = make()
    copier._gpu.driver._batch_copy = None  # type: ignore[attr-defined]
    before = [content(regions, block) for block in range(8)]
    run(copier, keyed(store(1, {block: 2 * block for block in range(8)})))
    assert run(copier, keyed(load(2, {block + 8: 2 * block for block in range(8)}))) == {2: DONE}
    assert [content(regions, block + 8) for block in range(8)] == before


def test_memory_that_cannot_be_pinned(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Driver, address: int, num_bytes: int) -> None:
        raise CudaError("cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)")

    monkeypatch.setattr(Driver, "register", refuse)
    regions, copier = make()
    assert not copier.pages.pinned
    assert "not pinned" in caplog.text
    before = [content(regions, block) for block in range(8)]
    run(copier, keyed(store(1, {block: 2 * block for block in range(8)})))
    assert run(copier, keyed(load(2, {block + 8: 2 * block for block in range(8)}))) == {2: DONE}
    assert [content(regions, block + 8) for block in range(8)] == before


def test_slots_come_while_it_works_and_no_more_memory_than_asked_for() -> None:
    regions = block_regions([zeros(BLOCKS, MIB // 2)], BLOCKS)
    slots = 4096  # 4 GiB
    before = _resident_bytes()
    copier = cuda_copier(regions, slots)
    while not copier.ready:
        time.sleep(0.0005)
    assert copier.ready < slots
    assert run(copier, keyed(store(1, {0: 0}))) == {1: DONE}
    assert copier.pages.wait(120)
    assert (copier.ready, copier.pages.pinned) == (slots, True)
    assert run(copier, keyed(store(2, {1: slots - 1}))) == {2: DONE}
    assert run(copier, keyed(load(3, {2: slots - 1, 3: 0}))) == {3: DONE}
    grown = _resident_bytes() - before
    assert grown < 1.02 * slots * MIB + 200 * MIB
    copier.close()
    assert _resident_bytes() - before < 300 * MIB


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_pinned_while_an_engine_captures_a_graph() -> None:
    """Captures forbid such calls to all threads that do not say otherwise, and are spoilt by them."""
    regions = block_regions([zeros(BLOCKS, MIB // 2)], BLOCKS)
    copier = cuda_copier(regions, 2048)  # 2 GiB
    x, captured = torch.zeros(1024, device="cuda"), 0
    while copier.pages.growing:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(50):
                x += 1
        graph.replay()
        captured += 1
    torch.cuda.synchronize()
    assert captured > 1
    assert x[0].item() == 50 * captured
    assert (copier.ready, copier.pages.pinned) == (2048, True)
    assert run(copier, keyed(store(1, {0: 2047}))) == {1: DONE}
    assert run(copier, keyed(load(2, {1: 2047}))) == {2: DONE}
    copier.close()


def test_it_keeps_still_until_the_engine_has_started() -> None:
    regions = block_regions([zeros(BLOCKS, MIB // 2)], BLOCKS)
    copier = cuda_copier(regions, 2048, waits=True)
    assert not copier.pages.wait(1)
    assert 0 < copier.ready < 2048, "one piece, and no more"
    copier.go_on()
    assert copier.pages.wait(60)
    assert (copier.ready, copier.pages.pinned) == (2048, True)
    assert run(copier, keyed(store(1, {0: 2047}))) == {1: DONE}
    assert run(copier, keyed(load(2, {1: 2047}))) == {2: DONE}
    copier.close()


def test_memory_on_the_device_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    regions = block_regions([zeros(BLOCKS, MIB // 2)], BLOCKS)
    copier = cuda_copier(regions, SLOTS)
    assert copier.pages.wait(60)
    assert run(copier, keyed(store(1, {block: block for block in range(BLOCKS)}))) == {1: DONE}
    del regions
    copier.close()
    torch.cuda.empty_cache()
    assert before - torch.cuda.mem_get_info()[0] < 8 * MIB


def test_close_waits_for_bytes_on_their_way() -> None:
    regions = block_regions([zeros(BLOCKS, MIB // 2)], BLOCKS)
    regions[0].fill_(7)
    copier = cuda_copier(regions, SLOTS)
    copier.pages.wait(60)
    a_while(50)
    for number in range(4):
        some = range(16 * number, 16 * number + 16)
        copier.submit(keyed(CopyOrder(number, Direction.STORE, list(some), list(some), [], [])))  # type: ignore[arg-type]
    copier.close()
    assert {report.outcome for report in copier.poll()} == {DONE}
    copier.close()
