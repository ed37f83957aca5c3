"""The tiny engine under watch: after every step every invariant, and every answer against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from forebay import Answer, Hit, NotYet, OffloadConfig
from forebay.engine import Request
from forebay.groups import KVLayout
from forebay.ids import RequestId
from forebay.testing import TinyEngine, TinyRequest
from tests import oracle


@dataclass
class _Steps:
    total: int = 0


STEPS = _Steps()


class WatchedEngine(TinyEngine):
    def __init__(self, layout: KVLayout, config: OffloadConfig, **kwargs: Any) -> None:
        super().__init__(layout, config, **kwargs)
        self.router = oracle.Router()
        self.let_down: set[RequestId] = set()  # requests whose load failed: they are promised nothing again
        self.not_yet_since: dict[RequestId, float] = {}
        self._ask = self.manager.match
        self.manager.match = self._watched_match  # type: ignore[method-assign]

    def step(self) -> None:
        super().step()
        self.check()
        STEPS.total += 1

    def check(self) -> None:
        super().check()
        self.router.hear(self.manager.take_events())
        assert self.router.keys == set(self.manager.pool.index())

    def _watched_match(self, request: Request, device_tokens: int) -> Answer:
        assert isinstance(request, TinyRequest)
        self.router.hear(self.manager.take_events())
        expected = self._expected(request, device_tokens)
        gave_up = self.manager.stats.waits_given_up
        answer = self._ask(request, device_tokens)
        if isinstance(answer, NotYet):
            # Only for a copy that is on its way or has just ended, and never longer than the deadline.
            assert self.manager.has_pending_work() or self.loaded
            since = self.not_yet_since.setdefault(request.id, self.clock.now)
            assert self.clock.now - since < self.manager._books.config.wait_deadline_s
        else:
            self.not_yet_since.pop(request.id, None)
            if answer.tokens == 0 and self.manager.stats.waits_given_up > gave_up:
                return answer  # it waited for room long enough, and computes
            assert answer.tokens == expected, f"{request.id}: {answer} where {expected} tokens can be had"
            again = self._ask(request, device_tokens)
            assert again == answer, "asked twice, answered differently"
        return answer

    def _expected(self, request: TinyRequest, device_tokens: int) -> int:
        if not request.may_load or request.id in self.let_down:
            return 0
        missing = request.num_tokens - device_tokens
        demand = sum(ceil(missing / group.span_tokens) for group in self.layout.groups)
        may_bridge = self.device.num_free >= 2 * demand
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


def tokens_of(answer: Answer) -> int:
    assert isinstance(answer, Hit)
    return answer.tokens
