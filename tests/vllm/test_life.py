"""What can happen to a request, on a real vLLM. Each case ends with bytes that come back and a poison control."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from forebay import Direction
from tests.vllm.adapter import RANK, save_adapter
from tests.vllm.families import GEMMA2, GRANITE_HYBRID, LFM2, LLAMA, MISTRAL_WINDOW, QWEN3_NEXT, Family
from tests.vllm.harness import Engine, Tokens, prompts, reference, reference_or_skip
from tests.vllm.proof import EAGER, LAZY, comes_back, counted_preemptions, nothing_is_left

BLOCK = 32


def _bytes_of_blocks(count: int) -> dict[str, Any]:
    """Host memory for so many blocks of the small Llama."""
    return {"cpu_bytes_to_use": count * 4 * BLOCK * 2 * 4 * 32 * 4}  # layers, tokens, K and V, heads, dim, float32


@pytest.mark.compat
@pytest.mark.parametrize("family", [LLAMA, GEMMA2, MISTRAL_WINDOW], ids=str)
def test_chunked_prefill(family: Family) -> None:
    asked, chunks = prompts(3), {"max_num_batched_tokens": 64}
    expected = reference(family, asked, **chunks).cold
    with Engine(family, EAGER, **chunks) as engine:
        assert engine.generate(asked) == expected
        comes_back(engine, asked, expected)


@pytest.mark.compat
@pytest.mark.parametrize("family", [LLAMA, MISTRAL_WINDOW, GEMMA2], ids=str)
def test_lazy_mode_loses_nothing_under_load(family: Family) -> None:
    """Many prompts at once, far more than the device holds: what it drops is on the host by then."""
    asked = prompts(100 if family is MISTRAL_WINDOW else 40)
    with Engine(family, LAZY, num_gpu_blocks_override=256, max_num_batched_tokens=512) as engine:
        pool, manager = engine.block_pool, engine.manager
        device = engine.connector.scheduler_manager._device
        evict, dropped, lost = pool._maybe_evict_cached_block, [], []

        def watch(block: Any) -> Any:
            [key] = device.keys_of([block.block_id])
            if key is not None:
                dropped.append(key)
                if key not in manager.pool:
                    lost.append(key)
            return evict(block)

        step, copier = engine.step, engine.worker.worker_handler._copier

        def step_at_the_pace_of_the_bus() -> Any:
            """Copies end before the next step, and are reported in it: a slow machine is another matter."""
            outputs = step()
            while len(copier._ended) < len(copier._unsettled):
                time.sleep(0.001)
            return outputs

        with (
            mock.patch.object(pool, "_maybe_evict_cached_block", watch),
            mock.patch.object(engine, "step", step_at_the_pace_of_the_bus),
        ):
            engine.generate(asked, max_tokens=4)
        assert len(dropped) > 100
        assert len(lost) == 0, f"{len(lost)} of {len(dropped)}"
        nothing_is_left(engine)


@contextmanager
def _two_that_do_not_fit_together(
    offload: dict[str, Any], **engine_args: Any
) -> Iterator[tuple[Engine, Tokens, Tokens, Tokens]]:
    """An engine, two prompts that are on its host only, and something that nobody has asked yet. In the end, all
    that was asked has to be answered."""
    *asked, more = prompts(3, 900)
    one, other = asked[0][: 18 * BLOCK], asked[1][: 25 * BLOCK]
    with Engine(LLAMA, EAGER | offload, num_gpu_blocks_override=40, **engine_args) as engine:
        for each in (one, other):
            engine.generate([each], 1)
            engine.settle()
        engine.forget_device()
        yield engine, one, other, more
        steps = 0
        while engine.scheduler.has_unfinished_requests():
            engine.step()
            steps += 1
            assert steps < 5_000, "it hangs"
        nothing_is_left(engine)


@pytest.mark.compat
def test_a_request_that_was_passed_over_does_not_stand_in_the_way_of_one_that_was_loaded() -> None:
    """The second waits for what the first loads, so vLLM passes it over and lets the third in, whose load leaves
    no room for the second. Up to 0.30 vLLM looks at the second first, and must not stop there."""
    with _two_that_do_not_fit_together({}) as (engine, one, other, more):
        engine.submit(other[: 4 * BLOCK] + more[:5])
        engine.submit(other + more[5:12])
        engine.submit(one + more[12:20])


_LATE = {"delay_polls": 600, "only": "load"}  # more than a tenth of a second


@pytest.mark.compat
@pytest.mark.parametrize("faults", [_LATE, _LATE | {"fail_chance": 1.0}], ids=["late", "failed"])
def test_nor_does_it_once_it_has_waited_too_long(faults: dict[str, Any]) -> None:
    """The same with loads that take longer than the second waits for them. If they fail, vLLM frees their blocks
    only when it comes to them."""
    slow = {"wait_deadline_s": 0.05, "inject_faults": faults}
    with _two_that_do_not_fit_together(slow) as (engine, one, other, more):
        engine.submit(other[: 4 * BLOCK] + more[:5])
        engine.submit(other + more[5:12])
        engine.submit(one + more[12:20])
        engine.run_until(lambda: engine.manager.stats.waits_given_up > 0)
        assert not engine.scheduler.running, "they have not been loaded yet"


@pytest.mark.compat
def test_nor_does_one_of_a_higher_priority() -> None:
    """That one is new, and vLLM looks at it first as well."""
    slow = {"inject_faults": _LATE}
    with _two_that_do_not_fit_together(slow, scheduling_policy="priority") as (engine, _, other, more):
        engine.submit(other + more[:7], priority=1)
        engine.step()
        assert not engine.scheduler.running, "it has not been loaded yet"
        engine.submit(more[: 18 * BLOCK])


def test_requests_that_wait_for_a_full_device_are_not_all_asked_in_every_step() -> None:
    """Forty chats come back at once to a device that holds five. One that is told to wait is passed over for the
    next, so that all forty would be asked about in every step; without offload vLLM stops at the first."""
    asked = prompts(40, 200)
    with Engine(LLAMA, EAGER, num_gpu_blocks_override=40, max_num_seqs=64) as engine:
        engine.generate(asked)
        engine.settle()
        lookups, steps = 0, 0
        match = engine.connector.get_num_new_matched_tokens

        def count(*args: Any) -> Any:
            nonlocal lookups
            lookups += 1
            return match(*args)

        with mock.patch.object(engine.connector, "get_num_new_matched_tokens", count):
            for each in asked:
                engine.submit(each)
            while engine.scheduler.has_unfinished_requests():
                engine.step()
                steps += 1
        assert engine.manager.stats.loaded_blocks > 100
        assert steps > 50
        assert lookups < 3 * steps
        nothing_is_left(engine)


@pytest.mark.compat
@pytest.mark.parametrize("offload", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize(("family", "blocks"), [(LLAMA, 34), (GEMMA2, 70)], ids=str)
def test_preemption_under_pressure(family: Family, blocks: int, offload: dict[str, Any]) -> None:
    asked = prompts(8, 200)
    expected = reference(family, asked, max_tokens=100).cold
    with Engine(family, offload, num_gpu_blocks_override=blocks) as engine:
        with counted_preemptions(engine) as preempted:
            for _ in range(2):
                assert engine.generate(asked, max_tokens=100) == expected
        assert preempted, "there was no pressure"
        assert engine.manager.stats.loaded_blocks
        nothing_is_left(engine)


@pytest.mark.compat
@pytest.mark.parametrize("offload", [EAGER, LAZY], ids=["eager", "lazy"])
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_a_producer_loads_as_well_and_its_blocks_are_not_held_back(role: str, offload: dict[str, Any]) -> None:
    """Where steps overlap, vLLM holds back the blocks of a request that it preempts in the middle of a step (up to
    0.29), or does not preempt it then, unless the role says that nobody loads into them. Forebay does."""
    asked = prompts(8, 200)
    expected = reference(LLAMA, asked, max_tokens=100).cold
    in_flight, held_back = 0, 0
    with _async_scheduling(), Engine(LLAMA, offload, role=role, num_gpu_blocks_override=34) as engine:
        scheduler = engine.scheduler
        free = scheduler._free_request_blocks

        def watch(request: Any) -> None:
            nonlocal in_flight, held_back
            in_flight += request.num_output_placeholders > 0
            before = len(scheduler.deferred_frees)
            free(request)
            held_back += len(scheduler.deferred_frees) > before

        with mock.patch.object(scheduler, "_free_request_blocks", watch), counted_preemptions(engine) as preempted:
            for _ in range(2):
                assert engine.generate(asked, max_tokens=100) == expected
        assert preempted, "there was no pressure"
        assert engine.manager.stats.loaded_blocks
        nothing_is_left(engine)
    if role == "kv_both":
        assert held_back == in_flight
    else:
        assert in_flight, "no request was preempted in the middle of a step"
        assert not held_back


@pytest.mark.compat
def test_abort_while_loading() -> None:
    asked = prompts(4)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER | {"inject_faults": {"delay_polls": 5, "only": "load"}}) as engine:
        assert engine.generate(asked) == expected
        engine.forget_device()
        ids = [engine.submit(prompt) for prompt in asked]
        engine.step()
        assert len(engine.manager.device_pins()) == 0
        engine.abort(ids[0])
        engine.abort(ids[2])
        assert engine.manager.device_pins(), "blocks that are being written are not protected"
        engine.run()
        assert [engine.tokens(ids[i]) for i in (1, 3)] == [expected[i] for i in (1, 3)]
        nothing_is_left(engine)
        comes_back(engine, asked, expected)


@pytest.mark.compat
def test_one_token_is_enough_to_store_the_whole_prompt() -> None:
    asked = prompts(2, 4 * BLOCK)
    longer = [prompt + prompts(1, 10, seed=5)[0] for prompt in asked]
    expected = reference(LLAMA, longer).cold
    with Engine(LLAMA, EAGER) as engine:
        engine.generate(asked, max_tokens=1)
        engine.forget_device()
        assert engine.generate(longer) == expected
        assert engine.cached_tokens == [4 * BLOCK] * 2
        comes_back(engine, longer, expected)


def test_a_block_that_fills_in_the_last_step_is_stored() -> None:
    """The last token that is computed completes the second block, and there is no step after it."""
    [prompt] = prompts(1, 2 * BLOCK - 2)
    [said] = reference(LLAMA, [prompt], max_tokens=3).cold
    longer = [prompt + said + prompts(1, 20, seed=5)[0]]
    expected = reference(LLAMA, longer).cold
    with Engine(LLAMA, EAGER) as engine:
        assert engine.generate([prompt], max_tokens=3) == [said]  # the third is sampled and never computed
        engine.forget_device()
        assert engine.generate(longer) == expected
        assert engine.cached_tokens == [2 * BLOCK]
        comes_back(engine, longer, expected)


@pytest.mark.compat
def test_reset_with_copies_in_flight() -> None:
    asked = prompts(3)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER | {"inject_faults": {"delay_polls": 20}}) as engine:
        engine.generate(asked)
        assert engine.manager.has_pending_stores()
        assert engine.connector.reset_cache() is True
        engine.forget_device()
        assert engine.generate(asked) == expected
        assert engine.manager.stats.loaded_blocks == 0, "what was forgotten came back"
        # The same with loads in flight: requests that wait for them compute.
        engine.forget_device()
        ids = [engine.submit(prompt) for prompt in asked]
        engine.step()
        assert engine.connector.reset_cache() is True
        engine.run()
        assert [engine.tokens(each) for each in ids] == expected
        engine.settle()
        assert engine.generate(asked) == expected
        comes_back(engine, asked, expected)


def test_an_idle_engine_goes_on_until_everything_is_stored() -> None:
    asked = prompts(2)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER | {"inject_faults": {"delay_polls": 200, "only": "store"}}) as engine:
        engine.generate(asked, max_tokens=1)
        assert not engine.scheduler.has_unfinished_requests()
        assert engine.manager.device_pins()
        assert engine.scheduler.has_requests(), "the engine would stop stepping"
        nothing_is_left(engine)
        comes_back(engine, asked, expected)


def test_speculation_by_n_grams() -> None:
    asked = [prompt[:50] * 8 for prompt in prompts(3, 50)]  # something to look up
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}}
    expected = reference(LLAMA, asked, max_tokens=40).cold
    with Engine(LLAMA, EAGER, **speculative) as engine:
        assert engine.generate(asked, max_tokens=40) == expected
        comes_back(engine, asked, expected, max_tokens=40)


@pytest.mark.compat
def test_prompt_logprobs_are_never_served_from_the_cache() -> None:
    asked = prompts(2)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER) as engine:
        assert engine.generate(asked, prompt_logprobs=1) == expected
        engine.forget_device()
        assert engine.generate(asked, prompt_logprobs=1) == expected
        assert engine.manager.stats.loaded_blocks == 0
        assert engine.cached_tokens == [0, 0]
        nothing_is_left(engine)
        comes_back(engine, asked, expected)


@pytest.mark.compat
def test_salted_prompts_share_nothing_with_others() -> None:
    asked = prompts(2)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER) as engine:
        assert engine.generate(asked, cache_salt="one") == expected
        engine.forget_device()
        assert engine.generate(asked, cache_salt="two") == expected
        assert engine.generate(asked) == expected
        assert engine.manager.stats.loaded_blocks == 0
        comes_back(engine, asked, expected, cache_salt="one")


@pytest.mark.parametrize("family", [LLAMA, GEMMA2], ids=str)
def test_shorter_prefix_hashes(family: Family) -> None:
    asked = prompts(2)
    expected = reference(family, asked).cold
    with Engine(family, EAGER, prefix_caching_hash_algo="xxhash") as engine:
        assert engine.generate(asked) == expected
        assert {len(key) for key in engine.manager.pool.index()} <= {16, 20}
        comes_back(engine, asked, expected)


def test_hashes_finer_than_blocks() -> None:
    """The engine itself may then hit the middle of a block, and go on from there."""
    asked = prompts(3)
    finer = {"prefix_match_unit": 32}
    expected = reference(GRANITE_HYBRID, asked, **finer)
    with Engine(GRANITE_HYBRID, EAGER, **finer) as engine:
        assert engine.connector.scheduler_manager.hash_block_size == 32
        assert engine.connector.scheduler_manager.block_size == 64
        assert engine.generate(asked) == expected.cold
        engine.generate([prompt[:350] for prompt in asked])
        assert engine.generate(asked) == expected.cold
        comes_back(engine, asked, expected.cold)


def test_lora_adapters_do_not_mix(tmp_path: Path) -> None:
    asked = prompts(2)
    adapters = [save_adapter(tmp_path / f"{i}", i) for i in (1, 2)]
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    with Engine(LLAMA, **lora) as plain:
        expected = [plain.generate(asked, lora_request=each) for each in adapters]
    assert expected[0] != expected[1]
    with Engine(LLAMA, EAGER, **lora) as engine:
        for each, right in zip(adapters, expected, strict=True):
            assert engine.generate(asked, lora_request=each) == right
            assert engine.cached_tokens == [0, 0]
            engine.forget_device()
        for each, right in zip(adapters, expected, strict=True):
            comes_back(engine, asked, right, lora_request=each)


@contextmanager
def _async_scheduling() -> Iterator[None]:
    """The platform turns it off on CPUs. The scheduler runs all the same: a step is planned while the one before
    it is still being computed."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_turn_on(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with mock.patch.object(CpuPlatform, "check_and_update_config", staticmethod(check_and_turn_on)):
        yield


