"""An engine that schedules ahead, in one process with its rank: outputs are read a step later, or in the middle of
the next one. Whatever ends when, and however, everybody who waits for a load is told of it, once."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest

from forebay.transfers import Outcome
from tests.vllm.driving import BLOCK, Hand, HandRequest, full, kv_cache_config, vllm_config
from tests.vllm.test_worker import Scripted

BLOCKS, SLOTS, FAMILIES = 64, 16, 3
ENDS = [Outcome.DONE] * 6 + [Outcome.FAILED, Outcome.MISMATCH]


class Copies(Scripted):
    """Ends what was submitted sooner or later, in any order."""

    slots = ready = SLOTS

    def __init__(self, rng: Random) -> None:
        super().__init__()
        self._rng = rng

    def end_some(self, chance: float = 0.35) -> None:
        for number in list(self.submitted):
            if self._rng.random() < chance:
                self.submitted.remove(number)
                self.end(number, self._rng.choice(ENDS))


class Ahead:
    def __init__(self, seed: int, *, drafts: bool, early: bool) -> None:
        from forebay.vllm import SimpleCPUOffloadWorker

        self.rng = Random(seed)
        self.hand = Hand("forebay", [full()], blocks=BLOCKS, slots=SLOTS)
        self.scheduler = self.hand.scheduler
        self.worker = SimpleCPUOffloadWorker(vllm_config(), kv_cache_config([full()], BLOCKS), SLOTS * 1024)
        self.copies = self.worker._copier = Copies(self.rng)
        self.worker.num_cpu_blocks = SLOTS
        self.worker._waits_for_drafter, self.worker._submits_early = drafts, early
        self.early = early
        self.outputs: deque[Any] = deque()
        self.known: dict[str, tuple[HandRequest, str]] = {}  # to the engine: waits, runs, or is gone and waits
        self.told = self.asked = 0

    def prompt(self) -> list[int]:
        family = self.rng.randrange(FAMILIES)
        return [1000 * family + i for i in range(self.rng.choice([33, 50, 65]))]

    def arrive(self) -> None:
        self.asked += 1
        request = self.hand.request(f"request {self.asked}", self.prompt())
        tokens, waits = self.scheduler.get_num_new_matched_tokens(request, 0)
        if tokens is None:
            self.scheduler.request_finished_all_groups(request, ([],))  # it gives up
            return
        self.hand.admit(request, tokens)
        self.known[request.request_id] = request, "waits" if waits else "runs"

    def launch(self) -> None:
        from vllm.v1.outputs import KVConnectorOutput

        running = [request for request, state in self.known.values() if state == "runs"]
        self.worker.bind_connector_metadata(self.hand.step(*running))
        if self.early and self.outputs and self.rng.random() < 0.5:
            self.copies.end_some()
            self.read()
        results = self.worker.get_transfer_results(set())
        meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        finished, failed = results.finished_recving, results.failed_recving
        self.outputs.append(
            KVConnectorOutput(finished_recving=finished, failed_recving=failed, kv_connector_worker_meta=meta)
        )

    def read(self) -> None:
        output = self.outputs.popleft()
        assert output.failed_recving <= self.known.keys()
        self.scheduler.update_connector_output(output)
        for name in output.finished_recving or ():
            request, state = self.known.pop(name)  # or the engine was told of somebody who does not wait
            assert state != "runs"
            if state == "waits":
                self.known[name] = request, "runs"
            self.told += 1

    def leave(self) -> None:
        for name, (request, state) in list(self.known.items()):
            if state != "gone" and self.rng.random() < 0.15:
                self.hand.finish(request)
                del self.known[name]
                if state == "waits":  # vLLM remembers it until it is told
                    self.known[name] = request, "gone"


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_everybody_is_told_once(drafts: bool, early: bool) -> None:
    told = 0
    for seed in range(15):
        engine = Ahead(seed, drafts=drafts, early=early)
        for _ in range(120):
            if engine.rng.random() < 0.4 and engine.hand.pool.get_num_free_blocks() > 2 * 65 // BLOCK:
                engine.arrive()
            engine.copies.end_some()
            engine.launch()
            engine.copies.end_some()
            if len(engine.outputs) > 1:
                engine.read()
            engine.leave()
            if engine.rng.random() < 0.1:
                engine.hand.forget_device()
            if engine.rng.random() < 0.02:
                engine.scheduler.reset()
        for _ in range(20):
            engine.copies.end_some(1.0)
            engine.launch()
            engine.read()
        assert [name for name, (_, state) in engine.known.items() if state != "runs"] == []
        assert not engine.worker._loads
        assert not engine.worker._on_their_way
        assert not engine.scheduler.manager.has_pending_stores()
        engine.scheduler.manager.check()
        told += engine.told
    assert told > 100
