"""An engine that serves requests one after another, without computing anything: what is found where, in which
order blocks are taken and freed, and what the real manager makes of that.

It goes through the steps of a real one, and skips those in which nothing can happen: most steps of a request
compute one token in a block that has room. The next request is served when all copies of the one before have
ended.

    admit   the device's own hit; match(), until it is not NotYet; blocks; allocated(); wait for the load
    compute step by step, at most max_batched_tokens in each: blocks are taken before the step, and found by others
            after it; what a step has computed, the manager hears with the next one
    end     finish(), blocks freed tail first; one step more, and further ones until all copies have ended
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from math import ceil
from typing import NamedTuple

from forebay.engine import Progress
from forebay.groups import KVLayout
from forebay.ids import BlockId, Key, Rank, RequestId
from forebay.manager import OffloadManager
from forebay.matching import Match, longest_match
from forebay.plan.device import NULL, PlannedDevice
from forebay.policies import LRU
from forebay.pool import HostPool
from forebay.requests import MISS, NotYet
from forebay.transfers import Outcome, Report

_STEP_S = 0.01


class StepClock:
    """Time by which steps pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class PlannedRequest:
    """Implements forebay.engine.Request."""

    may_load = may_store = True
    event_extra = None

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        output_tokens: int,
        hashes: list[bytes],
        output_hash: Callable[[int], bytes],
    ) -> None:
        """`hashes`: of the full blocks of the prompt. `output_hash`: of the Nth block, if it ends with output."""
        self.id = RequestId(request_id)
        self.hashes = hashes
        self.num_tokens = prompt_tokens
        self.all_tokens = prompt_tokens + max(1, output_tokens)  # an engine gives at least one
        self.computed = 0
        self.table: list[list[BlockId]] = []
        self.dropped: list[int] = []  # by group: blocks before it were let go of
        self._output_hash = output_hash

    def learn_hashes(self, tokens_per_hash: int) -> bool:
        """Of blocks that output has filled. Returns whether there are any."""
        new = range(len(self.hashes), self.num_tokens // tokens_per_hash)
        self.hashes += map(self._output_hash, new)
        return bool(new)

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        return ()


class Served(NamedTuple):
    """What a request had without computing it."""

    device_tokens: int
    host_tokens: int


class SerialEngine:
    def __init__(
        self,
        layout: KVLayout,
        device: PlannedDevice,
        manager: OffloadManager | None,
        clock: StepClock,
        *,
        max_batched_tokens: int,
        report_steps: int,
    ) -> None:
        """`manager` over the same device, or None: there is no host memory. `report_steps`: how many steps after
        the one that they are ordered in copies are reported."""
        self._layout, self._groups = layout, layout.groups
        self._device, self._manager, self._clock = device, manager, clock
        self._batch = max_batched_tokens
        self._copying: deque[list[Report]] = deque([] for _ in range(report_steps))  # by the step they are due in
        self._loaded: set[RequestId] = set()
        self._waits = False  # for a load
        self._moved_share = 0.0  # of the last load: what was copied within the device
        self._nowhere = HostPool(1, LRU(1))

    def fits(self, request: PlannedRequest) -> bool:
        """Whether the device could hold it at all. An engine refuses others."""
        tokens = request.all_tokens - 1
        most = sum(
            ceil(tokens / group.span_tokens) if group.keeps_blocks else group.most_held(tokens, self._batch)
            for group in self._groups
        )
        return most < self._device.num_blocks

    def serve(self, request: PlannedRequest) -> Served:
        """From its arrival to the end of its last copy."""
        keys: list[list[Key]] = [[] for _ in self._groups]
        served: Served | None = None
        while True:
            self._layout.extend_keys(keys, request.hashes)
            found = self._admit(request, keys)
            served = served or found
            if self._run(request, keys):
                break
            self._step()  # it was preempted, and begins anew
        self._step()
        while self._manager is not None and self._manager.has_pending_work():
            self._step()
        return served

    # --- admission -----------------------------------------------------------------------------------

    def _admit(self, request: PlannedRequest, keys: Sequence[Sequence[Key]]) -> Served:
        manager = self._manager
        while True:
            own = longest_match(self._layout, keys, 0, request.num_tokens - 1, self._nowhere, self._device)
            answer = manager.match(request, own.tokens) if manager is not None else MISS
            if not isinstance(answer, NotYet) and self._allocate(request, own, answer.tokens):
                break
            self._step()
        total = request.computed
        if manager is None or not manager.allocated(request, request.table, own.tokens, answer.tokens):
            self._drop_unseen(request)
            return Served(own.tokens, answer.tokens)
        self._waits = True
        while request.id not in self._loaded:
            self._step()
        self._loaded.clear()
        self._waits = False
        for group, blocks, group_keys in zip(self._groups, request.table, keys, strict=True):
            first, stop = group.first_needed(total), total // group.span_tokens
            self._device.cache(blocks[first:stop], group_keys[first:stop])
        self._drop_unseen(request)
        manager.allocated(request, request.table, total, 0)
        moved = round(answer.tokens * self._moved_share)
        return Served(own.tokens + moved, answer.tokens - moved)

    def _allocate(self, request: PlannedRequest, own: Match, more_tokens: int) -> bool:
        """Give it the blocks of the device's own hit, and new ones for what will be loaded behind it."""
        device, total = self._device, own.tokens + more_tokens
        table: list[list[BlockId]] = []
        wanted = 0
        for number, group in enumerate(self._groups):
            blocks = [NULL] * group.first_needed(own.tokens)
            if own.sources:
                blocks += own.sources[number].device
            table.append(blocks)
            wanted += total // group.span_tokens - max(len(blocks), group.first_needed(total))
        used = [block for blocks in table for block in blocks if block != NULL]
        device.use(used)
        taken = device.take(wanted)
        if taken is None:
            device.free(reversed(used))
            return False
        new = iter(taken)
        for group, blocks in zip(self._groups, table, strict=True):
            blocks += [NULL] * (group.first_needed(total) - len(blocks))
            blocks += islice(new, total // group.span_tokens - len(blocks))
        request.table, request.computed = table, total
        request.dropped = [group.first_needed(own.tokens) for group in self._groups]
        return True

    # --- computing -----------------------------------------------------------------------------------

    def _run(self, request: PlannedRequest, keys: Sequence[list[Key]]) -> bool:
        """Compute it to its end. False if it had to give its blocks back before."""
        while True:
            count = min(self._batch, request.num_tokens - request.computed)
            new_blocks = self._grow(request, request.computed + count)
            if new_blocks is None:
                if self._manager is not None:
                    self._manager.preempt(request.id)
                self._free(request)
                return False
            self._order([Progress(request.id, request.computed, new_blocks)])
            self._computed(request, keys, count)
            if request.num_tokens == request.all_tokens:
                if self._manager is not None:
                    self._manager.finish(request.id, request.computed, request.table)
                self._free(request)
                self._hear()
                return True
            self._drop_unseen(request)
            self._hear()
            if count == 1 and not any(self._copying):  # the manager has yet to hear of a longer one
                self._skip(request)

    def _grow(self, request: PlannedRequest, tokens: int) -> list[list[BlockId]] | None:
        missing = [
            max(0, -(-tokens // group.span_tokens) - len(blocks))
            for group, blocks in zip(self._groups, request.table, strict=True)
        ]
        if not any(missing):
            return [[] for _ in missing]
        taken = self._device.take(sum(missing))
        if taken is None:
            return None
        new = iter(taken)
        new_blocks = [list(islice(new, count)) for count in missing]
        for blocks, added in zip(request.table, new_blocks, strict=True):
            blocks += added
        return new_blocks

    def _computed(self, request: PlannedRequest, keys: Sequence[list[Key]], count: int) -> None:
        before, after = request.computed, request.computed + count
        request.computed = after
        if after == request.num_tokens:
            request.num_tokens += 1
        if request.learn_hashes(self._layout.tokens_per_hash):
            self._layout.extend_keys(keys, request.hashes)
        for group, blocks, group_keys in zip(self._groups, request.table, keys, strict=True):
            first, stop = before // group.span_tokens, after // group.span_tokens
            if first < stop:
                self._device.cache(blocks[first:stop], group_keys[first:stop])

    def _skip(self, request: PlannedRequest) -> None:
        """Pass over the steps that compute one token each, in which no block begins or ends, none is dropped, and
        the manager has nothing to do."""
        if self._manager is not None and not self._manager.is_settled:
            return
        at = request.computed
        if at != request.num_tokens - 1:
            return  # there is still prompt left
        until = request.all_tokens - 2  # the step that computes this token is the last
        for group in self._groups:
            span = group.span_tokens
            until = min(until, at + -at % span, at + -(at + 1) % span)
            if not group.needs_whole_prefix and group.first_needed(until) > group.first_needed(at):
                until = bisect_right(range(until), group.first_needed(at), at, key=group.first_needed) - 1
        if until > at:
            if self._manager is not None:
                self._manager.skip_steps(until - at)
            self._clock.now += _STEP_S * (until - at)
            request.computed += until - at
            request.num_tokens += until - at

    def _drop_unseen(self, request: PlannedRequest) -> None:
        """Windows, chunks and states let go of blocks that nothing will read again."""
        for number, group in enumerate(self._groups):
            if group.needs_whole_prefix:
                continue
            blocks, begin = request.table[number], request.dropped[number]
            end = min(group.first_needed(request.computed), len(blocks))
            for i in range(begin, end):
                self._device.free([blocks[i]])
                blocks[i] = NULL
            request.dropped[number] = max(begin, end)

    def _free(self, request: PlannedRequest) -> None:
        for blocks in request.table:
            self._device.free(reversed(blocks))
        request.table, request.computed = [], 0

    # --- steps ---------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One in which nothing is computed."""
        self._order([])
        self._hear()

    def _order(self, progress: Sequence[Progress]) -> None:
        if self._manager is None:
            return
        loads, stores, _, _ = self._manager.step(progress)
        for order in loads:
            self._moved_share = len(order.move_to) / order.num_copies
        self._copying.append([Report(order.id, Rank(0), Outcome.DONE) for order in (*loads, *stores)])

    def _hear(self) -> None:
        self._clock.now += _STEP_S
        if self._manager is None:
            return
        reports = self._copying.popleft()
        if reports or self._waits:  # or nobody has anything to say
            self._loaded.update(self._manager.report(reports).loaded)
