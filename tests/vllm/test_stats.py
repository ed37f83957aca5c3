"""What an operator is told, through vLLM's own stats."""

from __future__ import annotations

from operator import attrgetter
from typing import Any
from unittest import mock

import pytest

from forebay import FullAttention, KVLayout, OffloadConfig, OffloadManager
from forebay.ghost import Predicted
from forebay.metrics import BY_KEY, METRICS, Kind
from forebay.testing import TinyDevicePool
from tests.vllm.families import LLAMA
from tests.vllm.harness import Engine, prompts
from tests.vllm.proof import EAGER


def _stats(**data: Any) -> Any:
    from forebay.vllm.connector import SimpleCPUOffloadConnector

    return SimpleCPUOffloadConnector.build_kv_connector_stats(data)


def test_counters_add_up_and_gauges_are_as_they_are() -> None:
    total = _stats(stored_blocks=3, slots_free=9).aggregate(_stats(stored_blocks=4, loaded_blocks=1, slots_free=5))
    assert total.reduce() == {"stored_blocks": 7, "loaded_blocks": 1, "slots_free": 5}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert total.reduce() == {}


def test_histograms_add_up_bucket_by_bucket() -> None:
    one, other = {"counts": [1, 0, 2], "sum": 0.5}, {"counts": [0, 4, 1], "sum": 1.5}
    total = _stats(load_latency_s=one).aggregate(_stats(load_latency_s=other)).aggregate(_stats())
    assert total.data == {"load_latency_s": {"counts": [1, 4, 3], "sum": 2.0}}
    assert total.reduce() == {"load_latency_s_sum": 2.0, "load_latency_s_count": 8}
    # vLLM gives the same dictionaries to every logger.
    assert (one, other) == ({"counts": [1, 0, 2], "sum": 0.5}, {"counts": [0, 4, 1], "sum": 1.5})


def test_a_gauge_that_changes_alone_is_told() -> None:
    from forebay.vllm.stats import AdapterView, StatsTaker

    layout = KVLayout((FullAttention(4),), tokens_per_hash=4, bytes_per_block=16)
    manager = OffloadManager(layout, OffloadConfig(capacity_bytes=1), TinyDevicePool(8), slots=32, ready=8)
    taker = StatsTaker()
    first = taker.take(manager, AdapterView(48, 0, 3)).data
    assert (first["slots"], first["host_capacity_bytes"], first["host_ready_bytes"]) == (32, 32 * 48, 8 * 48)
    assert first["ranks"] == 3
    assert taker.take(manager, AdapterView(48, 0, 3)).is_empty()
    manager.grow(20)
    assert taker.take(manager, AdapterView(48, 0, 3)).data["host_ready_bytes"] == 20 * 48
    assert taker.take(manager, AdapterView(48, 2, 3)).data["requests_loading"] == 2
    assert taker.take(manager, AdapterView(48, 2, 3)).is_empty()


@pytest.mark.parametrize(
    "key",
    [each.key for each in METRICS if each.source and each.kind is not Kind.GAUGE and "bytes" not in each.key],
)
def test_a_counter_that_changes_alone_is_told(key: str) -> None:
    from forebay.vllm.stats import AdapterView, StatsTaker

    layout = KVLayout((FullAttention(4),), tokens_per_hash=4, bytes_per_block=16)
    manager = OffloadManager(layout, OffloadConfig(capacity_bytes=1), TinyDevicePool(8), slots=32)
    taker, adapter = StatsTaker(), AdapterView(48, 0, 1)
    taker.take(manager, adapter)
    owner, name = attrgetter(BY_KEY[key].source.rpartition(".")[0])(manager), BY_KEY[key].source.rpartition(".")[2]
    if BY_KEY[key].kind is Kind.HISTOGRAM:
        getattr(owner, name).observe(0.25)
        assert taker.take(manager, adapter).data[key]["sum"] == 0.25
    else:
        setattr(owner, name, getattr(owner, name) + 1)
        assert taker.take(manager, adapter).data[key] == 1
    assert taker.take(manager, adapter).is_empty()


def test_a_prediction_that_changes_alone_is_told() -> None:
    from forebay.vllm.stats import AdapterView, StatsTaker

    layout = KVLayout((FullAttention(4),), tokens_per_hash=4, bytes_per_block=16)
    manager = OffloadManager(layout, OffloadConfig(capacity_bytes=1), TinyDevicePool(8), slots=32)
    taker, adapter = StatsTaker(), AdapterView(48, 0, 1)
    taker.take(manager, adapter)
    with mock.patch.object(OffloadManager, "predicted", Predicted(0.1, 0.2, 0.3, 0.4, 0.5)):
        assert taker.take(manager, adapter).data["predicted_hit_share_twice"] == 0.3


def _logger(engine: Engine) -> Any:
    """What vLLM's log lines are made by."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    return KVConnectorLogging(engine.connector._kv_transfer_config)


def _line(logger: Any) -> str:
    lines: list[str] = []
    logger.log(lambda text, *values: lines.append(text % values))
    [line] = lines
    return line


@pytest.mark.compat
def test_what_was_counted_is_handed_over_once_and_logged() -> None:
    import msgspec

    taken: list[dict[str, Any]] = []
    with Engine(LLAMA, EAGER) as engine:
        take = engine.connector.get_kv_connector_stats

        def take_and_remember() -> Any:
            stats = take()
            assert stats.is_empty() is (not stats.data)
            if stats.data:
                # As it goes from process to process.
                taken.append(msgspec.msgpack.decode(msgspec.msgpack.encode(stats.data)))
            return stats

        with mock.patch.object(engine.connector, "get_kv_connector_stats", take_and_remember):
            engine.generate(prompts(3))
            engine.forget_device()
            engine.generate(prompts(3))
            engine.settle()
        assert take().is_empty(), "something was counted twice"
        assert len(taken) > 1
        for data in taken:
            for key, value in data.items():
                if BY_KEY[key].kind is Kind.HISTOGRAM:
                    assert value.keys() == {"counts", "sum"}
                    assert sum(value["counts"]) > 0
                else:
                    assert type(value) in (int, float), key
        total = _stats()
        for data in taken:
            total = total.aggregate(_stats(**data))
        stats, pool = engine.manager.stats, engine.manager.pool
        for name in ("lookups", "stored_blocks", "stored_bytes", "loaded_blocks", "loaded_bytes", "hit_tokens"):
            assert total.data[name] == getattr(stats, name) > 0
        for name in ("store_latency_s", "load_latency_s"):
            histogram = getattr(stats, name)
            assert total.data[name]["counts"] == histogram.counts
            assert total.data[name]["sum"] == pytest.approx(histogram.total)
        assert (total.data["slots"], total.data["slots_cached"]) == (pool.capacity, pool.cached)
        assert total.data["slots_free"] == pool.free

        # Several loggers are given the same dictionaries, and each adds up for itself.
        one, other = _logger(engine), _logger(engine)
        for data in taken:
            one.observe(data)
            other.observe(data)
        line = _line(one)
        assert line.startswith("KV Transfer metrics: ")
        assert f"stored_blocks={stats.stored_blocks}, " in line
        assert line == _line(other)