@pytest.mark.parametrize("family", [LLAMA, GEMMA2, QWEN3_NEXT], ids=str)
def test_async_scheduling(family: Family) -> None:
    asked = prompts(4, family.prompt_tokens)
    expected = reference(family, asked, max_tokens=40)
    with _async_scheduling(), Engine(family, EAGER) as engine:
        assert type(engine.scheduler).__name__ == "AsyncScheduler"
        assert engine.generate(asked, max_tokens=40) == expected.cold
        comes_back(engine, asked, expected.hit, max_tokens=40)


def _lose_from_host(engine: Engine, hashes: list[bytes]) -> None:
    pool = engine.manager.pool
    index = pool.index()
    pool.forget(hashes, [index[each] for each in hashes])


def _lose_from_device(engine: Engine, hashes: list[bytes]) -> None:
    pool = engine.block_pool
    for each in hashes:
        block = pool.cached_block_hash_to_block.get_one_block(each + bytes(4))
        pool.evict_blocks({block.block_id})


def _hashes(engine: Engine, prompt: Tokens) -> list[bytes]:
    """The prefix hashes of a prompt, from the engine itself."""
    request_id = engine.submit(prompt, max_tokens=1)
    hashes = list(engine.scheduler.requests[engine.internal_id(request_id)].block_hashes)
    engine.run()
    engine.settle()
    return hashes


