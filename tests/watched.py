"""The tiny engine under watch: after every step every invariant, and every answer against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay import Answer, Mode, NotYet, OffloadConfig
from forebay.engine import Request
from forebay.groups import FullAttention, KVLayout
from forebay.ids import BlockId, RequestId
from forebay.requests import RequestState
from forebay.testing import TinyEngine, TinyRequest
from tests import oracle


@dataclass
class _Steps:
    total: int = 0

    def count(self) -> None:
        self.total += 1
        if self.total % 50_000 == 0:
            print(f"{self.total:,} engine steps checked", flush=True)  # noqa: T201  progress of the long run


STEPS = _Steps()


class WatchedEngine(TinyEngine):
    def __init__(self, layout: KVLayout, config: OffloadConfig, **kwargs: Any) -> None:
        super().__init__(layout, config, **kwargs)
        self.router = oracle.Router()
        self.let_down: set[RequestId] = set()  # requests whose load failed: they are promised nothing again
        self.not_yet_since: dict[RequestId, float] = {}
        self.stopped_at: dict[RequestId, int] = {}  # for want of room, and how many blocks were free
        self.preempted: set[RequestId] = set()  # in this step, and not admitted since
        self.held_without_running = False  # when this step began
        self._ask = self.manager.match
        self.manager.match = self._watched_match  # type: ignore[method-assign]

    def step(self) -> None:
        self.held_without_running = self.holds_without_running
        super().step()
        self.check()
        STEPS.count()

    def check(self) -> None:
        super().check()
        self.router.hear(self.manager.take_events())
        pool = self.manager.pool
        assert self.router.keys == set(pool.index())
        assert pool.free + pool.filling + pool.cached == pool.ready
        assert not any(copier.mismatched for copier in self.copiers), (
            "an order names other keys than its slots hold"
        )

    def _watched_match(self, request: Request, device_tokens: int) -> Answer:
        assert isinstance(request, TinyRequest)
        self.router.hear(self.manager.take_events())
        expected = self._expected(request, device_tokens)
        answer = self._ask(request, device_tokens)
        if isinstance(answer, NotYet):
            # Only for a copy that is on its way, has just ended or is about to be planned.
            settings = self.manager._books.config
            assert settings.mode is Mode.LAZY or self.manager.has_pending_work() or self.held_without_running
            since = self.not_yet_since.setdefault(request.id, self.clock.now)
            waited_s = self.clock.now - since
            if waited_s >= settings.wait_deadline_s or self.manager._requests[request.id].waited_enough:
                # Only where the engine would stop at it again, before others that have blocks and do not run.
                assert self.holds_without_running
                assert self.device.num_free <= self.stopped_at[request.id]
        else:
            self.not_yet_since.pop(request.id, None)
            state = self.manager._requests[request.id]
            if answer.tokens == 0 and state.waited_enough and self.manager._loads._is_crowded(state):
                return answer  # it waited for room long enough, and computes
            assert answer.tokens == expected, f"{request.id}: {answer} where {expected} tokens can be had"
            again = self._ask(request, device_tokens)
            assert again == answer, "asked twice, answered differently"
        return answer

    @property
    def holds_without_running(self) -> bool:
        """Whether there are requests that have blocks and do not run: their load runs, or has just ended."""
        return bool(self.loading or self.loaded)

    def _admit(self, request: TinyRequest) -> bool | None:
        admitted = super()._admit(request)
        if admitted is False:
            self.stopped_at[request.id] = self.device.num_free
        elif admitted:
            self.stopped_at.pop(request.id, None)
            self.preempted.discard(request.id)
        return admitted

    def _preempt(self, request: TinyRequest) -> None:
        super()._preempt(request)
        self.preempted.add(request.id)

    def _schedule(self) -> None:
        super()._schedule()
        self._note_preempted()

    def _note_preempted(self) -> None:
        if not self.running:  # they had all blocks that there are for them
            self.stopped_at |= dict.fromkeys(self.preempted, self.device.num_blocks)
        self.preempted.clear()

    def _expected(self, request: TinyRequest, device_tokens: int) -> int:
        if not request.may_load or request.id in self.let_down:
            return 0
        # When gaps may be bridged is the manager's choice; teardown proves that nobody is starved by it.
        state = self.manager._requests.get(request.id) or RequestState.of(request, self.layout)
        may_bridge = self.manager._loads._may_bridge(state, device_tokens)
        return oracle.longest(
            self.layout,
            request.hashes,
            request.num_tokens,
            device_tokens,
            lambda key: key in self.router.keys or (may_bridge and key in self.device),
        )

    def _load_failed(self, request: TinyRequest) -> None:
        self.let_down.add(request.id)
        super()._load_failed(request)

    def deliver_lost_reports(self) -> None:
        """Reports that were dropped arrive after all."""
        lost = [report for copier in self.copiers for report in copier.reports_dropped]
        for copier in self.copiers:
            copier.reports_dropped.clear()
        outcomes = self.manager.report(lost)
        for request_id in outcomes.loaded:
            self._loaded(self.loading.pop(request_id))
        for request_id in outcomes.failed:
            self._load_failed(self.loading.pop(request_id))
        self.check()


class InPlaceEngine(WatchedEngine):
    """As vLLM up to 0.29: a request whose load failed keeps its blocks if it had some on the device itself, and
    computes into those that should have been loaded. (For models with one group of full attention.)"""

    def __init__(self, layout: KVLayout, config: OffloadConfig, **kwargs: Any) -> None:
        super().__init__(layout, config, **kwargs)
        self._had: dict[RequestId, int] = {}  # by request that waits for such a load: tokens

    def _computes_in_place(self, request: TinyRequest, device_tokens: int) -> bool:
        [group, *others] = self.layout.groups
        self._had[request.id] = device_tokens if isinstance(group, FullAttention) and not others else 0
        return self._had[request.id] > 0

    def _load_failed(self, request: TinyRequest) -> None:
        had = self._had[request.id]
        if not had:
            super()._load_failed(request)
            return
        self.let_down.add(request.id)
        request.computed, request.waits_for_load = had, False
        self.loaded.append(request)


class LateFreeingEngine(WatchedEngine):
    """As vLLM when it schedules ahead: what a request held is freed a step later, for the step in flight may still
    write it. So one that finds no block preempts all behind it, and has none the sooner. (Only what a request held
    that has come to its end, vLLM frees at once.)"""

    def __init__(self, layout: KVLayout, config: OffloadConfig, **kwargs: Any) -> None:
        super().__init__(layout, config, **kwargs)
        self._late: list[list[BlockId]] = []

    def step(self) -> None:
        late, self._late = self._late, []
        super().step()
        for blocks in late:
            self.device.free(reversed(blocks))
        self.check()

    def _free(self, request: TinyRequest) -> None:
        self._late += request.table
        request.table = []
        super()._free(request)
