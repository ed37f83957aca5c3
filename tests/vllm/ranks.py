"""Engines of several ranks: the scheduler in this process, every rank in a process of its own.

What a test does on a rank is a function of this module, which is imported there by its name. Patches made in this
process do not reach the ranks, so weights come from a file. vLLM splits them: any number of ranks says the same.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.vllm.families import Family
from tests.vllm.harness import Engine, Reference, Tokens, reference, spoil, trust


class RankedEngine(Engine):
    """`tensor` times `pipeline` ranks. `layers` is how many of them each rank of the pipeline has."""

    def __init__(
        self,
        family: Family,
        offload: dict[str, Any] | None = None,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        layers: tuple[int, ...] = (),
        **engine_args: Any,
    ) -> None:
        self.ranks = tensor * pipeline
        self._settings = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # or every rank wants a NUMA node of its own
        if layers:
            self._settings["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers))
        super().__init__(
            family,
            offload,
            **_with_weights(family),
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            distributed_executor_backend="mp",
            **engine_args,
        )
        if pipeline > 1:
            self.on_ranks(_give_buffers)

    def _start(self, args: dict[str, Any]) -> Any:
        from vllm import envs

        envs.disable_envs_cache()  # an engine before this one has had all settings remembered as they were
        try:
            with mock.patch.dict(os.environ, self._settings):  # the ranks have them from then on
                return super()._start(args)
        finally:
            envs.disable_envs_cache()  # and they are not for the engine after it

    def close(self) -> None:
        super().close()
        left = multiprocessing.active_children()
        if left:
            raise AssertionError(f"ranks outlive their engine: {left}")

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Have every rank call this with its worker; what they answer. What was ordered before is done before."""
        return list(self.core.model_executor.collective_rpc(function, args=args))

    @property
    def slots_of_ranks(self) -> list[int]:
        """How many each rank has room for, whatever they have agreed on."""
        return self.on_ranks(_slots)

    def forget_all(self) -> None:
        """Nothing is cached, neither on the device nor on the host."""
        self.settle()
        if self.connector is not None:
            self.connector.reset_cache()
        self.forget_device()

    @contextmanager
    def faulty(self, **faults: Any) -> Iterator[None]:
        """Copies that are ordered meanwhile fail or are late as `inject_faults` would say, whatever it says."""
        self.on_ranks(_inject, faults)
        yield
        self.on_ranks(_inject, None)

    @contextmanager
    def spoilt_host(self, prompt: Tokens, rank: int = 0) -> Iterator[None]:
        spoilt: set[int] = set()
        build = self.connector.build_connector_meta

        def build_and_spoil(scheduler_output: Any) -> Any:
            metadata = build(scheduler_output)
            for order, request_id in zip(metadata.loads, metadata.waiting, strict=True):
                if self.scheduler.requests[request_id].prompt_token_ids == prompt:
                    self.spoil_slots(set(order.slots) - spoilt, rank)
                    spoilt.update(order.slots)
            if any(spoilt.intersection(order.slots) for order in metadata.stores):
                raise AssertionError("other bytes go to a slot that was spoilt: the right ones cannot be restored")
            return metadata

        self.on_ranks(_trust_the_host, True)
        with mock.patch.object(self.connector, "build_connector_meta", build_and_spoil):
            yield
            self.settle()
        self.spoil_slots(spoilt, rank)
        self.on_ranks(_trust_the_host, False)
        if not spoilt:
            raise AssertionError("the prompt loaded nothing from the host: nothing was spoilt")

    def spoil_slots(self, slots: Iterable[int], rank: int = 0) -> None:
        self.on_ranks(_spoil_slots, rank, sorted(slots))

    def _spoil_device(self) -> None:
        self.on_ranks(_spoil_caches)


# --- what ranks are told to do ------------------------------------------------------------------------------


def _half_of_rank() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_handler


def _slots(worker: Any) -> int:
    return int(_half_of_rank().num_cpu_blocks)


def _inject(worker: Any, faults: dict[str, Any] | None) -> None:
    """None are those of the configuration."""
    from forebay.copier.faults import Fates, InjectedFaults

    half = _half_of_rank()
    configured = half._faults or InjectedFaults()
    half._copier._fates = Fates(configured if faults is None else InjectedFaults(**faults), half._rank)


