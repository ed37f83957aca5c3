"""What has to be bent in vLLM to test on a CPU what it only does on GPUs."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


@contextmanager
def mamba2_without_checkpoints() -> Iterator[None]:
    """The chunk scan for CPUs does not return the states in between, which exporting a state from inside a forward
    pass needs. Without that promise the scheduler ends a prefill chunk at every state it wants to keep."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    with mock.patch.object(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec):
        yield


@contextmanager
def prefix_caching_with_mla() -> Iterator[None]:
    """The platform turns prefix caching off for MLA without AMX, although it works."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_turn_on_again(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.cache_config.enable_prefix_caching = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_and_turn_on_again)):
        yield


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """The first time vLLM meets an architecture it asks a subprocess about it, which costs ten seconds each."""
    from vllm.model_executor.models import registry

    with mock.patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()):
        yield


_kernels_are_registered = False


@contextmanager
def kernels_registered_once() -> Iterator[None]:
    """Every engine replaces Triton's kernels in all modules there are. Once is enough, and later it stumbles over
    what speculation has imported meanwhile. Engines whose ranks have processes of their own do it there."""
    from vllm.platforms.cpu import CpuPlatform

    register = getattr(CpuPlatform, "register_triton_kernel_overrides", None)
    if register is None:
        yield
        return

    def register_once() -> None:
        global _kernels_are_registered
        if not _kernels_are_registered:
            register()
            _kernels_are_registered = True

    with mock.patch.object(CpuPlatform, "register_triton_kernel_overrides", staticmethod(register_once)):
        yield


@contextmanager
def sensitive_weights() -> Iterator[None]:
    """Weights that make tokens depend on every part of the KV cache.

    vLLM's dummy weights are so small, and so alike, that every prompt is answered with the same tokens whatever
    the cache holds. Each tensor gets numbers of its own, from its name, so that every engine gets the same.
    """
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load_dummies = DummyModelLoader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        load_dummies(self, model, model_config)
        for name, tensor in model.named_parameters():  # a tied tensor comes once, under its first name
            if tensor.is_floating_point():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                values = torch.empty(tensor.shape).normal_(
                    0, 0.02 if "embed" in name else 0.25, generator=generator
                )
                if name.endswith(".A"):
                    values = (
                        -values.abs()
                    )  # what a Mamba state decays by: otherwise it grows until nothing is left
                tensor.data.copy_(values)
        for name, tensor in model.named_buffers():
            if name.endswith(".layer_scalar"):
                tensor.fill_(1)  # Gemma 4 weighs each layer's output with it

    with mock.patch.object(DummyModelLoader, "load_weights", load_weights):
        yield
