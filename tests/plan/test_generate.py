from __future__ import annotations

import json
import tracemalloc
from collections import deque
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.plan.generate import KINDS, Traffic, as_lines, generate
from forebay.plan.traces import open_trace
from tests.test_readme import cells

BUNDLED = Path(__file__).parent / "chat.jsonl"
MADE_BY: dict[str, Any] = {"requests": 400, "seed": 7, "block_tokens": 128}


def test_the_bundled_trace_is_what_the_generator_makes() -> None:
    """To write it anew: `python -m tests.plan.test_generate`."""
    assert BUNDLED.stat().st_size < 100_000
    assert "".join(as_lines(generate("chat", **MADE_BY))) == BUNDLED.read_text()


def test_the_bundled_trace_is_a_trace() -> None:
    trace = open_trace(BUNDLED)
    assert (trace.block_tokens, trace.skipped) == (128, 0)
    requests = [*trace]
    assert len(requests) == 400
    blocks = [each for request in requests for each in request.prefixes]
    assert (len(blocks), len({*blocks})) == (7626, 2377)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 2**40), block_tokens=st.sampled_from([16, 48, 512]), requests=st.integers(1, 40))
def test_what_is_made_is_a_trace(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int, block_tokens: int, requests: int
) -> None:
    path = tmp_path_factory.mktemp("made") / "made.jsonl"
    with path.open("w") as file:
        file.writelines(as_lines(generate(kind, requests=requests, seed=seed, block_tokens=block_tokens)))
    assert len([*open_trace(path, block_tokens=block_tokens)]) == requests, "nothing is backwards, all ids fit"
    before: dict[int, int | None] = {}
    for line in path.read_text().splitlines():
        ids = json.loads(line)["hash_ids"]
        for previous, each in zip([None, *ids], ids, strict=False):
            assert before.setdefault(each, previous) == previous, "an id stands for all that is before it too"


def test_seeds_make_the_difference() -> None:
    def made(**arguments: Any) -> list[dict[str, Any]]:
        return [*generate("chat", requests=50, **arguments)]

    assert made(seed=1) == made(seed=1)
    assert made(seed=1) != made(seed=2)


def shares(kind: str, **changes: Any) -> tuple[float, float]:
    """Of blocks that were there before, and the mean length of a request."""
    seen: set[int] = set()
    blocks = hits = tokens = requests = 0
    for request in generate(kind, requests=1500, seed=3, block_tokens=64, **changes):
        requests += 1
        tokens += request["input_length"]
        blocks += len(request["hash_ids"])
        hits += sum(each in seen for each in request["hash_ids"])
        seen.update(request["hash_ids"])
    return hits / blocks, tokens / requests


def test_kinds_are_what_they_are_called() -> None:
    chat, chat_tokens = shares("chat")
    agent, agent_tokens = shares("agent")
    shared, shared_tokens = shares("shared")
    assert 0.6 < chat < agent
    assert shared > 0.8
    assert chat_tokens < shared_tokens < agent_tokens
    alone, _ = shares("chat", turns=1, prefix_tokens=1)
    assert alone < 0.01, "nothing is shared but what was asked for"


def test_more_requests_are_the_same_ones_and_then_more() -> None:
    few = [*generate("agent", requests=30, seed=5)]
    assert [*islice(generate("agent", requests=10**9, seed=5), 30)] == few


def test_memory_does_not_grow_with_the_trace() -> None:
    def peak_bytes(requests: int) -> int:
        made = generate("chat", requests=requests, block_tokens=512)
        tracemalloc.start()
        deque(made, maxlen=0)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_bytes(30_000) < 2 * peak_bytes(3_000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "chats"}, "kind: expected one of chat, agent, shared, got 'chats'"),
        ({"requests": 0}, "requests: expected a whole number of at least 1, got 0"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"block_tokens": True}, "block_tokens: expected a whole number of at least 1, got True"),
        ({"turn": 5}, "traffic of kind 'chat': unknown key 'turn'; did you mean 'turns'?"),
        ({"turns": 0}, "turns: expected a whole number from 1 to 10,000,000, got 0"),
        ({"turns": 10**400}, "turns: expected a whole number from 1 to 10,000,000, got 1"),
        ({"prefix_tokens": 99999999999}, "prefix_tokens: expected a whole number from 1 to 10,000,000, got 999"),
        (
            {"prefixes": 10**6},
            "prefixes: expected prefixes of together at most 10,000,000 blocks of 16 tok",
        ),
        ({"pause_s": float("nan")}, "pause_s: expected a number from 0 to 1e9, got nan"),
        ({"pause_s": 1e300}, "pause_s: expected a number from 0 to 1e9, got 1e+300"),
        ({"sessions_per_s": 0}, "sessions_per_s: expected a number from 1e-9 to 1e9, got 0"),
        ({"sessions_per_s": 1e-320}, "sessions_per_s: expected a number from 1e-9 to 1e9, got 1e-320"),
        ({"sessions_per_s": 1e10}, "sessions_per_s: expected a number from 1e-9 to 1e9, got 10000000000.0"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(**{"kind": "chat", "requests": 10, **arguments})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_whatever_is_allowed_can_be_made(kind: str, data: st.DataObject) -> None:
    changes: dict[str, Any] = {}
    for field in fields(Traffic):
        if field.type == "int":
            most = {"prefixes": 100, "max_tokens": 10**7}.get(field.name, 10**5)
            changes[field.name] = data.draw(st.integers(1, most), field.name)
        else:
            least = 1e-9 if field.name.endswith("per_s") else 0
            changes[field.name] = data.draw(st.floats(least, 1e9), field.name)
    made = [*generate(kind, requests=5, block_tokens=512, **changes)]
    assert [each["timestamp"] for each in made] == sorted(each["timestamp"] for each in made)


def test_every_parameter_is_described() -> None:
    shown = cells("traces.md", "Made-up traffic")
    names = [each.name for each in fields(Traffic)]
    assert [*shown] == [*KINDS, *names]
    for name in names:
        assert shown[name][:3] == [f"`{getattr(traffic, name)}`" for traffic in KINDS.values()], name


if __name__ == "__main__":
    BUNDLED.write_text("".join(as_lines(generate("chat", **MADE_BY))))
