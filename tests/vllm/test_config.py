"""Settings in --kv-transfer-config: read once, checked before anything expensive starts."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.config import Mode
from forebay.errors import CapacityError, ConfigError


def _parse(**settings: Any) -> Any:
    from forebay.vllm.config import ConnectorConfig

    return ConnectorConfig.parse(settings)


def test_sizes_are_in_total_or_for_each_rank() -> None:
    assert _parse().for_ranks(2).capacity_bytes == 4 * 1024**3  # vLLM's default: 8 GiB in total
    assert _parse(cpu_bytes_to_use=64_000_000_000).for_ranks(4).capacity_bytes == 16_000_000_000
    assert _parse(cpu_bytes_to_use="64GB").for_ranks(1).capacity_bytes == 64_000_000_000
    assert _parse(cpu_bytes_to_use=64e9).for_ranks(1).capacity_bytes == 64_000_000_000  # as JSON may have it
    both = _parse(cpu_bytes_to_use="64GB", cpu_bytes_to_use_per_rank="1GiB")
    assert both.for_ranks(8).capacity_bytes == 1024**3


def test_less_than_a_block_is_refused_under_the_name_it_was_given() -> None:
    from tests.vllm.driving import full, kv_cache_config

    config = kv_cache_config([full()], 64)
    _parse(cpu_bytes_to_use=2048).check_capacity(config, 2)
    line = (
        r"extra_config.cpu_bytes_to_use: expected at least one block on each of 2 ranks \(2048 bytes\), got 2047"
    )
    with pytest.raises(CapacityError, match=line):
        _parse(cpu_bytes_to_use=2047).check_capacity(config, 2)
    with pytest.raises(
        CapacityError, match=r"cpu_bytes_to_use_per_rank: expected at least one block \(1024 bytes\)"
    ):
        _parse(cpu_bytes_to_use_per_rank=1000).check_capacity(config, 2)


def test_the_other_settings_reach_the_core() -> None:
    config = _parse(lazy_offload=True, eviction_policy="s3fifo", load_deadline_s=5, min_load_tokens=64).for_ranks(
        1
    )
    assert config.mode is Mode.LAZY
    assert (config.eviction_policy, config.load_deadline_s, config.min_load_tokens) == ("s3fifo", 5, 64)


def test_everything_is_verified_unless_told_otherwise() -> None:
    assert _parse().verify.value == "all"
    for choice in ("all", "sampled", "off"):
        assert _parse(verify=choice).verify.value == choice


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"cpu_bytes": 1}, "kv_connector_extra_config: unknown key 'cpu_bytes'; did you mean 'cpu_bytes_to_use'?"),
        ({"lazy": True}, "unknown key 'lazy'; did you mean 'lazy_offload'?"),
        (
            {"cpu_bytes_to_use": "64 gigs"},
            "kv_connector_extra_config.cpu_bytes_to_use: expected whole bytes, or text",
        ),
        ({"cpu_bytes_to_use": 0}, "kv_connector_extra_config.cpu_bytes_to_use: expected at least one byte, got 0"),
        ({"lazy_offload": "false"}, "kv_connector_extra_config.lazy_offload: expected true or false, got 'false'"),
        ({"eviction_policy": "mru"}, "eviction_policy: expected"),
        ({"load_deadline_s": -1}, "load_deadline_s: expected a number of seconds, at least 0, got -1"),
        (
            {"kv_offload_backend": "disk"},
            "kv_connector_extra_config.kv_offload_backend: expected 'cpu', got 'disk'",
        ),
        ({"verify": "some"}, "kv_connector_extra_config.verify: expected one of all, sampled, off, got 'some'"),
        ({"verify": True}, "kv_connector_extra_config.verify: expected one of all, sampled, off, got True"),
        ({"verfy": "off"}, "kv_connector_extra_config: unknown key 'verfy'; did you mean 'verify'?"),
        ({"inject_faults": {"fail": 1}}, "kv_connector_extra_config.inject_faults: unknown key 'fail'"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as error:
        _parse(**settings)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_vllm_refuses_a_wrong_setting_while_it_reads_its_own_configuration() -> None:
    """Long before weights are loaded: building the configuration is enough."""
    from vllm.config import KVTransferConfig, VllmConfig

    def configure(extra: dict[str, Any]) -> Any:
        return VllmConfig(
            kv_transfer_config=KVTransferConfig(
                kv_connector="SimpleCPUOffloadConnector",
                kv_connector_module_path="forebay.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            )
        )

    configure({"cpu_bytes_to_use": "1GB"})
    with pytest.raises(ValueError, match="did you mean 'cpu_bytes_to_use'"):
        configure({"cpu_bytes_to_used": "1GB"})
