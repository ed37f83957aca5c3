"""One engine of gpu_answers.py, in a process of its own: ask everything, and write down what it said.

Scheduler, connector and model are in this process, so that counters of all three can be read at the end.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _children import write_record
from _traffic import SEED, SIZES, Question, in_order, questions

CHANCES = 3
SPOILT = 0.05


def sensitive_weights() -> None:
    """Weights that make tokens depend on every part of the KV cache.

    vLLM's dummy weights are so small, and so alike, that every prompt is answered with the same tokens whatever
    the cache holds. Each tensor gets numbers of its own, from its name, so that every engine gets the same.
    """
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_dummies = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        load_dummies(self, model, model_config)
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.data.fill_(1)
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            spread = 0.02 if "embed" in name else 2.5 / tensor.shape[-1] ** 0.5
            values = torch.empty(tensor.shape, dtype=torch.float32).normal_(0, spread, generator=generator)
            tensor.data.copy_(values)

    DummyModelLoader.load_weights = load_weights


def settings_of(extra: dict[str, Any], verify: str | None) -> tuple[dict[str, Any], bool]:
    """What the connector is told, and whether it proves what it loads: it may be too old to know of that."""
    if verify is None:
        return extra, False
    from forebay.errors import UnknownKeyError
    from forebay.vllm.config import ConnectorConfig

    try:
        ConnectorConfig.parse({"verify": verify})
    except UnknownKeyError:
        return extra, False
    return extra | {"verify": verify}, verify != "off"


@dataclass
class Asked:
    question: Question
    request: Any
    at_step: int
    tokens: int = 0


class Run:
    def __init__(self, engine: Any, spec: dict[str, Any], asked: list[Question]) -> None:
        self.engine, self.spec = engine, spec
        self.scheduler = engine.engine_core.engine_core.scheduler
        self.waiting = deque(asked)
        self.live: dict[str, Asked] = {}
        self.requests: list[Any] = []
        self.answers: dict[str, dict[str, Any]] = {}
        self.odd: list[str] = []  # answers that ended in another way than by their length
        self.steps = self.aborted = self.prompt_tokens = self.cached_tokens = 0
        self.spoilt: list[str] = []
        self.last_end = time.monotonic()

    def all(self) -> None:
        while self.waiting or self.live:
            while self.waiting and len(self.live) < self.spec["at_once"]:
                self.submit(self.waiting.popleft())
            for name in [name for name, each in self.live.items() if self.is_due(each)]:
                self.engine.abort_request([name])
                del self.live[name]
                self.aborted += 1
            if self.spec["spoil"]:
                self.spoil()
            self.step()
            if time.monotonic() - self.last_end > self.spec["patience_s"]:
                raise TimeoutError(f"no request has ended for {self.spec['patience_s']:.0f} s: {self.state()}")
        deadline = time.monotonic() + self.spec["patience_s"]
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy without a request: {self.state()}")

    def submit(self, question: Question) -> None:
        from vllm import SamplingParams

        chances = CHANCES if self.spec["chances"] else None
        params = SamplingParams(
            temperature=0.0,
            max_tokens=question.answer_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=chances,
        )
        self.engine.add_request(question.name, {"prompt_token_ids": question.prompt}, params)
        request = next(reversed(self.scheduler.requests.values()))
        self.requests.append(request)
        self.live[question.name] = Asked(question, request, self.steps)

    def is_due(self, asked: Asked) -> bool:
        question = asked.question
        if question.abort_after_steps is not None:
            return self.steps - asked.at_step >= question.abort_after_steps
        return question.abort_after_tokens is not None and asked.tokens >= question.abort_after_tokens

    def step(self) -> None:
        outputs = self.engine.step()
        self.steps += 1
        for output in outputs:
            asked = self.live.get(output.request_id)
            if asked is None:
                continue  # given up
            said = output.outputs[0]
            asked.tokens = len(said.token_ids)
            if output.finished:
                self.end(output, said)
        if not outputs:
            time.sleep(0.0002)  # loads are waited for

    def end(self, output: Any, said: Any) -> None:
        self.last_end = time.monotonic()
        question = self.live.pop(output.request_id).question
        if said.finish_reason != "length" or len(said.token_ids) != question.answer_tokens:
            self.odd.append(f"{question.name}: {len(said.token_ids)} tokens, {said.finish_reason}")
        self.prompt_tokens += len(question.prompt)
        self.cached_tokens += output.num_cached_tokens or 0
        if question.is_aborted:
            return  # it ended before it was to be given up
        answer: dict[str, Any] = {"tokens": list(said.token_ids)}
        if self.spec["chances"]:
            answer["chances"] = [
                {str(token): chance.logprob for token, chance in position.items()} for position in said.logprobs
            ]
        self.answers[question.name] = answer

    def spoil(self) -> None:
        """Control: wrong bytes in one block of a running request, behind everybody's back."""
        for asked in self.live.values():
            numbers = random.Random(f"{SEED}/spoil/{asked.question.name}")
            if asked.question.name in self.spoilt or asked.question.is_aborted or numbers.random() > SPOILT:
                continue
            if asked.tokens:
                blocks = self.scheduler.kv_cache_manager.get_block_ids(asked.request.request_id)[0]
                block = blocks[numbers.randrange(len(asked.question.prompt) // self.spec["block_tokens"])]
                for cache in self.caches():
                    cache.select(list(cache.shape).index(self.spec["device_blocks"]), block).neg_()
                self.spoilt.append(asked.question.name)

    def caches(self) -> list[Any]:
        found: list[Any] = []
        for layer in self.engine.vllm_config.compilation_config.static_forward_context.values():
            cache = getattr(layer, "kv_cache", None)
            found += cache if isinstance(cache, list | tuple) else [] if cache is None else [cache]
        return found

    def state(self) -> str:
        states: dict[str, int] = {}
        for each in self.live.values():
            states[str(each.request.status)] = states.get(str(each.request.status), 0) + 1
        return f"{len(self.waiting)} not asked yet, {states}"

    def counters(self) -> dict[str, Any]:
        """Forebay's own, and what is still held although nobody asks for anything."""
        manager = getattr(getattr(self.scheduler.connector, "scheduler_manager", None), "manager", None)
        if manager is None:
            return {}
        manager.check()
        numbers = {
            name: value for name, value in manager.stats.snapshot().items() if isinstance(value, int | float)
        }
        held = len(manager.device_pins()) + manager.pool.pinned + bool(manager.has_pending_work())
        return numbers | {"evictions": manager.pool.evictions, "held": held}


def main() -> None:
    spec_file, record_file = map(Path, sys.argv[1:])
    spec, record = json.loads(spec_file.read_text()), {}

    def stage(name: str) -> None:
        record["stage"] = name
        write_record(record_file, record)

    stage("import")
    import torch
    import vllm
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    record["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__}
    sensitive_weights()
    if spec["offload"] is not None:
        extra, record["verifies"] = settings_of(spec["offload"]["kv_connector_extra_config"], spec["verify"])
        spec["engine_args"]["kv_transfer_config"] = spec["offload"] | {"kv_connector_extra_config": extra}
    stage("start")
    started = time.perf_counter()
    engine = LLMEngine.from_engine_args(EngineArgs(**spec["engine_args"]))
    record["start_s"] = time.perf_counter() - started
    config = engine.vllm_config
    record["engine"] = {
        "v2 runner": bool(getattr(config, "use_v2_model_runner", False)),
        "async scheduling": bool(config.scheduler_config.async_scheduling),
        "CUDA graphs": str(getattr(config.compilation_config, "cudagraph_mode", None)),
        "prefix caching": bool(config.cache_config.enable_prefix_caching),
    }
    sizes = SIZES[spec["sizes"]]
    run = Run(engine, spec, in_order(questions(sizes, spec["answers"]), spec["order"]))
    stage("answers")
    started = time.perf_counter()
    run.all()
    record |= {
        "seconds": time.perf_counter() - started,
        "answers": run.answers,
        "odd": run.odd,
        "aborted": run.aborted,
        "steps": run.steps,
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "preemptions": sum(request.num_preemptions for request in run.requests),
        "spoilt": run.spoilt,
        "counters": run.counters(),
        "complete": True,
    }
    stage("done")
    sys.stdout.flush()
    os._exit(0)  # whatever an engine still has running


if __name__ == "__main__":
    main()
