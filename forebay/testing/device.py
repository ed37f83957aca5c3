"""A device pool small enough to read: the reference for `forebay.engine.DevicePool`."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from forebay.errors import ensure
from forebay.ids import BlockId, Key

NULL = BlockId(0)


class TinyDevicePool:
    """Blocks with reference counts, a free queue in eviction order, and a prefix cache over both.

    A free block keeps its content and its key until it is taken again. Block 0 is the null block.
    """

    null_block = NULL

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._blocks: dict[Key, dict[BlockId, None]] = {}  # a key may be in several blocks
        self._queue: OrderedDict[BlockId, None] = OrderedDict.fromkeys(map(BlockId, range(1, num_blocks)))
        self._turn = {block: int(block) for block in self._queue}  # place in the queue, also while pinned
        self._last_turn = num_blocks
        self._place: set[BlockId] = set()  # taken from the queue by a pin, and used by nobody since
        self.pins: Counter[BlockId] = Counter()  # Forebay's share of the references
        self.evicted: list[Key] = []  # keys lost because their last block was taken

    # --- the contract ------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._queue)

    def pin(self, blocks: Sequence[BlockId]) -> None:
        ensure(len(set(blocks)) == len(blocks), "a block is pinned twice in one call")
        ensure(NULL not in blocks, "the null block is pinned")
        self._place.update(block for block in blocks if block in self._queue)
        self._take_refs(blocks)
        self.pins.update(blocks)

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> int:
        self.pins.subtract(blocks)
        ensure(min(self.pins.values(), default=0) >= 0, "a block is unpinned that was not pinned")
        self.pins += Counter()  # forget zeros
        returning = [block for block in blocks if in_place and block in self._place and self._refs[block] == 1]
        turns = {block: self._turn[block] for block in returning}
        self._drop_refs(blocks)
        if turns:
            self._turn |= turns
            self._queue = OrderedDict.fromkeys(sorted(self._queue, key=self._turn.__getitem__))
        self._place.difference_update(block for block in blocks if block not in self.pins)
        return len(turns)

    def keys_of(self, blocks: Sequence[BlockId]) -> list[Key | None]:
        return list(map(self._keys.__getitem__, blocks))

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        run: list[BlockId] = []
        for key in keys[start:stop]:
            blocks = self._blocks.get(key)
            if not blocks:
                break
            run.append(next(iter(blocks)))
        return run

    def next_evictions(self, count: int) -> tuple[list[BlockId], list[Key | None]]:
        blocks = list(islice(self._queue, count))
        return blocks, self.keys_of(blocks)

    # --- the engine's side -------------------------------------------------------------------------

    def take(self, count: int) -> list[BlockId] | None:
        """`count` blocks for new content, or None if there are not that many; their old keys are gone."""
        if count > len(self._queue):
            return None
        taken = list(islice(self._queue, count))
        for block in taken:
            del self._queue[block]
            self._refs[block] = 1
            self.uncache(block)
        return taken

    def use(self, blocks: Iterable[BlockId]) -> None:
        """A request shares blocks that are cached."""
        blocks = [block for block in blocks if block != NULL]
        self._place.difference_update(blocks)
        self._take_refs(blocks)

    def free(self, blocks: Iterable[BlockId]) -> None:
        """A request lets go of its blocks; the first of them is the first to be taken again."""
        self._drop_refs(block for block in blocks if block != NULL)

    def cache(self, block: BlockId, key: Key) -> None:
        """The block's content is complete and may be shared under this key."""
        ensure(self._keys[block] in (None, key), "a block changes its key while it is in use")
        self._keys[block] = key
        self._blocks.setdefault(key, {})[block] = None

    def uncache(self, block: BlockId) -> None:
        key = self._keys[block]
        if key is None:
            return
        self._keys[block] = None
        del self._blocks[key][block]
        if not self._blocks[key]:
            del self._blocks[key]
            self.evicted.append(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._blocks

    def reset(self) -> None:
        """Forget all keys."""
        for block in range(self.num_blocks):
            self.uncache(BlockId(block))

    def _take_refs(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if not self._refs[block]:
                del self._queue[block]
            self._refs[block] += 1

    def _drop_refs(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            ensure(self._refs[block] > 0, "a block is freed that nobody uses")
            self._refs[block] -= 1
            if not self._refs[block]:
                self._queue[block] = None
                self._last_turn += 1
                self._turn[block] = self._last_turn
                if self._keys[block] is None:  # nothing to keep: take it next
                    self._queue.move_to_end(block, last=False)
                    self._turn[block] = -self._last_turn

    def check(self) -> None:
        free = {block for block in range(1, self.num_blocks) if not self._refs[block]}
        ensure(free == set(self._queue), "the free queue and the reference counts disagree")
        turns = [self._turn[block] for block in self._queue]
        ensure(turns == sorted(turns), "a block is out of turn")
        ensure(all(count <= self._refs[block] for block, count in self.pins.items()), "a pin without a reference")
