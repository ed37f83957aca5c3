"""Every way in which an engine lays out its KV cache, on tensors of exactly those shapes and strides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from forebay.copier.regions import block_regions
from forebay.errors import LayoutError


def storage_of(num_bytes: int) -> torch.Tensor:
    """Random bytes, always the same ones."""
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def view(
    backing: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    offset: int = 0,
) -> torch.Tensor:
    """As engines do it: a typed view of raw memory. Strides and offset in elements."""
    strides = strides or [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return backing.view(dtype).as_strided(shape, strides, offset)


def shapes(regions: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    """Blocks, width, and bytes from one row to the next."""
    return [(region.size(0), region.size(1), region.stride(0)) for region in regions]


def offsets(regions: Sequence[torch.Tensor]) -> list[int]:
    return [region.storage_offset() for region in regions]


def part_of_block(tensor: torch.Tensor, block: int, num_blocks: int, dim: int) -> torch.Tensor:
    kernel_blocks = tensor.size(dim) // num_blocks
    return tensor.narrow(dim, block * kernel_blocks, kernel_blocks)


def seen(tensor: torch.Tensor) -> torch.Tensor:
    """The addresses of all bytes that the tensor sees, in no particular order."""
    item = tensor.element_size()
    addresses = torch.tensor([tensor.data_ptr()])
    for size, stride in [*zip(tensor.shape, tensor.stride(), strict=True), (item, 0)]:
        addresses = (addresses[:, None] + torch.arange(size) * (stride * item or 1)).flatten()
    return addresses


def check_bytes(
    tensors: Sequence[torch.Tensor], regions: Sequence[torch.Tensor], num_blocks: int, dims: Sequence[int]
) -> None:
    """Row b of all regions is what the tensors see of block b, each byte once, and it is the same memory."""
    caches = list(zip(tensors, dims, strict=True))
    for region in regions:
        assert region.dtype == torch.uint8
        assert region.size(0) == num_blocks
        assert region.stride(1) == 1
        assert region.stride(0) >= region.size(1)
        ends = (region.data_ptr() + region.size(1), region.stride(0), region.untyped_storage().data_ptr())
        for other in regions:
            begins = (other.data_ptr(), other.stride(0), other.untyped_storage().data_ptr())
            assert num_blocks == 1 or ends != begins, "two regions that could be one"
    for block in {0, 1, 2, num_blocks // 2, num_blocks - 1} & set(range(num_blocks)):
        wanted = torch.cat([seen(part_of_block(tensor, block, num_blocks, dim)) for tensor, dim in caches])
        got = torch.cat([seen(region[block]) for region in regions])
        assert torch.equal(got.sort().values, wanted.unique())
    # Not only equal addresses: what is written to the regions is read from the tensors.
    for region in regions:
        region.copy_((torch.arange(num_blocks) % 251)[:, None])
    for tensor, dim in caches:
        for block in range(num_blocks):
            part = part_of_block(tensor, block, num_blocks, dim).contiguous()
            assert part.flatten().view(torch.uint8).eq(block % 251).all()


# --- as engines have them ---------------------------------------------------------------------------------


def test_layers_one_after_the_other_are_a_region_each() -> None:
    backing = storage_of(16_777_216)
    layers = [view(backing, torch.float32, (128, 4, 32, 64), offset=i * 1_048_576) for i in range(4)]
    regions = block_regions(layers, 128)
    assert shapes(regions) == [(128, 32_768, 32_768)] * 4
    assert offsets(regions) == [i * 4_194_304 for i in range(4)]
    check_bytes(layers, regions, 128, [0] * 4)


def test_a_storage_per_layer_is_a_region_per_layer() -> None:
    layers = [view(storage_of(128 * 4096), torch.bfloat16, (128, 2, 16, 64)) for _ in range(3)]
    regions = block_regions(layers, 128)
    assert shapes(regions) == [(128, 4096, 4096)] * 3
    assert [region.data_ptr() for region in regions] == [layer.data_ptr() for layer in layers]
    check_bytes(layers, regions, 128, [0] * 3)


def test_groups_on_the_same_bytes_are_one_region() -> None:
    backing = storage_of(2 * 128 * 16_384)
    at = (0, 0, 524_288, 524_288)  # L0 of group 0 and L1 of group 1, L2 and L3
    layers = [view(backing, torch.float32, (128, 2, 32, 64), offset=offset) for offset in at]
    regions = block_regions(layers, 128)
    assert shapes(regions) == [(128, 16_384, 16_384)] * 2
    assert offsets(regions) == [0, 2_097_152]
    check_bytes(layers, regions, 128, [0] * 4)


def test_groups_with_different_blocks_of_tokens_on_the_same_bytes_are_one_region() -> None:
    backing = storage_of(256 * 32_768)
    layers = [
        view(backing, torch.float32, (256, 2, 64, 64), (8192, 4096, 64, 1)),
        view(backing, torch.float32, (256, 2, 32, 128), (8192, 4096, 128, 1)),
    ]
    regions = block_regions(layers, 256)
    assert shapes(regions) == [(256, 32_768, 32_768)]
    check_bytes(layers, regions, 256, [0, 0])


@pytest.mark.parametrize("state_first", [True, False])
def test_of_aliases_the_widest_counts(state_first: bool) -> None:
    backing = storage_of(256 * 8192)
    state = view(backing, torch.int8, (256, 1, 1, 512), (8192, 8192, 8192, 1))
    attention = view(backing, torch.bfloat16, (256, 2, 32, 64))
    caches = [state, attention] if state_first else [attention, state]
    regions = block_regions(caches, 256)
    assert shapes(regions) == [(256, 8192, 8192)]
    check_bytes(caches, regions, 256, [0, 0])


def test_padding_is_in_no_region() -> None:
    state = view(storage_of(256 * 8192), torch.int8, (256, 1, 1, 512), (8192, 512, 512, 1))
    regions = block_regions([state], 256)
    assert shapes(regions) == [(256, 512, 8192)]
    check_bytes([state], regions, 256, [0])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_layers_side_by_side_in_a_packed_block_are_one_region(order: Sequence[int]) -> None:
    page, layers = 2 * 16 * 64, 4
    backing = storage_of(100 * layers * page * 2)
    caches = [
        view(backing, torch.float16, (100, 2, 16, 64), (layers * page, 1024, 64, 1), offset=layer * page)
        for layer in order
    ]
    regions = block_regions(caches, 100)
    assert shapes(regions) == [(100, layers * page * 2, layers * page * 2)]
    check_bytes(caches, regions, 100, [0] * layers)


def test_heads_outside_of_layers_are_still_one_region() -> None:
    heads, layers, page = 4, 3, 16 * 32
    backing = storage_of(50 * heads * layers * page * 2)
    strides = (heads * layers * page, layers * page, 32, 1)
    caches = [
        view(backing, torch.float16, (50, heads, 16, 32), strides, offset=layer * page) for layer in range(layers)
    ]
    regions = block_regions(caches, 50)
    assert shapes(regions) == [(50, heads * layers * page * 2, heads * layers * page * 2)]
    check_bytes(caches, regions, 50, [0] * layers)


def test_a_gap_in_a_packed_block_parts_two_regions_of_one_stride() -> None:
    backing = storage_of(10 * 1000)
    caches = [
        view(backing, torch.uint8, (10, 300), (1000, 1), offset=0),
        view(backing, torch.uint8, (10, 400), (1000, 1), offset=500),
    ]
    regions = block_regions(caches, 10)
    assert (shapes(regions), offsets(regions)) == ([(10, 300, 1000), (10, 400, 1000)], [0, 500])
    check_bytes(caches, regions, 10, [0, 0])


def test_keys_and_values_apart_are_two_regions_per_layer() -> None:
    backing = storage_of(2 * 2 * 128 * 4096)
    page = 16 * 2 * 64
    layers = [view(backing, torch.bfloat16, (2, 128, 16, 2, 64), offset=i * 2 * 128 * page) for i in range(2)]
    regions = block_regions(layers, 128)
    assert shapes(regions) == [(128, 4096, 4096)] * 4
    assert offsets(regions) == [i * 128 * 4096 for i in range(4)]
    check_bytes(layers, regions, 128, [1, 1])


def test_keys_and_values_that_lie_in_the_block_are_one_region_wherever_the_shape_has_them() -> None:
    page = 16 * 2 * 64
    cache = view(storage_of(128 * page * 4), torch.bfloat16, (2, 128, 16, 2, 64), (page, 2 * page, 128, 64, 1))
    regions = block_regions([cache], 128)
    assert shapes(regions) == [(128, page * 4, page * 4)]
    check_bytes([cache], regions, 128, [1])


def test_dimensions_may_lie_in_memory_in_any_order() -> None:
    # Shape says heads after tokens, memory has them before.
    cache = view(storage_of(64 * 4096), torch.float16, (64, 2, 16, 4, 16), (2048, 1024, 16, 256, 1))
    regions = block_regions([cache], 64)
    assert shapes(regions) == [(64, 4096, 4096)]
    check_bytes([cache], regions, 64, [0])


@pytest.mark.parametrize("kernel_blocks", [2, 8])
def test_kernel_blocks_are_put_together_to_whole_blocks(kernel_blocks: int) -> None:
    tokens = 32 // kernel_blocks
    cache = view(storage_of(128 * 8192), torch.bfloat16, (128 * kernel_blocks, 2, tokens, 64))
    regions = block_regions([cache], 128)
    assert shapes(regions) == [(128, 8192, 8192)]
    check_bytes([cache], regions, 128, [0])


def test_kernel_blocks_behind_keys_and_values() -> None:
    cache = view(storage_of(2 * 128 * 4096), torch.bfloat16, (2, 256, 8, 2, 64))
    regions = block_regions([cache], 128)
    assert shapes(regions) == [(128, 4096, 4096)] * 2
    check_bytes([cache], regions, 128, [1])


def test_kernel_blocks_with_gaps_are_several_pieces() -> None:
    cache = view(storage_of(10 * 3 * 100), torch.uint8, (30, 80), (100, 1))
    regions = block_regions([cache], 10)
    assert shapes(regions) == [(10, 80, 300)] * 3
    check_bytes([cache], regions, 10, [0])


def test_latent_attention() -> None:
    backing = storage_of(3 * 128 * 9216 * 4)
    caches = [
        view(backing, torch.float32, (128, 1, 16, 576), (9216, 576, 576, 1), offset=i * 128 * 9216)
        for i in range(3)
    ]
    regions = block_regions(caches, 128)
    assert shapes(regions) == [(128, 36_864, 36_864)] * 3
    check_bytes(caches, regions, 128, [0] * 3)


def test_several_tensors_per_layer_in_one_padded_page() -> None:
    backing = storage_of(2 * 64 * 4096)
    caches = []
    for layer in range(2):
        at = layer * 64 * 4096
        caches.append(view(backing, torch.float16, (64, 3, 128), (2048, 128, 1), offset=at // 2))
        caches.append(view(backing, torch.float32, (64, 4, 16, 8), (1024, 128, 8, 1), offset=(at + 768) // 4))
    regions = block_regions(caches, 64)
    assert shapes(regions) == [(64, 768 + 2048, 4096)] * 2
    check_bytes(caches, regions, 64, [0] * 4)


def test_a_single_block_has_no_distance_to_the_next() -> None:
    backing = storage_of(3 * 512)
    caches = [view(backing, torch.float32, (1, 2, 16), offset=i * 128) for i in range(3)]
    regions = block_regions(caches, 1)
    assert shapes(regions) == [(1, 128, 128)] * 3
    check_bytes(caches, regions, 1, [0] * 3)


def test_aliases_of_a_single_block_are_one_region_whatever_their_strides() -> None:
    backing = storage_of(512)
    caches = [
        view(backing, torch.uint8, (1, 512), (512, 1)),
        view(backing, torch.int8, (1, 1, 1, 256), (8192, 1, 1, 1)),
        view(backing, torch.uint8, (4, 128)),  # kernel blocks
        view(backing, torch.uint8, (2, 1, 256)),
    ]
    regions = block_regions(caches, 1)
    assert shapes(regions) == [(1, 512, 512)]
    check_bytes(caches[:3], regions, 1, [0, 0, 0])


def test_regions_come_in_the_order_of_the_tensors() -> None:
    one, other = storage_of(10 * 64), storage_of(10 * 32)
    caches = [
        view(one, torch.uint8, (10, 24), (64, 1)),
        view(other, torch.uint8, (10, 32)),
        view(one, torch.uint8, (10, 40), (64, 1), offset=24),
    ]
    assert [region.data_ptr() for region in block_regions(caches, 10)] == [one.data_ptr(), other.data_ptr()]
    caches.insert(0, caches.pop(1))
    assert [region.data_ptr() for region in block_regions(caches, 10)] == [other.data_ptr(), one.data_ptr()]


def test_storages_that_touch_are_not_one_region() -> None:
    # No view can reach from one storage into the next, even where their memory is adjacent.
    memory = bytearray(1000)
    parts = [torch.frombuffer(memory, dtype=torch.uint8, count=950, offset=offset) for offset in (0, 50)]
    caches = [part.as_strided((10, 50), (100, 1)) for part in parts]
    regions = block_regions(caches, 10)
    assert shapes(regions) == [(10, 50, 100)] * 2
    check_bytes(caches, regions, 10, [0, 0])


def test_memory_allocated_in_inference_mode() -> None:
    with torch.inference_mode():
        cache = view(storage_of(8 * 64), torch.uint8, (8, 64))
    [region] = block_regions([cache], 8)
    assert region.data_ptr() == cache.data_ptr()


def test_caches_may_come_from_an_iterator() -> None:
    cache = view(storage_of(8 * 64), torch.uint8, (8, 64))
    assert len(block_regions(iter([cache, cache]), 8)) == 1


# --- what cannot be described -----------------------------------------------------------------------------


def refused(caches: Sequence[object], num_blocks: int = 10) -> str:
    with pytest.raises(LayoutError) as error:
        block_regions(caches, num_blocks)  # type: ignore[arg-type]
    line = str(error.value)
    assert "\n" not in line
    return line


def test_a_shape_without_the_blocks() -> None:
    good = view(storage_of(10 * 64), torch.uint8, (10, 64))
    for shape in [(9, 64), (64, 10), (3, 10, 64), (11, 10, 64), (15, 64), (2, 15, 64), (2, 64, 10)]:
        bad = view(storage_of(prod(shape)), torch.uint8, shape)
        line = refused([good, bad])
        assert line.startswith("kv_caches[1]: expected 10 blocks, or a multiple, in dimension 0")
        assert line.endswith(f"got {shape}")


def test_two_blocks_that_could_be_keys_and_values() -> None:
    line = refused([view(storage_of(2 * 4 * 64), torch.uint8, (2, 4, 64))], num_blocks=2)
    assert line.startswith("kv_caches[0]: expected blocks in one dimension only")
    assert line.endswith("got (2, 4, 64)")


def test_the_same_memory_with_different_strides() -> None:
    backing = storage_of(20 * 64)
    state = view(backing, torch.uint8, (10, 128))
    keys_first = view(backing, torch.uint8, (2, 10, 64))
    assert refused([state, keys_first]) == (
        "kv_caches[1]: expected 128 bytes from block to block, as in kv_caches[0] on the same memory, got 64"
    )
    assert refused([keys_first, state]).startswith("kv_caches[1]: expected 64 bytes from block to block")


def test_rows_of_different_strides_that_interleave_without_touching() -> None:
    backing = storage_of(4000)
    wide = view(backing, torch.uint8, (10, 4), (300, 1))
    narrow = view(backing, torch.uint8, (10, 4), (150, 1), offset=10)
    assert "on the same memory" in refused([wide, narrow])


def test_a_byte_that_would_belong_to_two_blocks() -> None:
    backing = storage_of(2000)
    first = view(backing, torch.uint8, (10, 100))
    assert refused([first, view(backing, torch.uint8, (10, 100), offset=50)]) == (
        "kv_caches[1]: expected together with kv_caches[0] at most the 100 bytes from block to block, got 150"
    )
    shifted = view(backing, torch.uint8, (10, 40), (100, 1), offset=210)
    line = refused([view(backing, torch.uint8, (10, 40), (100, 1)), shifted])
    assert line == (
        "kv_caches[1]: expected no bytes of another block of kv_caches[0], got {'offset': 210, 'bytes': 40}"
    )
    reaches_into_next = view(backing, torch.uint8, (10, 40), (100, 1), offset=270)
    assert "no bytes of another block" in refused(
        [view(backing, torch.uint8, (10, 40), (100, 1)), reaches_into_next]
    )


def test_another_storage_on_the_same_memory() -> None:
    backing = storage_of(1000)
    part = torch.frombuffer(backing.numpy().data, dtype=torch.uint8, count=500, offset=500)
    assert part.untyped_storage().data_ptr() == backing.data_ptr() + 500
    caches = [view(backing, torch.uint8, (10, 100)), view(part, torch.uint8, (10, 50))]
    assert refused(caches).startswith("kv_caches[1]: expected 100 bytes from block to block")


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((10, 4, 16), (64, 0, 1)),  # expanded: all heads are one
        ((10, 4, 16), (64, 8, 1)),  # windows that overlap
        ((10, 64), (0, 1)),  # all blocks are one
        ((10, 64), (32, 1)),  # half of a block is also in the next
        ((2, 10, 64), (320, 64, 1)),  # keys end where values have begun
    ],
)
def test_tensors_that_see_a_byte_twice(shape: Sequence[int], strides: Sequence[int]) -> None:
    line = refused([view(storage_of(4000), torch.uint8, shape, strides)])
    assert line.startswith("kv_caches[0]: expected dimensions that lie one inside the other")
    assert f"'strides': {strides}" in line


def test_every_other_element_of_many_is_no_layout() -> None:
    cache = view(storage_of(10 * 20_000), torch.uint8, (10, 20_000))[:, ::2]
    line = refused([cache])
    assert line.startswith("kv_caches[0]: expected at most 4096 pieces of memory per block, not 10000 of 1 bytes")


def test_too_many_pieces_altogether() -> None:
    backing = storage_of(10 * 10_000)
    caches = [view(backing, torch.uint8, (10, 2500), (10_000, 4), offset=offset) for offset in (0, 2)]
    assert refused(caches) == "kv_caches: expected at most 4096 pieces of memory per block, got 5000"


def test_things_that_are_no_cache() -> None:
    cache = view(storage_of(640), torch.uint8, (10, 64))
    assert refused([]) == "kv_caches: expected at least one tensor, got []"
    assert refused([cache, [cache]]) == "kv_caches[1]: expected a tensor, got 'list'"
    assert refused([torch.empty((10, 0))]).endswith("got (10, 0)")
    assert refused([torch.tensor(1)]).endswith("got ()")
    assert refused([cache, torch.empty((10, 4), device="meta")]) == (
        "kv_caches[1]: expected the device of kv_caches[0], cpu, got 'meta'"
    )
    for wrong in (0, -1, 1.0, True, None):
        assert refused([cache], wrong) == (  # type: ignore[arg-type]
            f"num_blocks: expected a whole number, at least 1, got {wrong!r}"
        )


# --- any layout -------------------------------------------------------------------------------------------

DTYPES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.int64]


@dataclass
class Layout:
    num_blocks: int
    tensors: list[torch.Tensor]
    dims: list[int]


def inside(
    rng: Random, backing: torch.Tensor, num_blocks: int, row_bytes: int, start: int, part: int
) -> torch.Tensor:
    """A tensor that sees `part` bytes of every row of `row_bytes` bytes, its inner dimensions in a random order.
    All numbers are multiples of 16."""
    dtype = rng.choice(DTYPES)
    item = dtype.itemsize
    sizes: list[int] = []
    left = part // item
    while left > 1 and len(sizes) < 4:
        size = rng.choice([each for each in range(1, left + 1) if left % each == 0])
        sizes.append(size)
        left //= size
    sizes.append(left)
    strides = [prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    order = list(range(len(sizes)))
    rng.shuffle(order)
    kernel_blocks = rng.choice([1, 2]) if part == row_bytes and part // item % 2 == 0 else 1
    if kernel_blocks == 2:  # only dense rows can be split
        return view(backing, dtype, (2 * num_blocks, part // item // 2), (part // item // 2, 1), start // item)
    return view(
        backing,
        dtype,
        (num_blocks, *(sizes[dim] for dim in order)),
        (row_bytes // item, *(strides[dim] for dim in order)),
        start // item,
    )


def random_layout(rng: Random, num_blocks: int) -> Layout:
    """Some storages, each with some areas of rows. A row has some tensors side by side, with gaps and aliases."""
    layout = Layout(num_blocks, [], [])
    for _ in range(rng.randint(1, 3)):
        areas = [16 * rng.randint(1, 12) for _ in range(rng.randint(1, 3))]
        backing = storage_of(num_blocks * sum(areas))
        at = 0
        for row_bytes in areas:
            if row_bytes % 32 == 0 and rng.random() < 0.3:
                half = row_bytes // 2
                dtype = rng.choice(DTYPES)
                shape = (2, num_blocks * rng.choice([1, 2]), half // dtype.itemsize)
                shape = (*shape[:2], shape[2] * num_blocks // shape[1])
                layout.tensors.append(view(backing, dtype, shape, offset=at // dtype.itemsize))
                layout.dims.append(1)
            else:
                for start, part in parts_of_row(rng, row_bytes):
                    layout.tensors.append(inside(rng, backing, num_blocks, row_bytes, at + start, part))
                    layout.dims.append(0)
            at += num_blocks * row_bytes
    together = list(zip(layout.tensors, layout.dims, strict=True))
    rng.shuffle(together)
    return Layout(num_blocks, [tensor for tensor, _ in together], [dim for _, dim in together])


def parts_of_row(rng: Random, row_bytes: int) -> Iterator[tuple[int, int]]:
    for _ in range(rng.randint(1, 4)):
        start = 16 * rng.randrange(row_bytes // 16)
        yield start, 16 * rng.randint(1, (row_bytes - start) // 16)


@given(seed=st.integers(0, 2**32), num_blocks=st.sampled_from([1, 3, 5, 8]))
def test_rows_of_a_block_are_exactly_what_the_tensors_see_of_it(seed: int, num_blocks: int) -> None:
    layout = random_layout(Random(seed), num_blocks)
    regions = block_regions(layout.tensors, num_blocks)
    check_bytes(layout.tensors, regions, num_blocks, layout.dims)