@pytest.mark.compat
@pytest.mark.parametrize("kept_by_host", [range(6, 10), [*range(6, 10), *range(13, 21)]], ids=["tail", "middle"])
def test_a_gap_on_one_side_is_bridged_by_the_other(kept_by_host: list[int]) -> None:
    """Blocks 0 to 5 on the device, 6 to 9 on the host, and behind them what only the device has; in the second
    case the host goes on after that."""
    [prompt] = prompts(1, 21 * BLOCK + 5)
    expected = reference(LLAMA, [prompt]).cold
    with Engine(LLAMA, EAGER) as engine:
        hashes = _hashes(engine, prompt)
        _lose_from_device(engine, hashes[6:10] + hashes[13:21] * (len(kept_by_host) > 4))
        _lose_from_host(engine, [each for i, each in enumerate(hashes[:21]) if i not in kept_by_host])
        assert engine.generate([prompt]) == expected
        assert engine.cached_tokens == [21 * BLOCK]
        assert engine.manager.stats.loaded_blocks == len(kept_by_host)
        assert engine.manager.stats.moved_blocks == 15 - len(kept_by_host)
        comes_back(engine, [prompt], expected)


@pytest.mark.compat
def test_nobody_computes_into_blocks_that_a_late_load_still_writes() -> None:
    """Up to 0.29 vLLM keeps the blocks of a load that failed if the device had those before them. So such a load
    is waited for; from 0.30 on its request computes, in other blocks."""
    from forebay.vllm import compat

    [prompt] = prompts(1, 10 * BLOCK + 5)
    [expected] = reference(LLAMA, [prompt]).cold
    late = {"load_deadline_s": 0.0, "inject_faults": {"delay_polls": 60, "only": "load"}}
    with Engine(LLAMA, EAGER | late) as engine:
        _lose_from_device(engine, _hashes(engine, prompt)[4:])
        request_id = engine.submit(prompt)
        tables, ledger = engine.scheduler.kv_cache_manager, engine.manager._books.ledger
        while engine.scheduler.has_unfinished_requests():
            engine.step()
            written = {block for each in ledger if each.direction is Direction.LOAD for block in each.order.blocks}
            for request in engine.scheduler.running:
                assert not written & set(tables.get_block_ids(request.request_id)[0])
        assert engine.tokens(request_id) == expected
        stats = engine.manager.stats
        assert stats.overdue_transfers == 1
        assert stats.recomputes == compat.REPORTS_FAILED_REQUESTS
        for _ in range(80):  # the report comes after all, while other requests run
            engine.generate(prompts(1), max_tokens=1)
        nothing_is_left(engine)


