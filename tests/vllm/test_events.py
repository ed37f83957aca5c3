"""What a router is told, over vLLM's own publisher."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllm.adapter import RANK, save_adapter
from tests.vllm.driving import Hand, full, vllm_config
from tests.vllm.families import GEMMA2, GEMMA4, LLAMA, Family
from tests.vllm.harness import Engine, Tokens, prompts
from tests.vllm.proof import EAGER, LAZY
from tests.vllm.router import Place, Router, Subscriber, on_device, on_host


@contextmanager
def _published(family: Family, offload: dict[str, Any], **engine_args: Any) -> Iterator[tuple[Engine, Subscriber]]:
    with (
        Subscriber() as subscriber,
        Engine(family, offload, kv_events_config=subscriber.config, **engine_args) as engine,
    ):
        subscriber.listen(engine)
        yield engine, subscriber


def _run(engine: Engine, asked: list[Tokens], max_tokens: int = 40, **sampling: Any) -> list[Any]:
    """Let the engine answer, and everything be stored. Returns its own requests."""
    ids = [engine.submit(prompt, max_tokens, **sampling) for prompt in asked]
    requests = [engine.scheduler.requests[engine.internal_id(each)] for each in ids]
    engine.run()
    engine.settle()
    return requests


def _stored(events: list[Any], medium: str) -> list[Any]:
    return [each for each in events if type(each).__name__ == "BlockStored" and each.medium == medium]


def _blocks(events: list[Any]) -> dict[Place, dict[str, Any]]:
    """All that was said of each block. What is said of several at once is split up."""
    said: dict[Place, dict[str, Any]] = {}
    for event in events:
        parent, span = event.parent_block_hash, event.block_size
        for i, each in enumerate(event.block_hashes):
            said[event.group_idx, each] = {
                "parent": parent,
                "tokens": list(event.token_ids[i * span : (i + 1) * span]),
                "size": span,
                "lora": (event.lora_id, event.lora_name),
                "extra": None if event.extra_keys is None else event.extra_keys[i],
                "kind": (event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                "session": event.session_id,
            }
            parent = each
    return said


def _expected(engine: Engine, requests: list[Any]) -> dict[Place, tuple[Any, list[int]]]:
    """Parent and tokens of every block these requests can have, from their own hashes and tokens."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    found: dict[Place, tuple[Any, list[int]]] = {}
    hash_tokens = min(engine.block_tokens)
    for request in requests:
        tokens = list(request.all_token_ids)
        for group, span in enumerate(engine.block_tokens):
            step = span // hash_tokens
            hashes = [maybe_convert_block_hash(each) for each in request.block_hashes[step - 1 :: step]]
            for i, (each, parent) in enumerate(zip(hashes, [None, *hashes], strict=False)):
                found[group, each] = (parent, tokens[i * span : (i + 1) * span])
    return found


@pytest.mark.parametrize("who", ["plain", "salted", "lora"])
def test_the_host_is_announced_as_the_device_is(who: str, tmp_path: Path) -> None:
    lora = {"enable_lora": True, "max_lora_rank": RANK} if who == "lora" else {}
    asked: dict[str, Any] = {}
    if who == "salted":
        asked["cache_salt"] = "salt"
    elif who == "lora":
        asked["lora_request"] = save_adapter(tmp_path / "adapter", 1)
    with _published(LLAMA, EAGER, **lora) as (engine, subscriber):
        requests = _run(engine, prompts(2), **asked)
        events = subscriber.take(engine)
        host, device = _blocks(_stored(events, "CPU")), _blocks(_stored(events, "GPU"))
        assert host == device
        assert {place: (said["parent"], said["tokens"]) for place, said in host.items()} == _expected(
            engine, requests
        )
        assert {said["size"] for said in host.values()} == {32}
        firsts = [said["extra"] for said in host.values() if said["parent"] is None]
        if who == "salted":
            assert firsts == [("salt",)] * 2
        elif who == "lora":
            assert {said["lora"] for said in host.values()} == {(1, "adapter1")}
            assert firsts == [("adapter1",)] * 2
        else:
            assert firsts == [None] * 2
        assert {event.locality for event in _stored(events, "CPU")} == {"LOCAL"}


