"""The engine's device pool, without the device: which blocks hold what, and in which order they are taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from forebay.errors import ensure
from forebay.ids import BlockId, Key

NULL = BlockId(0)


class PlannedDevice:
    """Implements forebay.engine.DevicePool as vLLM's block pool does, and `forebay.testing.TinyDevicePool`, which
    is easier to read; this one is for pools of any size.

    Free blocks wait in a queue and keep their content until they are taken from its head. A block without content
    worth keeping goes to the head when it is freed, all others to the tail. Block 0 stands for "nothing here".
    """

    null_block = NULL

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._users = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._first: dict[Key, BlockId] = {}  # where a key is found
        self._others: dict[Key, list[BlockId]] = {}  # blocks with the same key, in the order they came
        self._queue: OrderedDict[BlockId, None] = OrderedDict.fromkeys(map(BlockId, range(1, num_blocks)))
        self._turn = list(range(num_blocks))  # grows along the queue; of a block that is not in it, what it was
        self._last_turn = num_blocks
        self._waiting: set[BlockId] = set()  # taken from the queue by a pin, and used by nobody since

    @property
    def num_free(self) -> int:
        return len(self._queue)

    def pin(self, blocks: Sequence[BlockId]) -> None:
        users, queue = self._users, self._queue
        for block in blocks:
            if not users[block]:
                del queue[block]
                self._waiting.add(block)
            users[block] += 1

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> int:
        waiting = self._waiting
        if not waiting:
            self.free(blocks)
            return 0
        returning = [block for block in blocks if block in waiting and self._users[block] == 1]
        waiting.difference_update(returning)
        if not in_place or not returning:
            self.free(blocks)
            return 0
        back = set(returning)
        self.free([block for block in blocks if block not in back])
        self._put_back(returning)
        return len(returning)

    def keys_of(self, blocks: Sequence[BlockId]) -> list[Key | None]:
        return list(map(self._keys.__getitem__, blocks))

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        run: list[BlockId] = []
        find = self._first.get
        for at in range(start, min(stop, len(keys))):
            block = find(keys[at])
            if block is None:
                break
            run.append(block)
        return run

    def next_evictions(self, count: int) -> tuple[list[BlockId], list[Key | None]]:
        blocks = list(islice(self._queue, count))
        return blocks, self.keys_of(blocks)

    # --- the engine's side -------------------------------------------------------------------------

    def take(self, count: int) -> list[BlockId] | None:
        """`count` blocks for new content, or None if there are not that many. What they held is gone."""
        queue, users, keys = self._queue, self._users, self._keys
        if count > len(queue):
            return None
        taken = [queue.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            users[block] = 1
            if keys[block] is not None:
                self._uncache(block)
        return taken

    def use(self, blocks: Iterable[BlockId]) -> None:
        """A request shares blocks that are cached."""
        users, queue, waiting = self._users, self._queue, self._waiting
        for block in blocks:
            if block != NULL:
                if not users[block]:
                    del queue[block]
                elif waiting:
                    waiting.discard(block)
                users[block] += 1

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Somebody lets go of these blocks; the first of them is the first to be taken again."""
        users, queue, turn, keys = self._users, self._queue, self._turn, self._keys
        for block in blocks:
            if block == NULL:
                continue
            users[block] -= 1
            if not users[block]:
                self._last_turn += 1
                queue[block] = None
                if keys[block] is None:
                    queue.move_to_end(block, last=False)
                    turn[block] = -self._last_turn
                else:
                    turn[block] = self._last_turn

    def cache(self, blocks: Sequence[BlockId], keys: Sequence[Key]) -> None:
        """These blocks are complete, and can be found under these keys. Null blocks are left out."""
        first = self._first
        for block, key in zip(blocks, keys, strict=True):
            if block == NULL:
                continue
            self._keys[block] = key
            if first.setdefault(key, block) != block:
                self._others.setdefault(key, []).append(block)

    def _uncache(self, block: BlockId) -> None:
        key = self._keys[block]
        assert key is not None
        self._keys[block] = None
        others = self._others.get(key)
        if self._first[key] != block:
            assert others is not None
            others.remove(block)
        elif others:
            self._first[key] = others.pop(0)
        else:
            del self._first[key]
        if others is not None and not others:
            del self._others[key]

    def _put_back(self, blocks: Sequence[BlockId]) -> None:
        """Behind those that stood before them, and before those that stood behind them."""
        queue, turn = self._queue, self._turn
        last = max(map(turn.__getitem__, blocks))
        merged = list(blocks)
        for block in queue:
            if turn[block] > last:
                break
            merged.append(block)
        merged.sort(key=turn.__getitem__, reverse=True)
        for block in blocks:
            self._users[block] = 0
        for block in merged:
            queue[block] = None
            queue.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise InvariantError unless the queue, the counts and the keys agree."""
        free = {block for block in range(1, self.num_blocks) if not self._users[block]}
        ensure(free == set(self._queue), "the free queue and the counts disagree")
        turns = [self._turn[block] for block in self._queue]
        ensure(turns == sorted(turns), "a block is out of turn")
        held: dict[Key, set[int]] = {}
        for block, key in enumerate(self._keys):
            if key is not None:
                held.setdefault(key, set()).add(block)
        known = {key: {block, *self._others.get(key, ())} for key, block in self._first.items()}
        ensure(known == held, "blocks are found under other keys than they have")
