"""Engines of a real vLLM, one after another in this process, with or without Forebay."""

from __future__ import annotations

import functools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from unittest import mock

import pytest

from tests.vllm import shims
from tests.vllm.families import VOCABULARY, Family

PATIENCE_S = 240.0  # before something hangs for sure, also on a machine that is busy with other things
MANY = 500
HOST_BYTES = 64 << 20

Tokens = list[int]


def prompts(count: int, tokens: int = 400, seed: int = 0) -> list[Tokens]:
    """Prompts that share nothing; other seeds give others."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, VOCABULARY) for _ in range(tokens)] for _ in range(count)]


class Engine:
    """vLLM in this process. `offload` is what a user writes as kv_connector_extra_config, None is no connector."""

    ranks = 1

    def __init__(
        self,
        family: Family,
        offload: dict[str, Any] | None = None,
        *,
        role: str = "kv_both",
        **engine_args: Any,
    ) -> None:
        self.family = family
        self.outputs: dict[str, Any] = {}  # by request id, the newest RequestOutput
        self.asked: list[str] = []  # of the last generate(), by prompt: the ids
        self.cached_tokens: list[int] = []  # of the last generate(), by prompt: on the device or from Forebay
        self.mismatches = 0  # reports of other bytes than were stored, as far as the test has seen to them
        self._requests: dict[str, Any] = {}  # vLLM's own, by the id that submit() gave
        args = {
            "model": _model_dir(family),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "max_model_len": 1000,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "num_gpu_blocks_override": 128,
            "block_size": 32,
            "enable_prefix_caching": True,
            "dtype": "float32",
            "disable_log_stats": True,
        }
        args |= family.engine | engine_args
        if offload is not None:
            args["kv_transfer_config"] = {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_module_path": "forebay.vllm",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": offload,
            }
        self._environment = mock.patch.dict(os.environ)  # vLLM leaves settings of its own there
        self._environment.start()
        try:
            self._engine = self._start(args)
        except BaseException:
            self._clean_up()
            raise

    def _start(self, args: dict[str, Any]) -> Any:
        return _start(self.family, args)

    # --- requests ----------------------------------------------------------------------------------

    def generate(self, prompts: list[Tokens], max_tokens: int = 8, **sampling: Any) -> list[Tokens]:
        """What the model says to each of the prompts, always the likeliest token."""
        self.asked = []
        for prompt in prompts:
            self.asked.append(self.submit(prompt, max_tokens, **sampling))
            if self.family.alone:
                self.run()
        self.run()
        self.cached_tokens = [self.outputs[each].num_cached_tokens for each in self.asked]
        return [self.tokens(each) for each in self.asked]

    def submit(self, prompt: Tokens, max_tokens: int = 8, *, priority: int = 0, **sampling: Any) -> str:
        from vllm import SamplingParams

        request_id = f"request-{len(self._requests)}"
        salt = sampling.pop("cache_salt", None)
        lora = sampling.pop("lora_request", None)
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **sampling
        )
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            inputs["cache_salt"] = salt
        internal_id = self._engine.add_request(request_id, inputs, params, lora_request=lora, priority=priority)
        self._requests[request_id] = self.scheduler.requests[internal_id]
        return request_id

    def step(self) -> list[Any]:
        """One step of the engine; the outputs of requests that got a token or ended."""
        outputs: list[Any] = self._engine.step()
        for output in outputs:
            self.outputs[output.request_id] = output
        return outputs

    def run(self) -> None:
        """Step until every request has ended. Copies may still be on their way."""
        self._step_while(self._engine.has_unfinished_requests)

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Step until this is so."""
        self._step_while(lambda: not condition())

    def abort(self, request_id: str) -> None:
        self._engine.abort_request([request_id])

    def tokens(self, request_id: str) -> Tokens:
        """What a request has been given so far."""
        output = self.outputs.get(request_id)
        return list(output.outputs[0].token_ids) if output else []

    # --- state -------------------------------------------------------------------------------------

    @property
    def core(self) -> Any:
        return self._engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """The scheduler's side."""
        return self.scheduler.connector

    @property
    def manager(self) -> Any:
        """Forebay's OffloadManager."""
        return self.connector.scheduler_manager.manager

    @property
    def worker(self) -> Any:
        """The worker's side of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def block_pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def block_tokens(self) -> tuple[int, ...]:
        return tuple(each.kv_cache_spec.block_size for each in self.scheduler.kv_cache_config.kv_cache_groups)

    def internal_id(self, request_id: str) -> str:
        """What scheduler and connector call a request."""
        internal: str = self._requests[request_id].request_id
        return internal

    def first_hash(self, request_id: str) -> bytes:
        """The hash of a request's first block: its key, where there is one group."""
        first: bytes = self._requests[request_id].block_hashes[0]
        return first

    def device_tokens(self, request_id: str) -> int:
        """How much of a request's prompt and answer is cached on the device now, also after it has ended."""
        tokens: int = self.scheduler.kv_cache_manager.get_computed_blocks(self._requests[request_id])[1]
        return tokens

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The blocks of a request that is running, by group."""
        blocks: tuple[list[int], ...] = self.scheduler.kv_cache_manager.get_block_ids(self.internal_id(request_id))
        return blocks

    def settle(self) -> None:
        """Step until nothing is on its way. In process nobody steps an engine without requests but its owner."""
        self._step_while(self.scheduler.has_requests)

    def _step_while(self, busy: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while busy():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still busy after {PATIENCE_S:.0f} s")
            self.step()

    def forget_device(self) -> None:
        """Nothing is cached on the device any more; what the host has stays. The device's memory is spoilt too, or
        a load that copies nothing would find the right bytes still there."""
        self.settle()
        if not self._engine.reset_prefix_cache():
            raise AssertionError("the device would not forget: something still holds blocks")
        self._spoil_device()

    def _spoil_device(self) -> None:
        for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in self._caches()}.values():
            spoil(tensor.new_empty(0).set_(tensor.untyped_storage()))

    def push_out(self, request_ids: list[str]) -> None:
        """Let other prompts take the place of these requests on the device, one at a time, so that stores can keep
        up with them."""
        for other in prompts(MANY, self.family.prompt_tokens, seed=len(self._requests)):
            if not any(map(self.device_tokens, request_ids)):
                return
            self.submit(other, max_tokens=1)
            self.settle()
        raise AssertionError(f"the device still has them after {MANY} other prompts")

    def spoil_device(self, group: int, blocks: Iterable[int]) -> None:
        """Other bytes in these blocks of one group; doing it again brings the right ones back."""
        for block in blocks:
            for tensor in self._caches(group):
                spoil(tensor[block])

    @contextmanager
    def spoilt_host(self, prompt: Tokens, rank: int = 0) -> Iterator[None]:
        """What this prompt loads from the host is wrong on one rank, and no checksum says so. Afterwards the host
        has the right bytes again."""
        spoilt: set[int] = set()
        copier = self.worker.worker_handler._copier
        arena = copier.arena
        bind = self.worker.bind_connector_metadata

        def bind_and_spoil(metadata: Any) -> None:
            for order, request_id in zip(metadata.loads, metadata.waiting, strict=True):
                if self.scheduler.requests[request_id].prompt_token_ids == prompt:
                    for slot in set(order.slots) - spoilt:
                        spoil(arena[slot])
                    spoilt.update(order.slots)
            bind(metadata)

        with (
            mock.patch.object(self.worker, "bind_connector_metadata", bind_and_spoil),
            mock.patch.object(copier._checksums, "wrong_slots", trust),
        ):
            yield
            self.settle()
        for slot in spoilt:
            spoil(arena[slot])
        if not spoilt:
            raise AssertionError("the prompt loaded nothing from the host: nothing was spoilt")

    def spoil_slots(self, slots: Iterable[int], rank: int = 0) -> None:
        """Other bytes in these slots of the host, on one rank."""
        for slot in slots:
            spoil(self.worker.worker_handler._copier.arena[slot])

    def _caches(self, group: int | None = None) -> list[Any]:
        """The tensors of one group's layers, or of all: one for attention, several for states."""
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        chosen = groups if group is None else [groups[group]]
        layers = self._engine.vllm_config.compilation_config.static_forward_context
        tensors: list[Any] = []
        for name in (name for each in chosen for name in each.layer_names):
            cache = layers[name].kv_cache
            tensors += cache if isinstance(cache, tuple | list) else [cache]
        return tensors

    def close(self) -> None:
        """Leave nothing behind that would be in the way of the next engine of this process."""
        self._engine.engine_core.shutdown()
        del self._engine
        self._clean_up()

    def _clean_up(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()
        self._environment.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def spoil(tensor: Any) -> None:
    """Other numbers of about the same size, none of them infinite: the sign and the lowest bit of the exponent are
    flipped, of floats of every kind. Twice is not at all."""
    import torch

    with torch.inference_mode():
        tensor.view(torch.uint8).bitwise_xor_(0x80)


def trust(order: Any, sums: Any) -> list[int]:
    """For a copier that is to take any bytes for the right ones: no slot is wrong. Sums are still kept, so that
    what is stored meanwhile can be verified later."""
    return []


@dataclass(frozen=True)
class Reference:
    """What a vLLM without Forebay says, with nothing cached and with the prompt cached on the device. On a CPU the
    two differ for MLA; what was loaded has to equal the latter."""

    cold: list[Tokens]
    hit: list[Tokens]
    hit_tokens: list[int]


_REFERENCES: dict[str, Reference] = {}


def reference(family: Family, prompts: list[Tokens], max_tokens: int = 8, **engine_args: Any) -> Reference:
    """Computed once for the same question, however many tests ask it."""
    question = repr((family.name, prompts, max_tokens, sorted(engine_args.items())))
    if question not in _REFERENCES:
        with Engine(family, **engine_args) as engine:
            cold = engine.generate(prompts, max_tokens)
            hit = engine.generate(prompts, max_tokens)
            _REFERENCES[question] = Reference(cold, hit, engine.cached_tokens)
    return _REFERENCES[question]


def reference_or_skip(family: Family, prompts: list[Tokens], max_tokens: int = 8, **engine_args: Any) -> Reference:
    """Older releases cannot run every model on a CPU, with Forebay or without. The newest can."""
    from forebay.vllm import compat

    try:
        return reference(family, prompts, max_tokens, **engine_args)
    except Exception as error:
        if compat.release() == compat.NEWEST:
            raise
        pytest.skip(f"this release cannot run the model on a CPU ({type(error).__name__})")


def _start(family: Family, args: dict[str, Any]) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    with ExitStack() as stack:
        stack.enter_context(shims.models_inspected_here())
        stack.enter_context(shims.kernels_registered_once())
        stack.enter_context(shims.sensitive_weights())
        if family.shim is not None:
            stack.enter_context(family.shim())
        return LLMEngine.from_engine_args(EngineArgs(**args))


@functools.cache
def _models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forebay-models-")


def _model_dir(family: Family) -> str:
    folder = Path(_models().name, family.name)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(family.model))
    return str(folder)
