"""Stores: which blocks to copy to the host this step.

Eager: every block, once its tokens are confirmed. Lazy: only blocks that the device is about to evict. Both skip
what is on the host or on the way, both take only as many blocks as there are slots for, and both flush a request
that ends: eager what is left of it, lazy only if the device might reuse it before the next step is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from forebay.books import Books
from forebay.config import Mode
from forebay.events import Stored
from forebay.ids import BlockId, Key, group_of
from forebay.requests import RequestState
from forebay.transfers import CopyOrder, Direction, State, Transfer


class Stores:
    def __init__(self, books: Books, lazy_target: int) -> None:
        self._books = books
        self._target = lazy_target
        self._open: dict[bool, Transfer] = {}  # planned this step and still growing, by keeps_place
        self._ancestry = Ancestry(2 * books.device.num_blocks)

    def advance(self, state: RequestState, confirmed_tokens: int) -> None:
        """Plan the blocks of a running request that have become storable."""
        if confirmed_tokens < state.next_store_tokens or not state.stores or not state.table:
            return
        state.learn_keys(self._books.layout)
        due = []
        for number, group in enumerate(self._books.layout.groups):
            cursor = self._cursor(state, number)
            ready = self._num_ready(state, number, confirmed_tokens)
            if cursor < ready:
                cursor = state.cursors[number] = self._store(state, number, cursor, ready)
            due.append((cursor + 1) * group.span_tokens)
        state.next_store_tokens = min(due)

    def _cursor(self, state: RequestState, number: int) -> int:
        """Where to go on storing. If the last block before that has left the host, everything is looked at again:
        tails leave before heads, and a tail is worth nothing without them."""
        cursor = state.cursors[number]
        pool = self._books.pool
        if cursor and self._books.layout.groups[number].needs_whole_prefix:
            last = state.keys[number][cursor - 1]
            if last not in pool and not pool.on_the_way(last):
                return 0
        return cursor

    def flush(self, state: RequestState, confirmed_tokens: int) -> None:
        """Plan whatever of an ending request is not on the host: its last blocks, blocks whose store failed, and
        blocks that left the host while it ran. Its blocks are still its own; from here on the pins keep them."""
        books = self._books
        if not state.stores or not state.table:
            return
        state.learn_keys(books.layout)
        if books.config.mode is Mode.LAZY:
            for number, group in enumerate(books.layout.groups):
                if group.needs_whole_prefix:
                    self._ancestry.remember(state.keys[number])
            if books.device.num_free >= self._target:
                return  # the walk over the eviction order comes to them in time
        for number in range(len(books.layout.groups)):
            ready = self._num_ready(state, number, confirmed_tokens)
            if ready:
                self._store(state, number, 0, ready)

    def walk_evictions(self) -> None:
        """Lazy mode: plan what the device would evict next, as far as the target reaches."""
        books = self._books
        on_the_way = sum(len(transfer.order.blocks) for transfer in books.ledger if transfer.keeps_place)
        blocks, keys = books.device.next_evictions(max(0, self._target - on_the_way))
        waiting: dict[Key, BlockId] = {}
        for block, key in zip(blocks, keys, strict=True):
            if key is not None:
                waiting.setdefault(key, block)
        todo = books.pool.missing(waiting)
        if on_the_way:
            # The bus is behind. Pinned blocks are blocks the engine cannot take: leave it half of the rest.
            todo = todo[: len(blocks) // 2]
        if not todo:
            return
        candidates = list(waiting.items())
        chosen = [candidates[i] for i in todo]
        wanted = [key for key, _ in chosen]
        parents = [self._ancestry.parent(key) for key in wanted]
        room = self._room_for(wanted, parents)
        # The device evicts tails before heads; stores are committed in chain order, heads first.
        wanted, parents = wanted[:room][::-1], parents[:room][::-1]
        sources = [block for _, block in chosen[:room]][::-1]
        if wanted:
            transfer = self._reserve(wanted, parents, sources, keeps_place=True)
            if books.journal.events_on:
                transfer.events += map(self._lazy_event, wanted, parents)

    def take_planned(self) -> list[Transfer]:
        """What was planned since the last call and is still wanted; it no longer grows."""
        planned = [t for t in self._open.values() if t.state is State.PLANNED]
        self._open = {}
        return planned

    def _num_ready(self, state: RequestState, number: int, confirmed_tokens: int) -> int:
        span = self._books.layout.groups[number].span_tokens
        return min(confirmed_tokens // span, len(state.keys[number]), len(state.table[number]))

    def _store(self, state: RequestState, number: int, start: int, stop: int) -> int:
        """Plan the blocks [start, stop) of a group that are missing on the host. Returns where to go on: `stop`,
        or the first block for which there was no slot."""
        books = self._books
        keys, table = state.keys[number], state.table[number]
        todo = books.pool.missing(keys[start:stop], start)
        if not todo:
            return stop
        if len(todo) == stop - start:
            wanted, blocks = keys[start:stop], table[start:stop]
        else:
            wanted, blocks = [keys[i] for i in todo], [table[i] for i in todo]
        if books.device.keys_of(blocks) != wanted:
            todo, wanted, blocks = self._find_again(keys, todo, blocks)
            if not todo:
                return stop
        group = books.layout.groups[number]
        parents: list[Key | None] | None = None
        if group.needs_whole_prefix:
            parents = [keys[i - 1] if i else None for i in todo]
        room = self._room_for(wanted, parents)
        resume = stop if room == len(todo) else todo[room]
        del todo[room:], wanted[room:], blocks[room:]
        if todo:
            transfer = self._reserve(wanted, parents and parents[:room], blocks, keeps_place=False)
            if books.journal.events_on:
                transfer.events += self._events(state, number, todo)
        return resume

    def _find_again(
        self, keys: Sequence[Key], todo: list[int], blocks: list[BlockId]
    ) -> tuple[list[int], list[Key], list[BlockId]]:
        """Some blocks of the table are not what they were: a window dropped them, or they have no key yet. The
        device may still have the content elsewhere; what it does not have is left out."""
        device = self._books.device
        found: list[tuple[int, Key, BlockId]] = []
        for i, block, has in zip(todo, blocks, device.keys_of(blocks), strict=True):
            if has == keys[i]:
                found.append((i, keys[i], block))
            elif elsewhere := device.find_run(keys, i, i + 1):
                found.append((i, keys[i], elsewhere[0]))
        return [i for i, _, _ in found], [k for _, k, _ in found], [b for _, _, b in found]

    def _room_for(self, keys: Sequence[Key], parents: Sequence[Key | None] | None) -> int:
        pool = self._books.pool
        wanted = len(keys)
        if pool.free >= wanted:
            return wanted
        # Never evict what the new blocks build on: without it they could not be hit.
        keep = {above for above in parents or () if above is not None}
        room = pool.make_room(wanted, keep)
        self._books.journal.stats.stores_without_room += wanted - room
        return room

    def _reserve(
        self,
        keys: list[Key],
        parents: Sequence[Key | None] | None,
        blocks: list[BlockId],
        *,
        keeps_place: bool,
    ) -> Transfer:
        """Take slots, pin both sides and put the pairs on this step's transfer."""
        books = self._books
        slots = books.pool.reserve(keys, parents)
        books.device.pin(blocks)
        transfer = self._open.get(keeps_place)
        if transfer is None or transfer.state is not State.PLANNED:
            order = CopyOrder(books.ledger.next_id(), Direction.STORE, [], [], [], [])
            transfer = self._open[keeps_place] = books.ledger.plan(order, [])
            transfer.keeps_place = keeps_place
        transfer.keys += keys
        transfer.order.blocks.extend(blocks)
        transfer.order.slots.extend(slots)
        return transfer

    def _events(self, state: RequestState, number: int, stored: Sequence[int]) -> Iterator[Stored]:
        """One event for each run of consecutive blocks."""
        span = self._books.layout.groups[number].span_tokens
        keys, request = state.keys[number], state.request
        first = 0
        for i in range(1, len(stored) + 1):
            if i < len(stored) and stored[i] == stored[i - 1] + 1:
                continue
            start, stop = stored[first], stored[i - 1] + 1
            yield Stored(
                keys=keys[start:stop],
                parent=keys[start - 1] if start else None,
                token_ids=request.token_ids(start * span, stop * span),
                tokens_per_block=span,
                group=number,
                extra=request.event_extra,
            )
            first = i

    def _lazy_event(self, key: Key, parent: Key | None) -> Stored:
        """The request that computed the block is gone, and its tokens with it."""
        group = group_of(key)
        span = self._books.layout.groups[group].span_tokens
        return Stored([key], parent, (), span, group)


class Ancestry:
    """Which key builds on which, for the blocks of requests that have ended, until about `size` others ended after
    them. The device's eviction order has only blocks; the chain they came from is not in it."""

    def __init__(self, size: int) -> None:
        self._size = max(1, size)
        self._recent: dict[Key, Key] = {}
        self._older: dict[Key, Key] = {}

    def remember(self, chain: Sequence[Key]) -> None:
        self._recent.update(zip(chain[1:], chain, strict=False))
        if len(self._recent) > self._size:
            self._older, self._recent = self._recent, {}

    def parent(self, key: Key) -> Key | None:
        return self._recent.get(key) or self._older.get(key)
