"""How much of the device's eviction order is safe: what lazy mode knows of it between two walks.

A walk looks at the blocks at the head of the order and stores those that are not on the host. Until the next one
the engine takes blocks, and gives others back. What it takes is told here, so in most steps nobody has to look.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from forebay.books import Books
from forebay.config import Mode
from forebay.ids import BlockId, RequestId
from forebay.transfers import State, Transfer

_LARGE_HOST = 4  # times the device
_SLACK = 8  # of so many parts of the target, the last may be unsafe before the next walk
_GLANCE = 16  # blocks at the head: requests that end put some there that have nothing to lose


class Ahead:
    def __init__(self, books: Books, target: int) -> None:
        """`target`: how many blocks at the head of the order should be safe, and more if loads take many."""
        self._books = books
        self._target = target
        self._slack = target // _SLACK
        self._safe = 0  # blocks that the device may take, in its order, without losing anything
        self._near: set[BlockId] = set()  # those that the last walk saw there, and that nobody has taken since
        self._head: set[BlockId] = set()  # the first of them, as many as may go before the next walk
        self._asked: dict[RequestId, int] = {}  # blocks that loads have asked for since the last walk
        self._load_demand = 0  # the most that they asked for between two walks, of late
        self._admits = False  # the engine has admitted requests since the last step
        self._put_off = False  # there was reason for a walk, and it did not come yet
        self._took = False  # something was taken from the order that the last walk did not know of
        self._unsafe = 0  # blocks that the last walk found unsafe, and that the next one has to see to
        self._free: int | None = None  # blocks in the order after it, and since; None: nobody knows
        self._host: tuple[int, int] | None = None  # what it saw there; None: it has to look again
        # Windows let go of blocks as requests run, and nobody tells.
        self._may_see_all = books.config.mode is Mode.LAZY and all(
            group.keeps_blocks and not group.drafter for group in books.layout.groups
        )
        self._saw_all = False  # it saw all of the order, and whatever came into it since was safe
        self._owed: set[BlockId] = set()  # may not be safe, and no walk has seen them in the order yet
        self._leaving: set[BlockId] = set()  # were safe when their request ended, and likewise

    @property
    def reach(self) -> int:
        """How far the next walk should look."""
        return self._target + self._load_demand

    @property
    def step_blocks(self) -> int:
        """What a step of the engine takes, at most."""
        return self._target // 2

    def on_the_way(self) -> int:
        """Blocks that are pinned out of the order until they are stored."""
        return sum(len(transfer.order.blocks) for transfer in self._books.ledger if transfer.keeps_place)

    # --- what happens between two walks ----------------------------------------------------------------

    def can_take(self, request_id: RequestId, count: int) -> bool:
        """Whether a load may take `count` blocks from the device's order. False if that would lose blocks that can
        be safe in a moment: steps take only what they compute, but a load takes as much as it brings."""
        books = self._books
        if books.config.mode is not Mode.LAZY:
            return True
        self._asked[request_id] = count  # once, however often it asks
        if self.is_all_safe or self._safe >= min(books.device.num_free, count + self._target):
            return True
        soon = self._took or self._sum_asked() > self._load_demand or any(t.keeps_place for t in books.ledger)
        return not soon

    def admitted(self, table: Iterable[Sequence[BlockId]]) -> None:
        """A request has got these blocks, and is about to run, or to wait for a load."""
        self._admits = True
        for blocks in table:
            self.taken(blocks)

    def taken(self, blocks: Sequence[BlockId]) -> None:
        """A request was given these blocks: they have left the device's order, though as many may have come into
        it since."""
        self._owed.difference_update(blocks)  # who has them now tells when he lets go of them
        self._leaving.difference_update(blocks)
        near = self._near.intersection(blocks)
        self._near -= near
        self._safe = max(0, self._safe - len(near))
        self._took = True
        # Of those that were not seen there nobody knows whether they have left the order, or were not in it.
        self._expect_free(-len(near) if len(near) == len(blocks) else None)

    def returned(self, transfer: Transfer, in_place: int) -> None:
        """The blocks of a lazy store are back at the head of the order: safe, or not if it failed. So many of them
        are: requests may have used others meanwhile, and then the next walk looks further."""
        count = len(transfer.order.blocks)
        done = transfer.state is State.DONE
        self._safe = self._safe + count if done else 0
        self._near.update(transfer.order.blocks)
        if done and in_place == count:
            self._expect_free(count)
        else:
            self.look_again()

    def look_again(self) -> None:
        """What the last walk saw is no longer right."""
        self._host = None

    def may_lose(self, *blocks: Sequence[BlockId]) -> None:
        """Somebody lets go of these blocks, and they may not be safe. They come into the order now or steps later:
        engines that schedule ahead free what a step in flight may still write when that has ended."""
        if self._may_see_all and any(blocks):
            self._saw_all = False
            self._owed.update(*blocks)

    def let_go(self, blocks: Sequence[BlockId]) -> None:
        """A request that has ended lets go of these blocks, in the same way, and they are safe as long as the host
        loses nothing."""
        if self._may_see_all:
            self._leaving.update(blocks)

    @property
    def is_pressed(self) -> bool:
        """Whether what requests compute may have to be stored when they end, because a walk would come to it too
        late. Then it is better stored while they run: the device has no blocks to spare for those that are being
        copied. Not on a small host: what is stored early makes way there for what is stored next."""
        device = self._books.device
        if self._books.pool.ready < _LARGE_HOST * device.num_blocks:
            return False
        free = device.num_free + self.on_the_way()  # those come back
        return free < self._target + max(self._load_demand, self._sum_asked())

    def _sum_asked(self) -> int:
        return sum(self._asked.values())

    def _expect_free(self, more: int | None) -> None:
        """The device has so many more blocks in its order, or nobody knows how many."""
        if self._free is not None:
            self._free = None if more is None else self._free + more

    # --- walks -------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether the next step does not walk, if nothing happens until then."""
        if self._books.config.mode is Mode.EAGER or (self.is_all_safe and not self._asked):
            return True
        return self._has_time and not self._put_off and self._is_as_it_was

    @property
    def is_all_safe(self) -> bool:
        """Whether a walk would find nothing, however far it looked."""
        return self._saw_all and self._has_same_host

    @property
    def _is_as_it_was(self) -> bool:
        """Whether the order and the host are as the last walk left them, but for what was told since."""
        return self._free == self._books.device.num_free and self._has_same_host

    @property
    def _has_same_host(self) -> bool:
        return self._host == self._sees_host()

    @property
    def _has_same_head(self) -> bool:
        return not self._head.isdisjoint(self._books.device.next_evictions(_GLANCE)[0])

    def plan_walk(self) -> bool:
        """Once a step: whether a walk comes in this one. Not if it would see what the last one saw, nor if all is
        safe. And not in a step that admits requests, whose first tokens would wait for it, while nearly all that
        should be safe is: hits take blocks out of the order far behind its head. A glance tells if somebody else
        took that."""
        admits, self._admits = self._admits, False
        if not self.is_settled:
            self._put_off = admits and self._has_time and self._has_same_host and self._has_same_head
            if not self._put_off:
                self._load_demand = max(self._sum_asked(), _faded(self._load_demand))
                self._asked.clear()
                return not self.is_all_safe
        self.skip_walks(1)
        return False

    @property
    def _has_time(self) -> bool:
        """Whether nothing is unsafe, or little: requests that decode take a block from time to time, and to look
        each time would take longer than they do."""
        return not (self._unsafe or self._asked) and (not self._took or self._is_nearly_safe)

    @property
    def _is_nearly_safe(self) -> bool:
        return self._safe + self.on_the_way() >= self.reach - self._slack

    def _sees_host(self) -> tuple[int, int]:
        """Changes if the host loses something."""
        return self._books.pool.evictions, self._books.pool.epoch

    def skip_walks(self, count: int) -> None:
        """So many walks do not come. Each would have looked less far than the one before."""
        on_the_way = self.on_the_way()
        for _ in range(count):
            if not self._load_demand:
                return
            self._load_demand = _faded(self._load_demand)
            self._safe = min(self._safe, max(0, self.reach - on_the_way))

    def end_walk(self, blocks: Sequence[BlockId], unsafe: int, left: int, *, saw_all: bool, too_far: bool) -> None:
        """It has seen these blocks, so many of which are not safe, or were not before they were stored; so many
        the next one has to see to. `saw_all`: there are no others in the order. `too_far`: it matters how far the
        next one looks, for the host holds less."""
        self._owed.difference_update(blocks)
        self._leaving.difference_update(blocks)
        if not self._has_same_host:
            self._owed |= self._leaving
            self._leaving.clear()
        self._saw_all = self._may_see_all and saw_all and not left and not self._owed
        self._safe = len(blocks) - unsafe
        self._unsafe = left
        self._host, self._free = None if too_far else self._sees_host(), self._books.device.num_free
        self._took = False
        self._near = set(blocks)
        self._head = set(blocks[: self._slack])


def _faded(load_demand: int) -> int:
    return load_demand - ceil(load_demand / 64)
