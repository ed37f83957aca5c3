"""A tiny engine in memory: what an adapter has to do, on one page, with real bytes.

It schedules like the real ones do: a token budget per step, chunked prefill, prefix caching over the device's own
blocks, preemption when blocks run out, block tables per group from which windows drop what they no longer see. The
"KV" of a block is a digest of its key, so the engine can tell at every use whether the bytes are the right ones.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence
from math import ceil
from random import Random
from zlib import crc32

from forebay.config import OffloadConfig
from forebay.engine import Progress
from forebay.errors import ensure
from forebay.groups import KVLayout
from forebay.ids import BlockId, Key, Rank, RequestId, Slot
from forebay.manager import OffloadManager
from forebay.recording import Recorder
from forebay.requests import NotYet
from forebay.testing.copier import ByteCopier, Memory
from forebay.testing.device import NULL, TinyDevicePool
from forebay.testing.request import ManualClock, TinyRequest


class TinyEngine:
    def __init__(
        self,
        layout: KVLayout,
        config: OffloadConfig,
        *,
        num_blocks: int,
        slots: int | None = None,
        ready: int | None = None,
        ranks: int = 1,
        max_batched_tokens: int = 64,
        max_running: int = 8,
        events: bool = True,
        seed: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.layout = layout
        self.clock = ManualClock()
        self.device = TinyDevicePool(num_blocks)
        rng = self._rng = Random(seed)
        self.manager = OffloadManager(
            layout,
            config,
            self.device,
            ranks=ranks,
            slots=slots,
            ready=ready,
            max_batched_tokens=max_batched_tokens,
            max_requests=max_running,
            events=events,
            clock=self.clock,
            recorder=recorder,
        )
        size, pool = layout.bytes_per_block, self.manager.pool
        self.copiers = [
            ByteCopier(Rank(rank), Memory(size), Memory(size), rng, pool.capacity) for rank in range(ranks)
        ]
        for copier in self.copiers:
            copier.ready = pool.ready
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.waiting: deque[TinyRequest] = deque()
        self.loaded: deque[TinyRequest] = deque()  # their bytes have arrived; they run before anybody is admitted
        self.running: list[TinyRequest] = []
        self.loading: dict[RequestId, TinyRequest] = {}
        self.finished: dict[RequestId, TinyRequest] = {}
        self.accepts_less = False  # real schedulers sometimes take only a part of what they are offered
        self.preemptions = 0
        self.computed_tokens = 0
        self._keys: dict[RequestId, list[list[Key]]] = {}
        self._num_requests = 0

    # --- what a client does --------------------------------------------------------------------------

    def submit(
        self,
        prompt: Sequence[int],
        max_new_tokens: int = 1,
        *,
        salt: bytes = b"",
        may_load: bool = True,
        may_store: bool = True,
    ) -> TinyRequest:
        self._num_requests += 1
        request = TinyRequest(
            RequestId(f"r{self._num_requests}"),
            list(prompt),
            max_new_tokens,
            self.layout.tokens_per_hash,
            salt,
            may_load,
            may_store,
        )
        self._keys[request.id] = [[] for _ in self.layout.groups]
        self.waiting.append(request)
        return request

    def abort(self, request: TinyRequest) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self.loaded:
            self.loaded.remove(request)
        elif request in self.running:
            self.running.remove(request)
        else:
            self.loading.pop(request.id)
        self._end(request)

    def reset_cache(self) -> None:
        """Forget all KV, on the device and on the host."""
        self.device.reset()
        self.manager.reset()

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.loading) + len(self.loaded)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until every request has finished and every copy has ended."""
        for _ in range(max_steps):
            if not self.num_unfinished and not self.manager.has_pending_work():
                return
            self.step()
        raise TimeoutError(f"{self.num_unfinished} requests unfinished after {max_steps} steps")

    # --- one step ------------------------------------------------------------------------------------

    def step(self) -> None:
        self.manager.grow(min(copier.ready for copier in self.copiers))
        self._schedule()
        orders = self.manager.step(
            [Progress(each.id, each.computed, self._take_new_blocks(each)) for each in self.running]
        )
        for copier in self.copiers:
            for order in (*orders.loads, *orders.stores):
                copier.submit(order)
        self._compute()
        reports = [report for copier in self.copiers for report in copier.poll()]
        outcomes = self.manager.report(reports)
        for request_id in outcomes.loaded:
            self._loaded(self.loading.pop(request_id))
        for request_id in outcomes.failed:
            self._load_failed(self.loading.pop(request_id))
        self.clock.advance(0.01)

    def _schedule(self) -> None:
        budget, preemptions = self.max_batched_tokens, self.preemptions
        self._told = {each.id: [len(blocks) for blocks in each.table] for each in self.running}
        for request in list(self.running):
            if request not in self.running:
                continue  # preempted for one before it
            budget -= self._schedule_running(request, budget)
        while self.loaded and budget > 0 and len(self.running) < self.max_running:
            request = self.loaded.popleft()
            self.manager.allocated(request, request.table, request.computed, 0)
            budget -= self._start(request, budget)
        skipped: list[TinyRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            if self.preemptions > preemptions:
                break  # blocks have run out: whom they were taken from comes first, in the next step
            request = self.waiting[0]
            admitted = self._admit(request)
            if admitted is None:
                skipped.append(self.waiting.popleft())
                continue
            if not admitted:
                break
            self.waiting.popleft()
            if request.waits_for_load:
                self.loading[request.id] = request
            else:
                budget -= self._start(request, budget)
        self.waiting.extendleft(reversed(skipped))

    def _start(self, request: TinyRequest, budget: int) -> int:
        self._told[request.id] = [len(blocks) for blocks in request.table]
        self.running.append(request)
        return self._schedule_running(request, budget)

    def _schedule_running(self, request: TinyRequest, budget: int) -> int:
        """Give it blocks for as many tokens as fit the budget; makes room by preempting from the end."""
        count = min(budget, request.num_tokens - request.computed)
        request.scheduled = 0
        while count > 0 and not self._grow(request, request.computed + count):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        request.scheduled = count
        return count

    def _admit(self, request: TinyRequest) -> bool | None:
        """True: it has blocks now. False: there are not enough. None: not yet, ask again in the next step."""
        keys = self._keys_of(request)
        device_tokens = 0 if not request.may_load else self._device_hit(request, keys)
        answer = self.manager.match(request, device_tokens)
        if isinstance(answer, NotYet):
            return None
        accepted = answer.tokens
        if self.accepts_less:
            step = self.layout.alignment_tokens
            accepted = self._rng.randrange(0, accepted + step, step)
        total = device_tokens + accepted
        table: list[list[BlockId]] = []
        used: list[BlockId] = []
        wanted = 0
        for group, group_keys in zip(self.layout.groups, keys, strict=True):
            span = group.span_tokens
            first = group.first_needed(device_tokens)
            shared = self.device.find_run(group_keys, first, device_tokens // span)
            used += shared
            new_from = max(device_tokens // span, group.first_needed(total))
            wanted += total // span - new_from
            table.append([NULL] * first + shared)
        self.device.use(used)
        loads = accepted > 0 and answer.needs_load
        taken = self.device.take(wanted) if self._has_room(request, table, total, loads) else None
        if taken is None:
            self.device.free(reversed(used))
            return False
        for group, blocks in zip(self.layout.groups, table, strict=True):
            span = group.span_tokens
            while len(blocks) < total // span:
                blocks.append(NULL if len(blocks) < group.first_needed(total) else taken.pop(0))
        request.table = table
        request.cached_tokens = request.computed = total
        request.waits_for_load = self.manager.allocated(
            request, table, device_tokens, accepted, must_end=self._computes_in_place(request, device_tokens)
        )
        if not request.waits_for_load:
            self._drop_unseen(request)
        return True

    def _computes_in_place(self, request: TinyRequest, device_tokens: int) -> bool:
        """Whether it keeps the blocks of a load that fails, and computes into them."""
        return False

    def _has_room(self, request: TinyRequest, table: Sequence[Sequence[BlockId]], total: int, loads: bool) -> bool:
        """Whether it may be admitted, if its blocks so far are these and `total` tokens need not be computed."""
        return True  # what it lacks to run is taken from others when it runs

    def _device_hit(self, request: TinyRequest, keys: Sequence[Sequence[Key]]) -> int:
        """The longest prefix the device has on its own; the plain way, from the longest length down."""
        step = self.layout.alignment_tokens
        length = (request.num_tokens - 1) // step * step
        while length > 0:
            if all(
                len(self.device.find_run(group_keys, first, stop)) == max(0, stop - first)
                for group, group_keys in zip(self.layout.groups, keys, strict=True)
                for first in [group.first_needed(length)]
                for stop in [length // group.span_tokens + group.blocks_beyond_hit]
            ):
                return length
            length -= step
        return 0

    def _grow(self, request: TinyRequest, tokens: int) -> bool:
        missing = [
            ceil(tokens / group.span_tokens) - len(blocks)
            for group, blocks in zip(self.layout.groups, request.table, strict=True)
        ]
        taken = self.device.take(sum(max(0, count) for count in missing))
        if taken is None:
            return False
        for blocks, count in zip(request.table, missing, strict=True):
            for _ in range(count):
                blocks.append(taken.pop(0))
        return True

    def _take_new_blocks(self, request: TinyRequest) -> list[list[BlockId]]:
        told = self._told[request.id]
        return [blocks[count:] for blocks, count in zip(request.table, told, strict=True)]

    def _compute(self) -> None:
        """The forward pass: read what attention reads, then write the new tokens' KV."""
        for request in list(self.running):
            if not request.scheduled:
                continue
            self.verify(request)
            before, after = request.computed, request.computed + request.scheduled
            request.computed, request.scheduled = after, 0
            self.computed_tokens += after - before
            for group, blocks, keys in zip(self.layout.groups, request.table, self._keys_of(request), strict=True):
                for i in range(before // group.span_tokens, after // group.span_tokens):
                    for copier in self.copiers:
                        copier.device.write(blocks[i], self.content(keys[i], copier.rank))
                    self.device.cache(blocks[i], keys[i])
            if after == request.num_tokens:
                request.append(crc32(repr(request.tokens).encode(), crc32(request.salt)) % 50_000)
            if request.generated >= request.max_new_tokens:
                self.running.remove(request)
                self._end(request)
                self.finished[request.id] = request
            else:
                self._drop_unseen(request)

    def _drop_unseen(self, request: TinyRequest) -> None:
        """Windows, chunks and states let go of blocks that nothing will read again."""
        for group, blocks in zip(self.layout.groups, request.table, strict=True):
            for i in range(min(group.first_needed(request.computed), len(blocks))):
                if blocks[i] != NULL:
                    self.device.free([blocks[i]])
                    blocks[i] = NULL

    # --- ends ------------------------------------------------------------------------------------------

    def _loaded(self, request: TinyRequest) -> None:
        self.verify(request)
        for group, blocks, keys in zip(self.layout.groups, request.table, self._keys_of(request), strict=True):
            for i in range(group.first_needed(request.computed), request.computed // group.span_tokens):
                self.device.cache(blocks[i], keys[i])
        self._drop_unseen(request)
        request.waits_for_load = False
        self.loaded.append(request)

    def _load_failed(self, request: TinyRequest) -> None:
        self._free(request)
        self.waiting.appendleft(request)

    def _preempt(self, request: TinyRequest) -> None:
        self.preemptions += 1
        self.running.remove(request)
        self.manager.preempt(request.id)
        self._free(request)
        self.waiting.appendleft(request)

    def _end(self, request: TinyRequest) -> None:
        confirmed = 0 if request.waits_for_load else request.computed
        self.manager.finish(request.id, confirmed, request.table or None)
        self._free(request)
        del self._keys[request.id]

    def _free(self, request: TinyRequest) -> None:
        # Tails first, group by group, so that heads are the last to be taken.
        for blocks in request.table:
            self.device.free(reversed(blocks))
        request.table, request.computed, request.scheduled, request.waits_for_load = [], 0, 0, False

    # --- proof -----------------------------------------------------------------------------------------

    def content(self, key: Key, rank: Rank) -> bytes:
        """The bytes that a block with this key has on this rank."""
        size = self.layout.bytes_per_block
        return hashlib.blake2b(key + bytes([rank]), digest_size=min(size, 64)).digest().ljust(size, b"\0")

    def verify(self, request: TinyRequest) -> None:
        """Raise unless everything the request would read next is there, on every rank, byte by byte."""
        for group, blocks, keys in zip(self.layout.groups, request.table, self._keys_of(request), strict=True):
            for i in range(group.first_needed(request.computed), request.computed // group.span_tokens):
                for copier in self.copiers:
                    right = copier.device.read(blocks[i]) == self.content(keys[i], copier.rank)
                    ensure(right, f"{request.id}: block {i} has wrong bytes on rank {copier.rank}")

    def check(self) -> None:
        """Every invariant of the manager, of the device pool, and every byte on the host."""
        self.manager.check()
        self.device.check()
        ensure(+self.manager.device_pins() == +self.device.pins, "device pins without a live owner")
        self.verify_host(self.manager.pool.index().items())

    def verify_host(self, index: Iterable[tuple[Key, Slot]]) -> None:
        for key, slot in index:
            for copier in self.copiers:
                right = copier.host.read(slot) == self.content(key, copier.rank)
                ensure(right, f"slot {slot} does not hold its key on rank {copier.rank}")

    def _keys_of(self, request: TinyRequest) -> list[list[Key]]:
        keys = self._keys[request.id]
        self.layout.extend_keys(keys, request.hashes)
        return keys
