"""An engine that is stricter about room than the tiny one, and looks at requests in another order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil
from typing import Any

from forebay.groups import KVLayout
from forebay.ids import BlockId, RequestId
from forebay.testing import TinyRequest
from forebay.testing.device import NULL
from tests.watched import WatchedEngine


def _number(request: TinyRequest) -> int:
    return int(request.id[1:])


class OneQueueEngine(WatchedEngine):
    """Schedules as vLLM does up to 0.30. Whoever is passed over or loaded stands in one queue, in the order in
    which they came, before all that were not looked at yet. The engine takes them in turn and stops at the first
    that it has no room for, though the next may hold the very blocks. What a failed load held is freed when it is
    its request's turn.

    `careful` as vLLM is by default: a request needs room for all of its prompt, and a load also for what others
    lack whose prompt is not computed yet. Otherwise it needs room only for what is loaded or computed first.
    `newest_first` as with priorities: who has a higher one comes first, looked at or not, and here they rise.
    """

    def __init__(
        self, layout: KVLayout, *args: Any, careful: bool = True, newest_first: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(layout, *args, **kwargs)
        self.careful = careful
        self.newest_first = newest_first
        self.put_aside: deque[TinyRequest] = deque()  # those in `loading`, `loaded` and `failed` among them
        self.failed: set[RequestId] = set()
        self._budget = 0

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.put_aside) + len(self.running)

    @property
    def holds_without_running(self) -> bool:
        return super().holds_without_running or bool(self.failed)

    def abort(self, request: TinyRequest) -> None:
        if request not in self.put_aside:
            super().abort(request)
            return
        self.put_aside.remove(request)
        self.loading.pop(request.id, None)
        self.failed.discard(request.id)
        if request in self.loaded:
            self.loaded.remove(request)
        self._end(request)

    def _schedule(self) -> None:
        self._budget, preemptions = self.max_batched_tokens, self.preemptions
        self._told = {each.id: [len(blocks) for blocks in each.table] for each in self.running}
        for request in list(self.running):
            if request in self.running:
                self._budget -= self._schedule_running(request, self._budget)
        if self.preemptions == preemptions:
            self._take_turns()
        self._note_preempted()

    def _take_turns(self) -> None:
        passed: list[TinyRequest] = []
        while self._budget > 0 and len(self.running) < self.max_running and (self.put_aside or self.waiting):
            queue = self._queue()
            request = queue[0]
            admitted = self._take_turn(request)
            if admitted is False:
                break
            queue.popleft()
            if admitted is None or request.waits_for_load:
                passed.append(request)
            else:
                self._budget -= self._start(request, self._budget)
        self.put_aside.extendleft(reversed(passed))

    def _queue(self) -> deque[TinyRequest]:
        if self.newest_first:
            for queue in (self.put_aside, self.waiting):
                in_order = sorted(queue, key=_number, reverse=True)
                queue.clear()
                queue.extend(in_order)
            if self.put_aside and self.waiting:
                return max(self.put_aside, self.waiting, key=lambda queue: _number(queue[0]))
        return self.put_aside or self.waiting

    def _take_turn(self, request: TinyRequest) -> bool | None:
        """As _admit() answers."""
        if request.id in self.loading:
            return None
        if request in self.loaded:
            if not self._has_room(request, request.table, request.computed, loads=False):
                return False
            self.loaded.remove(request)
            self.manager.allocated(request, request.table, request.computed, 0)
            return True
        if request.id in self.failed:
            self.failed.remove(request.id)
            self._free(request)
        admitted = self._admit(request)
        if admitted and request.waits_for_load:
            self.loading[request.id] = request
        return admitted

    def _has_room(self, request: TinyRequest, table: Sequence[Sequence[BlockId]], total: int, loads: bool) -> bool:
        free = self.device.num_free
        if self.careful and self._lacks(request, table) > free:
            return False
        stop = total if loads else min(request.num_tokens, total + self._budget)
        wanted = 0
        for group, blocks in zip(self.layout.groups, table, strict=True):
            wanted += ceil(stop / group.span_tokens) - max(len(blocks), group.first_needed(total))
        if loads and self.careful:
            free -= sum(self._lacks(each, each.table) for each in self._unfinished_prompts())
        return wanted <= free

    def _lacks(self, request: TinyRequest, table: Sequence[Sequence[BlockId]]) -> int:
        most = [group.most_held(request.num_tokens, self.max_batched_tokens) for group in self.layout.groups]
        return sum(
            max(0, count - len(blocks) + blocks.count(NULL)) for count, blocks in zip(most, table, strict=True)
        )

    def _unfinished_prompts(self) -> list[TinyRequest]:
        prefilling = [each for each in self.running if each.computed < each.prompt_tokens]
        return [*prefilling, *self.loading.values(), *self.loaded]

    def _load_failed(self, request: TinyRequest) -> None:
        self.let_down.add(request.id)
        self.failed.add(request.id)