@pytest.mark.compat
@pytest.mark.parametrize("kept", [6, 0, 12], ids=str)
def test_states_that_have_left_the_device_while_attention_has_not(kept: int) -> None:
    """A release may then count the attention's blocks as a hit of the whole model and leave the state to us."""
    asked = prompts(1)
    expected = reference_or_skip(LFM2, asked)
    with Engine(LFM2, EAGER) as engine:
        assert engine.generate(asked) == expected.cold
        engine.settle()
        pool, state, attention = engine.block_pool, [], []
        for block in pool.blocks:
            if block.block_hash is not None:
                (attention if int.from_bytes(block.block_hash[-4:], "big") else state).append(block.block_id)
        hashes = _hashes(engine, asked[0])
        order = {each: i for i, each in enumerate(hashes)}
        attention.sort(key=lambda block: order[pool.blocks[block].block_hash[:-4]])
        assert state
        assert len(attention) == 12
        pool.evict_blocks(set(state + attention[kept:]))
        assert engine.generate(asked) == expected.hit
        comes_back(engine, asked, expected.hit)


@pytest.mark.compat
def test_equal_prompts_at_once_cost_one_load() -> None:
    [prompt] = prompts(1)
    [expected] = reference(LLAMA, [prompt]).cold
    with Engine(LLAMA, EAGER, max_num_seqs=16, num_gpu_blocks_override=256) as engine:
        engine.generate([prompt])
        engine.forget_device()
        assert engine.generate([prompt] * 16) == [expected] * 16
        assert engine.manager.stats.loaded_blocks == 400 // BLOCK
        comes_back(engine, [prompt], [expected])


