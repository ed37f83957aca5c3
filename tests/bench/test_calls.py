"""What --calls counts is what was called before the first tokens, and nothing else."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from _calls import Calls, lines, until_first_tokens


class Runner:
    def execute_model(self, number: int, *, more: int = 0) -> int:
        if not number:
            raise ValueError("nothing to do")
        return number + more


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("_calls._VLLM", ())
    monkeypatch.setattr("_calls._connector", lambda: None)
    monkeypatch.setattr(Runner, "execute_model", Runner.execute_model)  # and back at the end
    monkeypatch.setattr(gc, "callbacks", [])
    watched = Calls()
    watched.model_runner = Runner()  # type: ignore[attr-defined]
    watched.watch_calls()
    return watched


def test_calls_do_what_they_did_and_are_told_of_once(worker: Any) -> None:
    assert worker.model_runner.execute_model(3, more=4) == 7
    with pytest.raises(ValueError, match="nothing"):
        worker.model_runner.execute_model(0)
    calls = worker.take_calls()
    assert [name for name, _, _ in calls] == ["runner.execute_model"] * 2
    assert all(began <= ended for _, began, ended in calls)
    assert worker.take_calls() == []


def test_collections_of_garbage_are_told_of(worker: Any) -> None:
    [callback] = gc.callbacks
    for phase in ("stop", "start", "stop"):  # one may have begun before
        callback(phase, {"generation": 2})
    assert [name for name, _, _ in worker.take_calls()] == ["gc 2"]


PHASES = [{"at": 10.0, "last_first_token_at": 10.5}, {"at": 20.0, "last_first_token_at": 21.0}]


def test_only_what_began_before_the_last_first_token_counts() -> None:
    calls = [
        ("schedule", 9.9, 10.0),  # before
        ("schedule", 10.0, 10.01),
        ("schedule", 10.4, 10.43),
        ("schedule", 10.5, 10.6),  # after
        ("schedule", 20.9, 20.92),
        ("gc 2", 20.5, 20.6),
    ]
    found = until_first_tokens(calls, PHASES)
    assert found["schedule"] == pytest.approx({"calls": 1.5, "ms": 30.0, "mean_ms": 30.0})
    assert found["gc 2"] == pytest.approx({"calls": 0.5, "ms": 50.0, "mean_ms": 50.0})


def test_the_table_has_a_line_for_each_call_and_a_column_for_each_engine() -> None:
    one = until_first_tokens([("schedule", 10.0, 10.01), ("schedule", 20.0, 20.01)], PHASES)
    rows: list[dict[str, Any]] = [
        {"label": "no offload", "calls": {"fits": one}},
        {"label": "eager", "calls": {"fits": one | {"gc 2": one["schedule"]}}},
        {"label": "failed"},
    ]
    assert [line.split() for line in lines(rows)[2:]] == [
        ["no", "offload", "eager"],
        ["schedule", "10.00", "(10.00)", "x1", "10.00", "(10.00)", "x1"],
        ["gc", "2", "-", "10.00", "(10.00)", "x1"],
    ]
    assert lines(rows[2:]) == []
