"""Code written for vLLM's classes works after changing the import: names, parameters, defaults."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

VLLM = {
    "SimpleCPUOffloadConnector": "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "SimpleCPUOffloadScheduler": "vllm.v1.simple_kv_offload.manager",
    "SimpleCPUOffloadMetadata": "vllm.v1.simple_kv_offload.metadata",
    "SimpleCPUOffloadWorkerMetadata": "vllm.v1.simple_kv_offload.metadata",
    "SimpleCPUOffloadWorker": "vllm.v1.simple_kv_offload.worker",
}

# The whole of what differs on purpose. docs/differences.md says the same to users.
OTHER_SIGNATURE = {
    ("SimpleCPUOffloadScheduler", "__init__"): "block sizes are found if not given, by keyword; no disk; settings",
    ("SimpleCPUOffloadMetadata", "__init__"): "made of transfers; vLLM's fields are views of them",
    (
        "SimpleCPUOffloadWorkerMetadata",
        "__init__",
    ): "also counts loads, failures, mismatches, ready slots",
    ("SimpleCPUOffloadWorker", "__init__"): "no disk; faults can be injected",
}
LEFT_OUT = {
    ("SimpleCPUOffloadConnector", "get_boundary_store_stats"): "vLLM's diagnostics of stores it declined",
    ("SimpleCPUOffloadScheduler", "get_boundary_store_stats"): "vLLM's diagnostics of stores it declined",
}


def _classes(name: str) -> tuple[type, type]:
    return getattr(importlib.import_module(VLLM[name]), name), getattr(
        importlib.import_module("forebay.vllm"), name
    )


def _parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [
        (each.name, each.kind, each.default)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]


def _methods(kind: type) -> dict[str, Any]:
    """What the class defines itself and callers may use; of private ones, those that vLLM's own tests call."""
    known = {"__init__", "_derive_cpu_config", "_estimate_lazy_target_blocks"}
    return {
        name: getattr(kind, name)
        for name, value in vars(kind).items()
        if (name in known or not name.startswith("_")) and callable(getattr(kind, name)) and value is not None
    }


@pytest.mark.parametrize("name", VLLM)
def test_every_method_of_vllms_class_is_there_with_its_parameters(name: str) -> None:
    theirs, ours = _classes(name)
    for method, function in _methods(theirs).items():
        if (name, method) in LEFT_OUT:
            assert not hasattr(ours, method) or method not in vars(ours), f"{method} is there after all"
            continue
        assert hasattr(ours, method), f"{name} has no {method}"
        same = _parameters(getattr(ours, method)) == _parameters(function)
        assert same is ((name, method) not in OTHER_SIGNATURE), (
            f"{name}.{method}: {inspect.signature(getattr(ours, method))}, vLLM has {inspect.signature(function)}"
        )


def test_metadata_has_vllms_fields() -> None:
    from dataclasses import fields

    for name in ("SimpleCPUOffloadMetadata", "SimpleCPUOffloadWorkerMetadata"):
        theirs, ours = _classes(name)
        instance = ours() if name.endswith("dMetadata") else ours({})
        for field in fields(theirs):
            assert hasattr(instance, field.name), f"{name} has no {field.name}"


def test_empty_metadata_reads_as_vllms_does() -> None:
    theirs, ours = (kind() for kind in _classes("SimpleCPUOffloadMetadata"))
    for name in vars(theirs):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_counts_of_ranks_add_up() -> None:
    _, kind = _classes("SimpleCPUOffloadWorkerMetadata")
    one, other = kind({1: 1, 2: 1}), kind({2: 1, 3: 1}, {7: 1}, {8: 1})
    assert one.aggregate(other) == kind({1: 1, 2: 2, 3: 1}, {7: 1}, {8: 1})
    first = kind({}, mismatched_events={4: 1, 5: 1}, ready={0: 7, 1: 9})
    later = kind({}, mismatched_events={5: 2}, ready={0: 8, 1: 3, 2: 1})
    both = kind({}, mismatched_events={4: 1, 5: 3}, ready={0: 8, 1: 9, 2: 1})
    assert first.aggregate(later) == later.aggregate(first) == both
    assert one == kind({1: 1, 2: 1})
    with pytest.raises(TypeError, match="expected SimpleCPUOffloadWorkerMetadata, got str"):
        one.aggregate("two")


def test_the_lists_of_differences_name_methods_that_vllm_has() -> None:
    for name, method in (*OTHER_SIGNATURE, *LEFT_OUT):
        assert method in _methods(_classes(name)[0]), (name, method)


def test_only_what_is_exported_is_public() -> None:
    module = importlib.import_module("forebay.vllm")
    assert set(module.__all__) == set(VLLM)
    with pytest.raises(AttributeError, match="no attribute 'SimpleCPUOffloadConector'"):
        _ = module.SimpleCPUOffloadConector
