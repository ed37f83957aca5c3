"""A real vLLM records what it serves, and the planner reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay import ConfigError
from forebay.plan.traces import open_trace
from tests.vllm.families import GEMMA2, GEMMA4, LLAMA, Family
from tests.vllm.harness import Engine, prompts
from tests.vllm.proof import EAGER


@pytest.mark.parametrize(
    "family",
    [pytest.param(LLAMA, marks=pytest.mark.compat), pytest.param(GEMMA2, marks=pytest.mark.compat), GEMMA4],
    ids=str,
)
def test_a_recording_has_the_requests_that_were_served(family: Family, tmp_path: Path) -> None:
    first, second = prompts(2, 200)
    asked = [first, second, first[:130] + second[:70], first, second[:5]]
    with Engine(family, EAGER | {"record_trace": str(tmp_path)}) as engine:
        answers = [engine.generate([prompt], max_tokens=3 + number)[0] for number, prompt in enumerate(asked)]
    trace = open_trace(tmp_path)
    read = [*trace]
    assert [request.input_tokens for request in read] == [len(prompt) for prompt in asked]
    assert [request.output_tokens for request in read] == [len(answer) for answer in answers]
    tokens = trace.block_tokens
    assert tokens == min(family.block_tokens)
    for request, prompt in zip(read, asked, strict=True):
        for other, compared in zip(read, asked, strict=True):
            shared = next((n for n, (a, b) in enumerate(zip(prompt, compared, strict=False)) if a != b), None)
            blocks = (min(len(prompt), len(compared)) if shared is None else shared) // tokens
            equal = [a == b for a, b in zip(request.prefixes, other.prefixes, strict=False)]
            assert all(equal[:blocks])
            if request is not other:
                assert not any(equal[blocks:])
    assert [request.time_s for request in read] == sorted(request.time_s for request in read)


def test_a_folder_that_cannot_be_written_keeps_the_engine_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"^record_trace: expected a folder to write to"):
        Engine(LLAMA, EAGER | {"record_trace": str(tmp_path / "file" / "x")})