@pytest.mark.compat
def test_blocks_that_are_computed_in_the_step_that_hits_them() -> None:
    """Two prompts with one beginning in one step: the second begins behind blocks that the first computes just
    now. Copiers that are told of loads before the forward pass, as on a GPU, must not store them before it."""
    shared, *ends = prompts(3)
    asked = [shared + end[:40] for end in ends]
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER) as engine:
        worker = engine.worker.worker_handler
        submit, copier = worker._copier.submit, worker._copier

        def submit_and_wait(order: Any) -> None:
            submit(order)
            while len(copier._ended) < len(copier._unsettled):
                time.sleep(0.001)

        worker._submits_early = True
        with mock.patch.object(copier, "submit", submit_and_wait):
            assert engine.generate(asked) == expected
            engine.forget_device()
            assert engine.generate(asked) == expected
        assert engine.manager.stats.loaded_blocks
        nothing_is_left(engine)


@pytest.mark.compat
def test_a_host_smaller_than_the_device() -> None:
    asked = prompts(6)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, _bytes_of_blocks(20)) as engine:
        assert engine.connector.scheduler_manager.num_cpu_blocks == 20
        for _ in range(3):
            assert engine.generate(asked) == expected
            engine.forget_device()
        engine.generate(asked[-1:])  # alone, so that it is the one that is kept
        comes_back(engine, asked[-1:], expected[-1:])


@pytest.mark.compat
def test_a_host_of_one_block() -> None:
    asked = prompts(2, 100)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, _bytes_of_blocks(1)) as engine:
        for prompt, right in zip(asked, expected, strict=True):
            assert engine.generate([prompt]) == [right]
            comes_back(engine, [prompt], [right])
            assert engine.manager.pool.capacity == engine.manager.pool.cached == 1


def test_without_prefix_caching_it_steps_aside() -> None:
    asked = prompts(2)
    expected = reference(LLAMA, asked).cold
    with (
        mock.patch("forebay.vllm.connector.logger") as logger,
        Engine(LLAMA, EAGER, enable_prefix_caching=False) as engine,
    ):
        # Both halves say it, and the logger says what it is told to say once only once.
        assert {call.args for call in logger.warning_once.call_args_list} == {
            ("forebay: prefix caching is off, and without it there is nothing to offload",)
        }
        assert not logger.warning.called
        assert engine.generate(asked) == expected
        assert engine.connector.scheduler_manager is None
        assert engine.connector.reset_cache() is None
        assert not engine.connector.has_pending_push_work()
        engine.settle()