@pytest.mark.parametrize("offload", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("family", [LLAMA, GEMMA2, GEMMA4], ids=str)
def test_every_group_has_its_own_chain(family: Family, offload: dict[str, Any]) -> None:
    """In lazy mode a block may outlive its request, and then nobody knows its tokens. What is said is right."""
    with _published(family, offload) as (engine, subscriber):
        requests = [request for i in range(3) for request in _run(engine, prompts(4, seed=i))]
        events = subscriber.take(engine)
        host, device = _blocks(_stored(events, "CPU")), _blocks(_stored(events, "GPU"))
        kinds = {group: said["kind"] for (group, _), said in device.items()}
        assert {group for group, _ in host} == kinds.keys() == set(range(len(family.block_tokens)))
        expected = _expected(engine, requests)
        known = 0
        for place, said in host.items():
            parent, tokens = expected[place]
            assert said["size"] == family.block_tokens[place[0]]
            assert said["kind"] == kinds[place[0]]
            assert said["parent"] in ({parent} if offload is EAGER else {parent, None})
            assert said["tokens"] == tokens or (offload is LAZY and not said["tokens"])
            known += bool(said["tokens"])
        assert known == len(host) or offload is LAZY
        removed = [each for each in events if type(each).__name__ == "BlockRemoved"]
        assert {each.medium for each in removed} <= {"GPU"}, "the host was large enough"


def _host_of(blocks: int, family: Family) -> dict[str, int]:
    """Host memory for so many blocks."""
    model = family.model
    layers = model["num_hidden_layers"] // len(family.block_tokens)  # groups lie on top of each other
    return {"cpu_bytes_to_use": blocks * layers * 32 * 2 * model["num_key_value_heads"] * model["head_dim"] * 4}


@pytest.mark.parametrize(
    "settings",
    [{}, {"lazy_offload": True}, {"inject_faults": {"fail_chance": 0.3}}],
    ids=["eager", "lazy", "faults"],
)
@pytest.mark.parametrize(("family", "device_blocks", "slots"), [(LLAMA, 48, 60), (GEMMA2, 90, 80)], ids=str)
def test_a_router_knows_exactly_what_is_where(
    family: Family, device_blocks: int, slots: int, settings: dict[str, Any]
) -> None:
    """Device and host are both too small for the prompts, so that blocks leave both and come back."""
    router, asked, numbers, lost = Router(), prompts(6), random.Random(0), 0
    small = {"num_gpu_blocks_override": device_blocks, "max_num_seqs": 2, "max_num_batched_tokens": 512}
    with _published(family, _host_of(slots, family) | settings, **small) as (engine, subscriber):
        assert engine.manager.pool.capacity == slots
        for _ in range(24):
            _run(engine, numbers.sample(asked, 2), max_tokens=8)
            events = subscriber.take(engine)
            router.hear(events)
            lost += sum(type(each).__name__ == "BlockRemoved" and each.medium == "CPU" for each in events)
            assert router.places["CPU"] == on_host(engine.connector.scheduler_manager)
            # Of two copies on the device vLLM says that the block is gone when one goes, with and without Forebay.
            # That happens where windows make it compute again what it still has in part.
            assert router.places["GPU"] == on_device(engine) or len(family.block_tokens) > 1
            assert router.places["GPU"] <= on_device(engine)
        stats = engine.manager.stats
        assert lost
        assert stats.loaded_blocks
        assert stats.load_failures + stats.store_failures > 0 or "inject_faults" not in settings


def test_a_reset_of_the_host_says_nothing_of_the_device() -> None:
    router = Router()
    with _published(GEMMA2, EAGER) as (engine, subscriber):
        _run(engine, prompts(3))
        router.hear(subscriber.take(engine))
        assert router.places["CPU"]
        device = set(router.places["GPU"])
        assert engine.connector.reset_cache() is True
        _run(engine, prompts(1, 10), max_tokens=1)  # events travel with the next step; this one fills no block
        events = subscriber.take(engine)
        router.hear(events)
        assert {(type(each).__name__, each.medium) for each in events} == {("BlockRemoved", "CPU")}
        assert router.places == {"GPU": device, "CPU": set()}
        assert on_device(engine) == device
        _run(engine, prompts(2, seed=1))
        router.hear(subscriber.take(engine))
        assert router.places["CPU"] == on_host(engine.connector.scheduler_manager)
        assert router.places["CPU"]


def test_blocks_that_left_just_before_a_reset_are_not_forgotten() -> None:
    """An engine that plans a step ahead can be reset before it has published what the step pushed out."""
    router = Router()
    config = vllm_config(kv_events_config=SimpleNamespace(enable_kv_cache_events=True))
    hand = Hand("forebay", [full()], slots=4, vllm_config=config)
    hand.keep(hand.request("first", range(64)))
    router.hear(hand.scheduler.take_events())
    assert router.places["CPU"] == on_host(hand.scheduler)
    assert len(router.places["CPU"]) == 4
    second = hand.request("second", range(100, 164))
    hand.admit(second)
    hand.step(second)
    hand.scheduler.reset()
    hand.scheduler.reset()
    router.hear(hand.scheduler.take_events())
    assert router.places["CPU"] == on_host(hand.scheduler) == set()
    assert not list(hand.scheduler.take_events())
