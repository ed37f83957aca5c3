"""What an operator is told, through vLLM's own stats."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.vllm.families import LLAMA
from tests.vllm.harness import Engine, prompts
from tests.vllm.proof import EAGER


def _stats(**data: float) -> Any:
    from forebay.vllm.connector import SimpleCPUOffloadConnector

    return SimpleCPUOffloadConnector.build_kv_connector_stats(data)


def test_counters_add_up_and_gauges_are_as_they_are() -> None:
    total = _stats(stored_blocks=3, slots_free=9).aggregate(_stats(stored_blocks=4, loaded_blocks=1, slots_free=5))
    assert total.reduce() == {"stored_blocks": 7, "loaded_blocks": 1, "slots_free": 5}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert total.reduce() == {}


def _logger(engine: Engine) -> Any:
    """What vLLM's log lines are made by."""
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    return KVConnectorLogging(engine.connector._kv_transfer_config)


def _line(logger: Any) -> str:
    lines: list[str] = []
    logger.log(lambda text, *values: lines.append(text % values))
    [line] = lines
    return line


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
            assert all(type(name) is str and type(value) in (int, float) for name, value in data.items())
        total = _stats()
        for data in taken:
            total = total.aggregate(_stats(**data))
        stats, pool = engine.manager.stats, engine.manager.pool
        for name in ("lookups", "stored_blocks", "stored_bytes", "loaded_blocks", "loaded_bytes", "hit_tokens"):
            assert total.data[name] == getattr(stats, name) > 0
        assert total.data["load_latency_s_sum"] == pytest.approx(stats.load_latency_s.total)
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
