"""From a trace to an answer: sizes between those that a curve has of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.plan.advice import Verdict
from forebay.plan.models import load_model
from forebay.plan.report import Report
from forebay.plan.run import Wanted, plan
from forebay.plan.text import as_text
from forebay.plan.traces import open_trace

BLOCK_TOKENS, PROMPT_BLOCKS, ROUNDS = 512, 10, 6
BLOCK_BYTES = 67_108_864
"""Of the model below."""
LLAMA = load_model("llama-3.1-8b")


def loop(folder: Path, blocks: int) -> str:
    """The same prompts again and again: a cache of less than all of them finds none, one of all finds all but
    the first round."""
    path = folder / "loop.jsonl"
    with path.open("w") as file:
        for number in range(ROUNDS * blocks // PROMPT_BLOCKS):
            first = number * PROMPT_BLOCKS % blocks
            request = {
                "timestamp": 100 * number,
                "input_length": BLOCK_TOKENS * PROMPT_BLOCKS,
                "output_length": 1,
                "hash_ids": list(range(first, first + PROMPT_BLOCKS)),
            }
            file.write(json.dumps(request) + "\n")
    return str(path)


def said(report: Report) -> str:
    return " ".join(as_text(report).split())


@pytest.mark.parametrize("sizes", [[], [100 * 10**9]])
def test_a_device_that_just_holds_everything_is_enough(tmp_path: Path, sizes: list[int]) -> None:
    """Its size lies between two of the curve's own, and all is found only just below it."""
    wanted = Wanted(LLAMA, device_tokens=1010 * BLOCK_TOKENS, sizes=sizes)
    report = plan(open_trace(loop(tmp_path, 1000)), wanted)
    assert report.advice.verdict is Verdict.DEVICE_SUFFICES
    assert report.advice.device_share == pytest.approx((ROUNDS - 1) / ROUNDS)
    assert "cpu_bytes_to_use" not in said(report)


def test_a_size_finds_the_same_whatever_others_were_asked_for(tmp_path: Path) -> None:
    trace = open_trace(loop(tmp_path, 1000))
    alone, beside = (
        plan(trace, Wanted(LLAMA, device_tokens=333 * BLOCK_TOKENS, sizes=sizes, curve_only=True))
        for sizes in ([], [256 * 10**9])
    )
    assert alone.advice == beside.advice
    assert alone.advice.recommended is not None
    slots = {each.slots for each in (alone.advice.knee, alone.advice.target) if each is not None}
    for report in (alone, beside):
        assert {333, *slots} <= set(report.curve.sizes)
