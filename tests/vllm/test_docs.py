"""What README and docs say about the connector is true. tests/test_readme.py has what needs no vLLM."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from forebay import OffloadConfig
from tests.test_readme import FENCE, PAGES, ROOT, cells, default_of
from tests.vllm.test_names import LEFT_OUT, OTHER_SIGNATURE

SETTINGS = cells("configuration.md", "In vLLM")


def test_every_key_is_described_and_no_other() -> None:
    from forebay.vllm.config import _KNOWN

    assert list(SETTINGS) == list(_KNOWN)


def test_defaults_are_those_that_count() -> None:
    from forebay.vllm.config import ConnectorConfig

    core = {field.name: default_of(field) for field in fields(OffloadConfig)}
    for key, (default, *_) in SETTINGS.items():
        if key in core:
            assert default == core[key], key
        elif default != "none":
            assert ConnectorConfig.parse({key: json.loads(default.strip("`"))}) == ConnectorConfig.parse({}), key
    assert {key for key, (default, *_) in SETTINGS.items() if default == "none"} == {
        "cpu_bytes_to_use_per_rank",
        "record_trace",
        "inject_faults",
    }


@pytest.mark.parametrize("key", SETTINGS)
def test_examples_are_taken(key: str) -> None:
    from forebay.vllm.config import ConnectorConfig

    _, meaning, example = SETTINGS[key]
    assert meaning
    ConnectorConfig.parse({key: json.loads(example.strip("`"))})


def _transfer_configs() -> list[dict[str, Any]]:
    """What pages show for --kv-transfer-config."""
    texts = []
    for page in PAGES:
        for _, language, code in FENCE.findall(page.read_text()):
            if language == "json":
                texts.append(code)
            elif language == "bash":
                texts += re.findall(r"--kv-transfer-config '(.*?)'", code, re.DOTALL)
    return [shown for shown in map(json.loads, texts) if "kv_connector" in shown]


def test_vllm_takes_the_configurations_that_pages_show() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    import forebay.vllm

    shown = _transfer_configs()
    assert len(shown) >= 2, "README and docs/configuration.md"
    for each in shown:
        config = KVTransferConfig(**each)  # refuses keys that it does not know
        assert config.kv_load_failure_policy == "recompute"
        found = KVConnectorFactory.get_connector_class(config)
        assert found is forebay.vllm.SimpleCPUOffloadConnector


def test_differences_names_every_method_that_differs() -> None:
    text = (ROOT / "docs" / "differences.md").read_text()
    for name, method in (*OTHER_SIGNATURE, *LEFT_OUT):
        shown = f"`{name}()`" if method == "__init__" else f"`{name}.{method}()`"
        assert shown in text, shown


def test_releases_and_tries_are_those_of_the_code() -> None:
    from forebay.vllm import compat, worker

    oldest, newest = (".".join(map(str, each)) for each in (compat.OLDEST, compat.NEWEST))
    for page in ("README.md", "docs/differences.md"):
        text = " ".join((ROOT / page).read_text().split())
        assert f"tried up to {worker._TRIES} times" in text, page
    assert f"written for vLLM {oldest} to {newest}" in " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("heading", ["From vLLM's SimpleCPUOffloadConnector", "From vLLM's OffloadingConnector"])
def test_settings_of_vllm_that_migration_names_are_read_by_vllm(heading: str) -> None:
    import vllm

    package = Path(vllm.__file__).parent
    connectors = package / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    files = [
        *(package / "v1" / "kv_offload").rglob("*.py"),
        *connectors.glob("offloading*/*.py"),
        connectors / "simple_cpu_offload_connector.py",
        package / "config" / "kv_transfer.py",
    ]
    code = "\n".join(file.read_text() for file in files)
    page = (ROOT / "docs" / "migration.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    names = [name for cell in cells for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)]
    assert len(names) >= 8
    for name in names:
        assert f'"{name}"' in code or f"\n    {name}:" in code, name