def _spoil_slots(worker: Any, rank: int, slots: list[int]) -> None:
    if worker.rank == rank:
        for slot in slots:
            spoil(_half_of_rank()._copier.arena[slot])


def _trust_the_host(worker: Any, yes: bool) -> None:
    checksums = _half_of_rank()._copier._checksums
    checksums.wrong_slots = trust if yes else type(checksums).wrong_slots.__get__(checksums)


def _spoil_caches(worker: Any) -> None:
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    caches = [layer.kv_cache for layer in layers]
    for tensor in {tensor.untyped_storage().data_ptr(): tensor for tensor in caches}.values():
        spoil(tensor.new_empty(0).set_(tensor.untyped_storage()))


def _give_buffers(worker: Any) -> None:
    """Where a rank puts what the rank before it sends. A warm-up run makes them, and on a CPU there is none where
    nothing is compiled."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


# --- what ranks have heard and said -------------------------------------------------------------------------


@dataclass
class Traffic:
    """All orders since it began, and how many ranks have reported each."""

    ranks: int
    stores: dict[int, Any] = field(default_factory=dict)
    loads: dict[int, Any] = field(default_factory=dict)
    waiting: dict[int, str] = field(default_factory=dict)
    """Who waits for each load, by vLLM's name for it."""
    done: Counter[int] = field(default_factory=Counter)
    failed: Counter[int] = field(default_factory=Counter)

    @property
    def reports(self) -> Counter[int]:
        return self.done + self.failed

    def blocks_done(self, orders: dict[int, Any]) -> int:
        """Blocks of the orders that every rank has carried out."""
        return sum(len(order.slots) for number, order in orders.items() if self.done[number] == self.ranks)

    def partly_reported(self) -> set[int]:
        return {number for number, ranks in self.reports.items() if ranks < self.ranks}


@contextmanager
def watched(engine: Engine) -> Iterator[Traffic]:
    """What goes between scheduler and ranks. At the end, every rank has reported every order, once."""
    traffic, connector = Traffic(engine.ranks), engine.connector
    build, update = connector.build_connector_meta, connector.update_connector_output

    def watch_orders(scheduler_output: Any) -> Any:
        metadata = build(scheduler_output)
        traffic.stores |= {order.id: order for order in metadata.stores}
        traffic.loads |= {order.id: order for order in metadata.loads}
        for order, request_id in zip(metadata.loads, metadata.waiting, strict=True):
            traffic.waiting[order.id] = request_id
        return metadata

    def watch_reports(output: Any) -> None:
        said = output.kv_connector_worker_meta
        if said is not None:
            traffic.done += Counter(said.completed_store_events) + Counter(said.completed_load_events)
            traffic.failed += Counter(said.failed_events) + Counter(said.mismatched_events)
        update(output)

    with (
        mock.patch.object(connector, "build_connector_meta", watch_orders),
        mock.patch.object(connector, "update_connector_output", watch_reports),
    ):
        yield traffic
        engine.settle()
    assert traffic.reports == dict.fromkeys([*traffic.stores, *traffic.loads], engine.ranks)


# --- weights ------------------------------------------------------------------------------------------------


def said_by_one(family: Family, prompts: list[Tokens], max_tokens: int = 8) -> Reference:
    """What one rank without Forebay says, with the same weights."""
    return reference(family, prompts, max_tokens, **_with_weights(family))


def _with_weights(family: Family) -> dict[str, str]:
    return {"model": _written(family.name, json.dumps(family.model)), "load_format": "safetensors"}


@functools.cache
def _models() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="forebay-weights-")


@functools.cache
def _written(name: str, config: str) -> str:
    """A model with weights that make tokens depend on every part of the KV cache, as shims.sensitive_weights()."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(_models().name, name)
    folder.mkdir()
    (folder / "config.json").write_text(config)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    tensors = {}
    for tensor_name, tensor in model.named_parameters():  # a tied tensor comes once, under its first name
        generator = torch.Generator().manual_seed(zlib.crc32(tensor_name.encode()))
        spread = 0.02 if "embed" in tensor_name else 0.25
        tensors[tensor_name] = torch.empty(tensor.shape).normal_(0, spread, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
