"""Where the bytes of a block are: from the tensors of an engine to rows of plain bytes.

Engines lay out their KV cache in many ways. A copier wants few and wide pieces, and every byte once:

    layer-major     [L0 b0][L0 b1]··  [L1 b0][L1 b1]··      one region per layer
    block-major     [b0 L0|b0 L1|b0 L2][b1 L0|b1 L1|··      one region: the layers of a block lie side by side
    keys first      [K b0][K b1]··  [V b0][V b1]··          two regions per layer
    padded          [b0 conv|b0 ssm|    ][b1 conv|··        one region, without the padding
    aliased         two groups on the same bytes            one region, as wide as the widest

A *piece* is what one tensor sees of every block, as one run of bytes in each. Pieces of equal stride
that touch or overlap are one region.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from forebay.errors import LayoutError, is_whole

_MAX_PIECES = 4096
"""More pieces than this per block are a layout that nobody meant, and copies of a few bytes each."""

_KEYS_AND_VALUES = 2


class _Dimension(NamedTuple):
    """Sorted by stride first: the innermost comes first."""

    stride: int  # in bytes
    size: int


class _Piece(NamedTuple):
    storage: tuple[int, int]  # address and length: only pieces of one storage can be one region
    stride: int  # bytes from one block to the next; 0 if there is only one block
    start: int  # address of its part of block 0
    width: int
    tensor: int  # index of the first tensor that sees it

    @property
    def stop(self) -> int:
        return self.start + self.width

    @property
    def name(self) -> str:
        return _name(self.tensor)


def block_regions(caches: Iterable[torch.Tensor], num_blocks: int) -> list[torch.Tensor]:
    """The memory of the tensors as regions: uint8 views [num_blocks, width] with dense rows. Nothing is copied.

    Row b of all regions together is exactly what the tensors see of block b, each byte once. The bytes between
    rows (padding, other tensors of the same storage) belong to no region. The order is that of the tensors.

    Blocks are dimension 0 of a tensor, or dimension 1 behind the two of keys and values. That dimension may be a
    multiple of num_blocks: engines split their blocks into smaller ones for some kernels. The other dimensions may
    lie in memory in any order and with gaps.

    Raises LayoutError for anything that does not fit this: a wrong guess would mix up the blocks of two prompts.
    """
    if not is_whole(num_blocks) or num_blocks < 1:
        raise LayoutError("num_blocks", num_blocks, "a whole number, at least 1")
    tensors = list(caches)
    if not tensors:
        raise LayoutError("kv_caches", tensors, "at least one tensor")
    pieces: list[_Piece] = []
    for index, tensor in enumerate(tensors):
        _check_tensor(index, tensor, tensors[0])
        pieces += _pieces(index, tensor, num_blocks)
    regions = _merged(pieces, num_blocks)
    _check_apart(regions, num_blocks)
    regions.sort(key=lambda piece: (piece.tensor, piece.start))
    return [_view(tensors[piece.tensor], piece, num_blocks) for piece in regions]


def _name(index: int) -> str:
    return f"kv_caches[{index}]"


def _check_tensor(index: int, tensor: object, first: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(_name(index), type(tensor).__name__, "a tensor")
    if tensor.device != first.device:
        raise LayoutError(_name(index), str(tensor.device), f"the device of {_name(0)}, {first.device}")
    if not tensor.dim() or not tensor.numel():
        raise LayoutError(_name(index), tuple(tensor.shape), "a dimension of blocks, and some bytes in each")


def _block_dimension(index: int, shape: tuple[int, ...], num_blocks: int) -> int:
    first = shape[0] % num_blocks == 0
    second = shape[0] == _KEYS_AND_VALUES and len(shape) > 1 and shape[1] % num_blocks == 0
    if first and second and num_blocks == _KEYS_AND_VALUES:
        raise LayoutError(
            _name(index),
            shape,
            "blocks in one dimension only: with 2 of them, dimension 0 could be blocks or keys and values",
        )
    if not (first or second):
        raise LayoutError(
            _name(index),
            shape,
            f"{num_blocks} blocks, or a multiple, in dimension 0, or in dimension 1 behind 2 of keys and values",
        )
    return 0 if first else 1


def _pieces(index: int, tensor: torch.Tensor, num_blocks: int) -> list[_Piece]:
    """What one tensor sees of every block."""
    item_bytes: int = tensor.element_size()
    shape = tuple(tensor.shape)
    dimensions = [
        _Dimension(stride * item_bytes, size) for stride, size in zip(tensor.stride(), shape, strict=True)
    ]
    blocks = dimensions.pop(_block_dimension(index, shape, num_blocks))
    kernel_blocks = blocks.size // num_blocks
    dimensions.append(_Dimension(blocks.stride, kernel_blocks))
    rows = _Dimension(blocks.stride * kernel_blocks, num_blocks)
    inner = sorted(each for each in dimensions if each.size > 1)

    reach = item_bytes
    for stride, size in sorted([*inner, rows] if num_blocks > 1 else inner):
        if stride < reach:
            raise LayoutError(
                _name(index),
                {"shape": shape, "strides": tuple(tensor.stride())},
                "dimensions that lie one inside the other, so that no byte is seen twice",
            )
        reach += stride * (size - 1)

    width = item_bytes
    while inner and inner[0].stride == width:
        width *= inner.pop(0).size
    if (count := prod(each.size for each in inner)) > _MAX_PIECES:
        raise LayoutError(
            _name(index),
            {"shape": shape, "strides": tuple(tensor.stride())},
            f"at most {_MAX_PIECES} pieces of memory per block, not {count} of {width} bytes",
        )
    storage = tensor.untyped_storage()
    start = storage.data_ptr() + tensor.storage_offset() * item_bytes
    steps = [range(0, each.stride * each.size, each.stride) for each in inner]
    return [
        _Piece(
            storage=(storage.data_ptr(), storage.nbytes()),
            stride=rows.stride if num_blocks > 1 else 0,
            start=start + sum(offsets),
            width=width,
            tensor=index,
        )
        for offsets in product(*steps)
    ]


def _merged(pieces: list[_Piece], num_blocks: int) -> list[_Piece]:
    merged: list[_Piece] = []
    for piece in sorted(pieces):
        last = merged[-1] if merged else None
        if last and (last.storage, last.stride) == (piece.storage, piece.stride) and piece.start <= last.stop:
            width = max(last.stop, piece.stop) - last.start
            if num_blocks > 1 and width > last.stride:
                raise LayoutError(
                    piece.name,
                    width,
                    f"together with {last.name} at most the {last.stride} bytes from block to block",
                )
            merged[-1] = last._replace(width=width, tensor=min(last.tensor, piece.tensor))
        else:
            merged.append(piece)
    if len(merged) > _MAX_PIECES:
        raise LayoutError("kv_caches", len(merged), f"at most {_MAX_PIECES} pieces of memory per block")
    return merged


def _check_apart(regions: list[_Piece], num_blocks: int) -> None:
    """No byte may be in two regions, nor in two blocks. Regions of equal stride may interleave: their rows are
    parts of one row. Where strides differ not even that: block 5 of one would lie in block 2 of the other."""
    regions = sorted(regions, key=lambda piece: piece.start)
    reaching: list[_Piece] = []  # regions that have begun and not ended
    for region in regions:
        reaching = [each for each in reaching if region.start < each.stop + each.stride * (num_blocks - 1)]
        for other in reaching:
            later, earlier = sorted((region, other), key=lambda piece: piece.tensor, reverse=True)
            if region.stride != other.stride:
                raise LayoutError(
                    later.name,
                    later.stride,
                    f"{earlier.stride} bytes from block to block, as in {earlier.name} on the same memory",
                )
            # Where in a row of the other does this one begin, and does it reach into the next one?
            place = (region.start - other.start) % other.stride if num_blocks > 1 else 0
            if place < other.width or place + region.width > other.stride:
                raise LayoutError(
                    later.name,
                    {"offset": later.start - earlier.start, "bytes": later.width},
                    f"no bytes of another block of {earlier.name}",
                )
        reaching.append(region)


def _view(tensor: torch.Tensor, piece: _Piece, num_blocks: int) -> torch.Tensor:
    storage = tensor.untyped_storage()
    stride = max(piece.stride, piece.width)  # of a single block nobody knows the distance to the next
    view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return view.set_(storage, piece.start - storage.data_ptr(), (num_blocks, piece.width), (stride, 1))
