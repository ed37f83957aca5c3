"""Copies that fail, threads that die, reports that are late: every request ends, every token is right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.vllm.families import GEMMA2, LLAMA, Family
from tests.vllm.harness import Engine, prompts, reference
from tests.vllm.proof import EAGER, nothing_is_left

FAMILIES = pytest.mark.parametrize("family", [LLAMA, GEMMA2], ids=str)


@contextmanager
def _rounds(family: Family, offload: dict[str, Any], rounds: int = 4) -> Iterator[Engine]:
    """The same prompts again and again, with the device forgotten in between. Every answer is right."""
    asked = prompts(4)
    expected = reference(family, asked).cold
    with Engine(family, offload) as engine:
        for _ in range(rounds):
            assert engine.generate(asked) == expected
            nothing_is_left(engine)
            engine.forget_device()
        yield engine


def _needs_recovery(family: Family) -> None:
    from forebay.vllm import compat

    if family is not LLAMA and not compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("this release cannot take a failed load back for a model with several KV cache groups")


@pytest.mark.compat
@FAMILIES
@pytest.mark.parametrize("chance", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("only", ["load", "store", None])
def test_copies_that_fail(family: Family, chance: float, only: str | None) -> None:
    if only != "store":
        _needs_recovery(family)
    faults: dict[str, Any] = {"fail_chance": chance, "seed": 3}
    if only is not None:
        faults["only"] = only
    with _rounds(family, EAGER | {"inject_faults": faults}) as engine:
        stats = engine.manager.stats
        if chance == 1.0:
            assert stats.loaded_blocks == 0
            assert stats.store_failures if only != "load" else stats.load_failures
        if only == "load" and chance > 0.05:
            assert stats.recomputes, "nothing failed"


@pytest.mark.compat
@pytest.mark.parametrize("verify", ["all", "off"])
def test_a_byte_that_changed_on_the_host_is_computed_instead(verify: str) -> None:
    asked = prompts(4)
    expected = reference(LLAMA, asked).cold
    with Engine(LLAMA, EAGER | {"verify": verify}) as engine:
        assert engine.generate(asked) == expected
        ids = engine.asked
        engine.forget_device()
        slot = engine.manager.pool.index()[engine.first_hash(ids[2])]
        arena = engine.worker.worker_handler._copier.arena
        arena[slot, 7] ^= 1
        assert engine.generate(asked) == expected or verify == "off"
        stats = engine.manager.stats
        wrong = 0 if verify == "off" else 1
        assert (stats.checksum_mismatches, stats.load_failures, stats.recomputes) == (wrong, wrong, wrong)
        computed = [tokens == 0 for tokens in engine.cached_tokens]
        assert computed == [False, False, bool(wrong), False]
        engine.mismatches = wrong
        nothing_is_left(engine)
        engine.forget_device()
        assert engine.generate(asked) == expected or verify == "off"
        assert 0 not in engine.cached_tokens, "what was computed instead is stored again"
        nothing_is_left(engine)


@pytest.mark.compat
@FAMILIES
def test_a_host_that_lost_all_its_bytes_is_computed_instead(family: Family) -> None:
    _needs_recovery(family)
    asked = prompts(4)
    expected = reference(family, asked).cold
    with Engine(family, EAGER) as engine:
        assert engine.generate(asked) == expected
        engine.forget_device()
        engine.spoil_slots(engine.manager.pool.index().values())
        assert engine.generate(asked) == expected
        engine.mismatches = len(asked)
        nothing_is_left(engine)
        assert engine.manager.stats.loaded_blocks == 0
        engine.forget_device()
        assert engine.generate(asked) == expected
        assert engine.manager.stats.loaded_blocks > 0
        nothing_is_left(engine)


@pytest.mark.compat
def test_a_load_that_cannot_be_had_stops_an_engine_that_cannot_recover() -> None:
    """Never a wrong answer: the line says why, and from which release on it would have recovered."""
    from forebay.errors import LostLoadError
    from forebay.vllm import compat

    if compat.REPORTS_FAILED_REQUESTS:
        pytest.skip("this release takes failed loads back for every model")
    asked = prompts(2)
    expected = reference(GEMMA2, asked).cold
    with Engine(GEMMA2, EAGER | {"inject_faults": {"fail_chance": 1.0, "only": "load"}}) as engine:
        assert engine.generate(asked) == expected
        engine.forget_device()
        with pytest.raises(LostLoadError, match="failed 5 times"):
            engine.generate(asked)


@pytest.mark.compat
@FAMILIES
def test_a_copier_thread_that_is_killed(family: Family) -> None:
    with _rounds(family, EAGER | {"inject_faults": {"kill_nth": [2, 7, 11]}}, rounds=6) as engine:
        assert engine.manager.stats.loaded_blocks, "nothing was loaded after the thread had died"


@pytest.mark.compat
@FAMILIES
def test_reports_that_are_late_by_many_steps(family: Family) -> None:
    with _rounds(family, EAGER | {"inject_faults": {"delay_polls": 40}}) as engine:
        assert engine.manager.stats.loaded_blocks


@pytest.mark.compat
def test_a_load_past_its_deadline_is_computed_instead() -> None:
    asked = prompts(4)
    expected = reference(LLAMA, asked).cold
    faults = {"delay_polls": 60, "only": "load"}
    with Engine(LLAMA, EAGER | {"load_deadline_s": 0.0, "inject_faults": faults}) as engine:
        assert engine.generate(asked) == expected
        engine.forget_device()
        assert engine.generate(asked) == expected
        stats = engine.manager.stats
        assert (stats.overdue_transfers, stats.recomputes, stats.loaded_blocks) == (4, 4, 0)
        assert engine.manager.device_pins(), "the copier may still be writing there"
        engine.settle()
        assert not engine.scheduler.has_requests(), "an idle engine waits for what is overdue"
        for _ in range(80):  # the reports come after all, while other requests run
            engine.generate(asked[:1], max_tokens=1)
        nothing_is_left(engine)


def test_with_policy_fail_the_request_ends_with_an_error_and_others_go_on() -> None:
    asked = prompts(4)
    expected = reference(LLAMA, asked).cold
    offload = EAGER | {"inject_faults": {"fail_chance": 1.0, "only": "load"}}
    with Engine(LLAMA, offload) as engine:
        engine.scheduler.recompute_kv_load_failures = False  # what kv_load_failure_policy sets
        assert engine.generate(asked) == expected
        engine.forget_device()
        ids = [engine.submit(prompt) for prompt in asked]
        engine.run()
        assert [engine.outputs[each].outputs[0].finish_reason for each in ids] == ["error"] * 4
        nothing_is_left(engine)
        assert engine.generate(asked) == expected
