"""Stores: which blocks to copy to the host this step.

Eager: every block, once its tokens are confirmed. Lazy: blocks that the device is about to evict; and every block
where the device has so few to spare that those of a request that ends may be gone before the next step is planned,
and the host has many. Both skip what is on the host or on the way, both take only as many blocks as there are
slots for, and both flush what is left of a request that ends, lazy only if the device has few to spare, or if
nothing that it may evict would be lost then.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from sys import maxsize
from typing import cast

from forebay.ahead import Ahead
from forebay.ancestry import Ancestry
from forebay.books import Books
from forebay.config import Mode
from forebay.errors import ensure
from forebay.events import Stored
from forebay.ids import BlockId, Key, RequestId
from forebay.requests import RequestState
from forebay.transfers import CopyOrder, Direction, State, Transfer


class Stores:
    def __init__(self, books: Books, lazy_target: int, requests: Mapping[RequestId, RequestState]) -> None:
        """`requests`: those that have not ended. They are the manager's, and change."""
        self._books = books
        self._requests = requests
        self.ahead = Ahead(books, lazy_target)
        self._open: dict[bool, Transfer] = {}  # planned this step and still growing, by keeps_place
        self._planned = 0  # blocks, ever
        # Lazy mode only:
        self._ancestry = Ancestry(2 * books.device.num_blocks)
        self._refused: set[Key] = set()  # keys that must not be kept, also when their request is gone
        self._most_refused = 2 * books.device.num_blocks  # before it is looked through

    def advance(self, state: RequestState, confirmed_tokens: int) -> bool:
        """Plan the blocks of a running request that have become storable. Returns whether there were any."""
        if confirmed_tokens < state.next_store_tokens or not state.stores or not state.table:
            return False
        planned = self._planned
        state.learn_keys(self._books.layout)
        due = []
        for number, group in enumerate(self._books.layout.groups):
            if self._has_lost_its_head(state, number):
                # Its blocks had to make way for those of others. Storing them again now would push out others in
                # turn, every step; flush() does it when the request ends and its blocks are about to be lost.
                state.next_store_tokens = maxsize
                return self._planned > planned
            ready = self._num_ready(state, number, confirmed_tokens)
            if state.cursors[number] < ready:
                state.cursors[number] = self._store(state, number, state.cursors[number], ready)
            # Where there was no room, it is tried again when the request has grown a bit: to find that there
            # is none, the whole pool has to be looked at.
            patience = ready // 16 if state.cursors[number] < ready else 0
            due.append((ready + 1 + patience) * group.span_tokens)
        state.next_store_tokens = min(due)
        return self._planned > planned

    def room_has_grown(self, states: Iterable[RequestState]) -> None:
        """There are more slots: requests that gave up for want of room try again in the next step. One that has
        lost its head begins anew, if all it lacks fits: nobody is pushed out for it in turn."""
        pool = self._books.pool
        room = pool.free
        for state in states:
            if state.table and state.next_store_tokens == maxsize:
                groups = zip(state.keys, state.table, strict=True)
                lacks = sum(len(pool.missing(keys[: len(blocks)])) for keys, blocks in groups)
                if lacks > room:
                    continue
                room -= lacks
                state.cursors = [0] * len(state.cursors)
            state.next_store_tokens = 0

    def _has_lost_its_head(self, state: RequestState, number: int) -> bool:
        """Whether the block before the next one to store has left the host: a tail is worth nothing without it."""
        cursor, pool = state.cursors[number], self._books.pool
        if not cursor or not self._books.layout.groups[number].needs_whole_prefix:
            return False
        last = state.keys[number][cursor - 1]
        return last not in pool and not pool.on_the_way(last)

    def flush(self, state: RequestState, confirmed_tokens: int) -> None:
        """Plan whatever of an ending request is not on the host: its last blocks, blocks whose store failed, and
        blocks that left the host while it ran. Its blocks are still its own; from here on the pins keep them."""
        books = self._books
        if not state.stores:
            self.refuse(state)
            self.ahead.may_lose(*state.table)
            return
        if not state.table:
            return
        state.learn_keys(books.layout)
        lazy = books.config.mode is Mode.LAZY
        ready = [self._num_ready(state, number, confirmed_tokens) for number in range(len(state.table))]
        if lazy:
            before = len(self._refused)
            self._refused.difference_update(*state.keys)  # somebody who may be kept has the same content
            if len(self._refused) < before:
                self.ahead.look_again()
            for number, group in enumerate(books.layout.groups):
                if group.needs_whole_prefix:
                    self._ancestry.remember(state.keys[number])
            if books.device.num_free >= self.ahead.reach and not self._completes(state, ready):
                # The walk over the eviction order comes to them in time.
                self.ahead.may_lose(*state.table)
                return
        for number, blocks in enumerate(state.table):
            stored = self._store(state, number, 0, ready[number]) if ready[number] else 0
            if lazy:
                self.ahead.let_go(blocks[:stored])
                # Blocks may have a key although nobody confirmed their tokens: of a request that was aborted.
                if any(books.device.keys_of(blocks[stored:])):
                    self.ahead.may_lose(blocks[stored:])

    def _completes(self, state: RequestState, ready: Sequence[int]) -> bool:
        """Whether all in the eviction order is safe, and stays so if the little that is left of this request is
        stored. The rest was as it ran."""
        left = sum(ready) - sum(state.cursors)
        return self.ahead.is_all_safe and any(state.cursors) and left <= self.ahead.step_blocks

    def refuse(self, state: RequestState) -> None:
        """Nothing of this request may be kept, also when only its blocks are left of it. Eager stores look at
        requests and need no reminder; lazy ones look at blocks."""
        books = self._books
        if books.config.mode is not Mode.LAZY:
            return
        state.learn_keys(books.layout)
        for number, keys in enumerate(state.keys):
            told = state.refused[number] if state.refused else 0
            self._refused.update(keys[told:])
        state.refused = [len(keys) for keys in state.keys]
        if len(self._refused) > self._most_refused:
            # What a request that runs has told of may be on the device only later.
            running = [each for each in self._requests.values() if not each.stores]
            later = {key for each in running for keys in each.keys for key in keys}
            self._refused = {key for key in self._refused if key in later or books.device.find_run([key], 0, 1)}
            self._most_refused = 2 * max(books.device.num_blocks, len(self._refused))

    def walk_evictions(self) -> None:
        """Lazy mode: plan what the device would evict next, as far as the target reaches. In most steps of an
        engine that decodes, little has changed there, and nobody looks."""
        books, ahead = self._books, self.ahead
        if not ahead.plan_walk():
            return
        on_the_way = ahead.on_the_way()
        blocks, keys = books.device.next_evictions(max(0, ahead.reach - on_the_way))
        saw_all = len(blocks) == books.device.num_free
        # The device evicts tails before heads; stores are committed in chain order, heads first. So this goes from
        # the far end of the order to its head; of two blocks with one content it takes the one that goes first.
        waiting = dict(zip(reversed(keys), reversed(blocks), strict=True))
        waiting.pop(None, None)
        wanted = cast("list[Key]", list(waiting))
        # No more than the host has slots: or what goes first would make way for what goes later, and in the next
        # walk the other way round, without end.
        beyond = max(0, len(wanted) - books.pool.ready)
        too_far = len(wanted) + on_the_way > books.pool.ready  # also if it is not yet, but with what comes back
        del wanted[:beyond]
        todo = books.pool.missing(wanted)
        if self._refused:
            todo = [i for i in todo if wanted[i] not in self._refused]
        unsafe = len(todo)
        if on_the_way:
            # Pinned blocks are blocks the engine cannot take: leave it what a step takes, or if there is less than
            # that, half of it.
            most = max(len(blocks) // 2, books.device.num_free - ahead.step_blocks)
            todo = todo[max(0, len(todo) - most) :]
        stored = self._store_evictions(wanted, waiting, todo) if todo else 0
        left = unsafe if too_far else unsafe - stored
        ahead.end_walk(blocks, unsafe + beyond, left, saw_all=saw_all, too_far=too_far)

    def _store_evictions(
        self, wanted: Sequence[Key], blocks: Mapping[Key | None, BlockId], todo: Sequence[int]
    ) -> int:
        """Plan as many as there is room for, those that go first before the others. How many that is."""
        keep = {above for i in todo if (above := self._ancestry.parent(wanted[i])) is not None}
        if self._books.pool.free < len(todo):
            keep.update(wanted)  # those of them that are safe already
        room = self._room_for(len(todo), keep)
        todo = todo[len(todo) - room :]
        for chain in self._chains([wanted[i] for i in todo]):
            above = self._ancestry.parent(chain[0])
            transfer = self._reserve(chain, above, [blocks[key] for key in chain], chained=True, keeps_place=True)
            if self._books.journal.events_on:
                transfer.events += self._lazy_events(chain, above)
        return room

    def _chains(self, keys: Sequence[Key]) -> Iterator[list[Key]]:
        """Split into runs of keys each of which builds on the one before."""
        chain: list[Key] = []
        for key in keys:
            if chain and self._ancestry.parent(key) != chain[-1]:
                yield chain
                chain = []
            chain.append(key)
        if chain:
            yield chain

    def take_planned(self) -> list[Transfer]:
        """What was planned since the last call and is still wanted; it no longer grows."""
        planned = [t for t in self._open.values() if t.state is State.PLANNED]
        self._open = {}
        return planned

    def check(self) -> None:
        """Raise InvariantError if all that the device may evict is said to be safe, and something is not."""
        if self._books.config.mode is Mode.LAZY and self.ahead.is_all_safe:
            device = self._books.device
            _, keys = device.next_evictions(device.num_free)
            known = [key for key in keys if key is not None and key not in self._refused]
            ensure(not self._books.pool.missing(known), "blocks are said to be safe that the host does not have")

    def _num_ready(self, state: RequestState, number: int, confirmed_tokens: int) -> int:
        span = self._books.layout.groups[number].span_tokens
        return min(confirmed_tokens // span, len(state.keys[number]), len(state.table[number]))

    def _store(self, state: RequestState, number: int, start: int, stop: int) -> int:
        """Plan the blocks [start, stop) of a group that are missing on the host. Returns where to go on: `stop`,
        or the first block for which there was no slot."""
        books = self._books
        keys, table = state.keys[number], state.table[number]
        group = books.layout.groups[number]
        if not start and group.needs_whole_prefix and books.pool.hold(keys[0], keys[stop - 1]):
            return stop
        todo = books.pool.missing(keys[start:stop], start)
        if not todo:
            return stop
        whole = len(todo) == stop - start
        blocks = table[start:stop] if whole else [table[i] for i in todo]
        if group.drafter or not group.keeps_blocks:
            # The engine may have dropped blocks meanwhile, or vouches for them later than for others.
            wanted = keys[start:stop] if whole else [keys[i] for i in todo]
            if books.device.keys_of(blocks) != wanted:
                todo, blocks = self._find_again(keys, todo, blocks)
        keep = {keys[i - 1] for i in todo if i} if books.pool.free < len(todo) else ()
        room = self._room_for(len(todo), keep)
        resume = stop if room == len(todo) else todo[room]
        for first, last in _spans(todo[:room]):
            chain, at = keys[todo[first] : todo[last - 1] + 1], todo[first]
            above = keys[at - 1] if at else None
            transfer = self._reserve(
                chain, above, blocks[first:last], chained=group.needs_whole_prefix, keeps_place=False
            )
            if books.journal.events_on:
                transfer.events.append(self._event(state, number, at, at + len(chain)))
        return resume

    def _find_again(
        self, keys: Sequence[Key], todo: Sequence[int], blocks: list[BlockId]
    ) -> tuple[list[int], list[BlockId]]:
        """Some blocks of the table are not what they were: a window dropped them, or they have no key yet. The
        device may still have the content elsewhere; what it does not have is left out."""
        device = self._books.device
        found: list[tuple[int, BlockId]] = []
        for i, block, has in zip(todo, blocks, device.keys_of(blocks), strict=True):
            if has == keys[i]:
                found.append((i, block))
            elif elsewhere := device.find_run(keys, i, i + 1):
                found.append((i, elsewhere[0]))
        return [i for i, _ in found], [block for _, block in found]

    def _room_for(self, wanted: int, keep: Container[Key]) -> int:
        """Slots for so many blocks, or as many as there are. What they build on is kept: without it they could
        not be hit."""
        room = self._books.pool.make_room(wanted, keep)
        self._books.journal.stats.stores_without_room += wanted - room
        return room

    def _reserve(
        self, keys: list[Key], above: Key | None, blocks: list[BlockId], *, chained: bool, keeps_place: bool
    ) -> Transfer:
        """Take slots, pin the blocks and put the pairs on this step's transfer."""
        books = self._books
        slots = books.pool.reserve(keys, chained=chained, above=above)
        books.device.pin(blocks)
        transfer = self._open.get(keeps_place)
        if transfer is None or transfer.state is not State.PLANNED:
            order = CopyOrder(books.ledger.next_id(), Direction.STORE, [], [], [], [], [])
            transfer = self._open[keeps_place] = books.ledger.plan(order)
            transfer.keeps_place = keeps_place
        self._planned += len(keys)
        cast("list[Key]", transfer.order.keys).extend(keys)  # nobody was given the order yet
        transfer.order.blocks.extend(blocks)
        transfer.order.slots.extend(slots)
        return transfer

    def _event(self, state: RequestState, number: int, start: int, stop: int) -> Stored:
        span = self._books.layout.groups[number].span_tokens
        keys, request = state.keys[number], state.request
        return Stored(
            keys=keys[start:stop],
            parent=keys[start - 1] if start else None,
            token_ids=request.token_ids(start * span, stop * span),
            tokens_per_block=span,
            group=number,
            start=start,
            extra=request.event_extra,
        )

    def _lazy_events(self, chain: Sequence[Key], above: Key | None) -> Iterator[Stored]:
        """The requests that computed these blocks are gone, and their tokens with them."""
        layout = self._books.layout
        for key in chain:
            group = layout.group_of(key)
            yield Stored([key], above, (), layout.groups[group].span_tokens, group)
            above = key


def _spans(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Cut ascending numbers into runs without a gap: positions (first, one past the last) of each."""
    if not numbers:
        return
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        yield 0, len(numbers)
        return
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield first, i
            first = i
