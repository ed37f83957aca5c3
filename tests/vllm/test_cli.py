"""`forebay config` and an engine agree on what is right, and doctor finds the vLLM that is installed."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from forebay.cli.findings import Severity, worst
from forebay.cli.transfer import TRANSFER_KEYS, check, split
from tests.cli.builders import forebay, right


def test_every_key_of_vllm_is_known() -> None:
    from vllm.config import KVTransferConfig

    assert {field.name for field in fields(KVTransferConfig)} <= set(TRANSFER_KEYS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_role": "kv_consumer"},
        {"kv_role": "kv_producer"},
        {"kv_role": "both"},
        {"kv_role": None},
        {"kv_load_failure_policy": "fail"},
        {"kv_load_failure_policy": "retry"},
        {"kv_connector_extra_config": {"cpu_bytes_to_used": "1GB"}},
        {"kv_connector_extra_config": {"verify": "some"}},
        {"kv_connector_extra_config": [1]},
        {"kv_conector_module": "x"},
    ],
    ids=json.dumps,
)
def test_what_is_refused_is_what_vllm_refuses(changes: dict[str, Any]) -> None:
    from vllm.config import KVTransferConfig, VllmConfig

    config = right(**changes)
    try:
        VllmConfig(kv_transfer_config=KVTransferConfig(**config))
        refused = False
    except (TypeError, ValueError):
        refused = True
    assert (worst(check(split(config, "test"))) is Severity.ERROR) is refused


def test_what_is_printed_starts_the_connector() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from forebay.vllm import SimpleCPUOffloadConnector

    config = KVTransferConfig(**json.loads(forebay("config", "--memory", "1GB").stdout))
    assert KVConnectorFactory.get_connector_class(config) is SimpleCPUOffloadConnector


def test_doctor_finds_this_vllm_and_this_torch() -> None:
    import torch
    import vllm

    rows = {row["id"]: row["what"] for row in json.loads(forebay("doctor", "--json").stdout)}
    assert vllm.__version__ in rows["vllm"]
    assert torch.__version__ in rows["torch"]
    assert rows["torch"].endswith("CPUs") is (torch.version.cuda is None)
