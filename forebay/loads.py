"""Loads: from the question "what can be had?" to a planned transfer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import chain
from math import ceil

from forebay.books import Books
from forebay.ids import BlockId, Key, RequestId, TransferId
from forebay.matching import Match, Sources, longest_match
from forebay.requests import MISS, Answer, Held, Hit, NotYet, RequestState
from forebay.stores import Stores
from forebay.transfers import Brings, CopyOrder, Direction, Transfer


class RefusedLoadError(Exception):
    """What the engine accepted cannot be had. Caught by the manager, which lets the request compute."""


class Loads:
    def __init__(self, books: Books, stores: Stores, engine_reserves: bool) -> None:
        self._books = books
        self._stores = stores
        self._engine_reserves = engine_reserves
        self._groups = books.layout.groups
        self._wanted: dict[TransferId, Transfer] = {}  # loads that somebody else may wait for
        self._reserved: dict[RequestId, int] = {}  # blocks that loaded requests will still ask for, until they run
        self._planned = 0
        self._holding_blocks: list[RequestState] = []  # matches that pinned device blocks in this pass
        self._asked_last: RequestState | None = None  # in this pass; None if the engine goes on to others
        self._preempted: list[RequestId] = []  # in this pass
        self._in_the_way: dict[RequestId, int] = {}  # passed over until more blocks than so many are free

    def match(self, state: RequestState, device_tokens: int) -> Answer:
        """What this request can have now. Slots and blocks found are pinned until claim() or let_go()."""
        self._asked_last = state
        if self._in_the_way and self._is_in_the_way(state):
            self.let_go(state)
            return self._not_yet(self._waited_s(state))
        if state.held is not None:
            if self._still_right(state.held, state, device_tokens):
                return state.held.answer
            self.let_go(state)
        books = self._books
        if state.computes:
            self.end_reservation(state.request.id)  # it starts over: the engine has freed the blocks of its load
            return MISS
        if not state.request.may_load:
            return MISS
        if device_tokens % books.layout.alignment_tokens:
            # Copies fill whole blocks; a hit cannot begin in the middle of one.
            return MISS
        if state.request.num_tokens - 1 - device_tokens < books.layout.alignment_tokens:
            # The engine has all that could be had.
            state.still_waits = state.waiting_since = None
            return MISS
        if state.still_waits is not None and state.still_waits():
            waited_s = self._waits(state)
            if waited_s is not None:
                return self._not_yet(waited_s)
        state.still_waits = None
        state.learn_keys(books.layout)
        bridge = self._may_bridge(state, device_tokens)
        found = self._find(state, device_tokens, state.request.num_tokens - 1, bridge)
        if found.tokens < max(1, books.config.min_load_tokens):
            found = Match(0, [], found.gaps)
        reason = self._reason_to_wait(state, found, device_tokens)
        if reason is None:
            if not self._is_out_of_room(found):
                state.waiting_since = None
        else:
            waited_s = self._waits(state)
            if waited_s is not None:
                state.still_waits = partial(reason, state)
                return self._not_yet(waited_s)
            if reason == self._is_crowded:
                return MISS  # it computes rather than wait longer; once there is room it may be offered a load
        return self._hold(state, found, device_tokens).answer

    def claim(
        self,
        state: RequestState,
        table: Sequence[Sequence[BlockId]],
        device_tokens: int,
        tokens: int,
    ) -> Transfer | None:
        """The engine gave the request blocks and accepts `tokens` of what was offered. Plans their load.

        None if there is nothing to copy; RefusedLoadError if what was accepted cannot be had. Either way nothing
        is held any more, and room is reserved for what the request lacks.
        """
        null = self._books.device.null_block
        self._reserved[state.request.id] = self._lacks(state, (len(each) - each.count(null) for each in table))
        held = state.held
        if held is None or held.device_tokens != device_tokens or held.answer.tokens < tokens:
            self.let_go(state)
            raise RefusedLoadError("the engine accepted tokens that it was not offered")
        if tokens < held.answer.tokens:
            held = self._hold_less(state, held, tokens)
        if not held.match.num_copies:
            self.let_go(state)
            return None
        try:
            order = self._order(state, held.match.sources, table)
        except RefusedLoadError:
            self.let_go(state)
            raise
        # The pins of the match become the transfer's. The blocks to be written are the request's own as long as it
        # waits for them; only if it leaves before the copy ends do they have to be pinned.
        state.held = None
        self._planned += 1
        stats = self._books.journal.stats
        stats.hit_tokens += tokens
        stats.hit_blocks += order.num_copies
        stats.moved_blocks += len(order.move_to)
        transfer = self._books.ledger.plan(order, state.request.id)
        transfer.brings = self._brings(state, held.match)
        self._wanted[transfer.id] = transfer
        return transfer

    def let_go(self, state: RequestState) -> None:
        """Unpin what a match holds, if it holds anything."""
        held, state.held = state.held, None
        if held is not None:
            self._unpin(held)

    def _unpin(self, held: Held) -> None:
        if held.slots:
            self._books.pool.unpin(held.slots)
        if held.blocks:
            self._books.device.unpin(held.blocks)
            self._stores.ahead.may_lose(held.blocks)

    def end_pass(self) -> None:
        """The engine's scheduling pass is over. A match that was not followed by an allocation keeps its slots,
        but not device blocks: those pins would take from the engine what it needs to admit the request."""
        holding, self._holding_blocks = self._holding_blocks, []
        for state in holding:
            if state.held is not None and state.held.blocks:
                self.let_go(state)
                state.bridges = False

    def note_stop(self, *, idle: bool) -> None:
        """The engine has gone through its queue; `idle` if nothing runs. The request that it asked about last and
        did not admit is where it stopped. Requests that were loaded may stand behind it, with blocks that only
        they can free: so it is passed over until they run or more blocks are free.

        That is why nobody waits for ever while something is reserved. Loads end, at their deadline if need be.
        What runs ends, or is preempted until nothing runs, and then passed over. If nothing runs, the engine
        stops at somebody: not at one that was loaded, whose room is reserved, and at any other only with more
        free blocks than the last time, so not without end. After that it reaches all that were loaded. Nobody
        else gets a load meanwhile, so their number falls to 0, and the engine is as it would be without loads."""
        stopped_at, self._asked_last = self._asked_last, None
        if not self._reserved:
            self._in_the_way.clear()
        # While others run, the engine keeps its order, except for one that was passed over before: that one does
        # stand before requests that were loaded meanwhile.
        elif stopped_at is not None and not self._engine_reserves and (idle or stopped_at.waited_enough):
            self._in_the_way[stopped_at.request.id] = self._books.device.num_free
        if self._preempted:
            if idle and self._reserved and not self._engine_reserves:
                # They had all that was free, and it was not enough.
                self._in_the_way |= dict.fromkeys(self._preempted, self._books.device.num_blocks)
            self._preempted = []

    def has_moved(self, state: RequestState) -> None:
        """The request was admitted or has left. The engine did not stop at it."""
        self._asked_last = None
        self._in_the_way.pop(state.request.id, None)
        if self._preempted and state.request.id in self._preempted:
            self._preempted.remove(state.request.id)

    def was_preempted(self, state: RequestState) -> None:
        self._preempted.append(state.request.id)

    def stop_waiting_for(self, transfer: Transfer) -> None:
        """The load ended or is not wanted any more: nobody else should wait for its keys."""
        del self._wanted[transfer.id]

    @property
    def reserving(self) -> Set[RequestId]:
        return self._reserved.keys()

    @property
    def in_the_way(self) -> Set[RequestId]:
        return self._in_the_way.keys()

    @property
    def wanted(self) -> Collection[TransferId]:
        return self._wanted.keys()

    def _find(self, state: RequestState, device_tokens: int, limit_tokens: int, bridge: bool) -> Match:
        books = self._books
        device = books.device if bridge else None
        return longest_match(books.layout, state.keys, device_tokens, limit_tokens, books.pool, device)

    def _may_bridge(self, state: RequestState, device_tokens: int) -> bool:
        """Blocks that a gap is bridged from are pinned until they are copied. That must leave the engine room for
        the request itself, or it would wait for blocks that are held on its own behalf."""
        if not state.bridges:
            return False
        missing_tokens = state.request.num_tokens - device_tokens
        wanted = sum(ceil(missing_tokens / group.span_tokens) for group in self._groups)
        # Blocks of its own hit on the device may count as free now and will not when it is admitted.
        return self._books.device.num_free >= self._own_blocks(device_tokens) + 2 * wanted

    def _own_blocks(self, device_tokens: int) -> int:
        """Device blocks of the engine's own hit, at most."""
        return sum(device_tokens // group.span_tokens for group in self._groups)

    def _still_right(self, held: Held, state: RequestState, device_tokens: int) -> bool:
        """Whether a new search would find the same. Engines ask hundreds of times for a request that waits."""
        bridge = self._may_bridge(state, device_tokens)
        on_the_way = self._books.pool.on_the_way
        return (
            not held.blocks  # how many the engine can spare has to be asked again
            and held.device_tokens == device_tokens
            and held.num_tokens == state.request.num_tokens
            and held.epoch == self._books.pool.epoch
            and held.loads_planned == self._planned
            and held.out_of_room == self._is_out_of_room(held.match)  # with room, it may have to wait for others
            and all(self._is_there(key, bridge) for key in held.match.witnesses)
            and not any(self._is_there(key, bridge) or on_the_way(key) for key in held.match.gaps)
        )

    def _is_there(self, key: Key, bridge: bool) -> bool:
        return key in self._books.pool or (bridge and bool(self._books.device.find_run([key], 0, 1)))

    def _reason_to_wait(
        self, state: RequestState, found: Match, device_tokens: int
    ) -> Callable[[RequestState], bool] | None:
        """Why this request should wait, as a question that can be asked again; None if it should not."""
        copies = found.num_copies
        if self._engine_reserves and self._is_out_of_room(found):
            # The engine finds no room for it, and stops asking. Told to wait, it would ask for the next one that
            # waits, and so for all of them in every step.
            return None
        if copies and self._is_crowded(state):
            return self._is_crowded
        if found.sources:
            needs = self._brings(state, found)
            for transfer in self._wanted.values():
                if any(map(Brings.overlaps, transfer.brings, needs)):
                    return lambda _: transfer.id in self._wanted
        on_the_way = self._books.pool.on_the_way
        for key in found.gaps:
            if on_the_way(key):
                return lambda _: on_the_way(key)
        # What it finds on the device leaves the eviction order as well, and shortens the part of it that is safe.
        takes = copies + self._own_blocks(device_tokens)
        if copies and not self._stores.ahead.can_take(state.request.id, takes):
            return lambda _: not self._stores.ahead.can_take(state.request.id, takes)
        return None

    def _is_out_of_room(self, found: Match) -> bool:
        """Whether the engine cannot admit this now, whatever it is told."""
        return found.num_copies > self._books.device.num_free

    def _is_in_the_way(self, state: RequestState) -> bool:
        """Whether the engine stopped at this request, and would again."""
        free = self._in_the_way.get(state.request.id)
        return free is not None and bool(self._reserved) and self._books.device.num_free <= free

    def _is_crowded(self, state: RequestState) -> bool:
        """Whether the device might fill up with requests that were loaded and cannot run for want of blocks. All
        that were promised a load must fit until they run; a single one is always let in. What the request finds
        on the device is not deducted: those blocks may count as free as well."""
        if self._in_the_way and state.request.id != next(iter(self._in_the_way)):
            return True  # the first that is passed over must not wait for ever new loads
        if self._engine_reserves or not self._reserved:
            return False
        nothing = [0] * len(self._groups)
        return self._books.device.num_free < self._lacks(state, nothing) + sum(self._reserved.values())

    def _lacks(self, state: RequestState, has: Iterable[int]) -> int:
        """Blocks that the request will still ask for to compute its prompt, if it has so many in each group."""
        tokens, batch = state.request.num_tokens, self._books.max_batched_tokens
        return sum(max(0, group.most_held(tokens, batch) - n) for group, n in zip(self._groups, has, strict=True))

    def end_reservation(self, request_id: RequestId) -> None:
        """The request has its blocks, or needs none any more."""
        self._reserved.pop(request_id, None)

    def _waits(self, state: RequestState) -> float | None:
        """Seconds waited so far, or None if this request has waited long enough."""
        if state.waited_enough:
            return None
        waited_s = self._waited_s(state)
        if waited_s >= self._books.config.wait_deadline_s:
            state.waited_enough = True
            self._books.journal.stats.waits_given_up += 1
            return None
        return waited_s

    def _waited_s(self, state: RequestState) -> float:
        now = self._books.clock()
        if state.waiting_since is None:
            state.waiting_since = now
        return now - state.waiting_since

    def _not_yet(self, waited_s: float) -> NotYet:
        self._asked_last = None
        self._books.journal.stats.not_yet_answers += 1
        return NotYet(waited_s)

    def _brings(self, state: RequestState, match: Match) -> list[Brings]:
        return [Brings(keys, each.start, each.stop) for keys, each in zip(state.keys, match.sources, strict=True)]

    def _hold(self, state: RequestState, found: Match, device_tokens: int) -> Held:
        books = self._books
        slots = list(chain.from_iterable(each.host for each in found.sources))
        blocks = list(chain.from_iterable(each.device for each in found.sources))
        if slots:
            books.pool.pin(slots)
        if blocks:
            books.device.pin(blocks)
            self._holding_blocks.append(state)
        state.held = Held(
            found,
            Hit(found.tokens, needs_load=bool(slots or blocks)),
            device_tokens,
            state.request.num_tokens,
            books.pool.epoch,
            self._planned,
            self._is_out_of_room(found),
            slots,
            blocks,
        )
        return state.held

    def _hold_less(self, state: RequestState, held: Held, tokens: int) -> Held:
        """The engine accepted only the first tokens of the offer. A window or a recurrent state may need other
        blocks for that, so it is searched again, with the old pins still held."""
        found = self._find(state, held.device_tokens, held.device_tokens + tokens, bridge=bool(held.blocks))
        if found.tokens != tokens:
            self.let_go(state)
            raise RefusedLoadError("the part of the offer that was accepted cannot be had on its own")
        shorter = self._hold(state, found, held.device_tokens)
        self._unpin(held)
        return shorter

    def _order(
        self,
        state: RequestState,
        sources: Sequence[Sources],
        table: Sequence[Sequence[BlockId]],
    ) -> CopyOrder:
        ledger, device = self._books.ledger, self._books.device
        loaded_keys: list[Key] = []
        order = CopyOrder(ledger.next_id(), Direction.LOAD, [], [], [], [], loaded_keys)
        for keys, each, blocks in zip(state.keys, sources, table, strict=True):
            if each.stop > len(blocks):
                raise RefusedLoadError("the engine allocated fewer blocks than it accepted")
            if len(each.host) == each.stop - each.start:
                order.blocks.extend(blocks[each.start : each.stop])
                loaded_keys += keys[each.start : each.stop]
            else:
                order.blocks.extend(map(blocks.__getitem__, each.host_at))
                loaded_keys += map(keys.__getitem__, each.host_at)
                order.move_to.extend(map(blocks.__getitem__, each.device_at))
                order.move_from.extend(each.device)
            order.slots.extend(each.host)
        null = device.null_block
        if null is not None and (null in order.blocks or null in order.move_to):
            raise RefusedLoadError("the engine allocated a null block where a block is needed")
        return order
