"""From a trace to an answer: sizes between those that a curve has of its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.plan.advice import Verdict
from forebay.plan.document import as_document
from forebay.plan.models import load_model, model_of
from forebay.plan.page import page
from forebay.plan.report import Report
from forebay.plan.run import Wanted, plan
from forebay.plan.text import as_text
from forebay.plan.traces import open_trace
from tests.plan.reports import make_report

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


# --- what replays say -------------------------------------------------------------------------------------


def test_memory_that_a_replay_does_not_gain_from_is_not_recommended(tmp_path: Path) -> None:
    """The curve knows no device. No prompt fits on this one, so nothing is ever kept."""
    report = plan(open_trace(loop(tmp_path, 200)), Wanted(LLAMA, device_tokens=BLOCK_TOKENS))
    assert report.advice.verdict is Verdict.NOTHING_GAINED
    text = said(report)
    assert "Nothing is gained: by the curve 14 GB would be the knee, but a replay with 14 GB finds 0 %" in text
    assert "120 requests are longer than the device" in text
    assert "Give it" not in text
    assert "cpu_bytes_to_use" not in text
    assert "cpu_bytes_to_use" not in page(report)
    assert as_document(report)["advice"]["recommended"] is None


def test_a_size_larger_than_any_that_was_replayed_is_not_judged(tmp_path: Path) -> None:
    wanted = Wanted(LLAMA, device_tokens=20 * BLOCK_TOKENS, sizes=[BLOCK_BYTES * 30])
    report = plan(open_trace(loop(tmp_path, 200)), wanted)
    assert report.advice.verdict is Verdict.GIVE
    assert "would still pay" in said(report)


def test_a_device_that_is_assumed_holds_a_block_too(tmp_path: Path) -> None:
    wanted = Wanted(load_model(kv_bytes_per_token=10**10), model_assumed=False)
    with pytest.raises(
        ConfigError, match="--device-memory: expected at least a block of the trace, 5,120 GB, got"
    ):
        plan(open_trace(loop(tmp_path, 100)), wanted)


def test_a_request_without_a_prompt_is_not_longer_than_the_device(tmp_path: Path) -> None:
    path = Path(loop(tmp_path, 200))
    empty = {"timestamp": 10**6, "input_length": 0, "output_length": 1, "hash_ids": []}
    path.write_text(path.read_text() + json.dumps(empty) + "\n")
    wanted = Wanted(LLAMA, device_tokens=50 * BLOCK_TOKENS, prefill_tokens_per_s=1e4, bus_bytes_per_s=1e10)
    report = plan(open_trace(path), wanted)
    assert report.without is not None
    assert (report.without.requests, report.without.refused) == (121, 0)
    assert "longer than the device" not in said(report)


def test_the_table_of_the_page_has_what_each_size_really_finds(tmp_path: Path) -> None:
    """A loop over 750 blocks: below that nothing, from there on everything that repeats."""
    html = page(plan(open_trace(loop(tmp_path, 750)), Wanted(LLAMA, curve_only=True)))
    _, _, html = html.partition("The curve as a table")
    table, _, _ = html.partition("</table>")
    rows = [re.findall(r"<td[^>]*>([^<]*)", row) for row in table.split("<tr")]
    found = {int(row[-3].replace(",", "")): row[-2:] for row in rows if len(row) >= 3}
    assert len(found) >= 15
    for slots, (lru, best) in found.items():
        assert lru == ("83.3 %" if slots >= 750 else "0 %"), slots
        assert float(best.removesuffix(" %")) >= float(lru.removesuffix(" %"))


# --- what was guessed -------------------------------------------------------------------------------------


def test_what_was_guessed_is_said(tmp_path: Path) -> None:
    odd = model_of(
        {"model_type": "odd", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}, "odd"
    )
    text = said(plan(open_trace(loop(tmp_path, 200)), Wanted(odd, curve_only=True)))
    assert "model: odd is not known: taken for what its fields say" in text
    assert "trace: hash_ids stand for blocks of 512 tokens, by the lengths; timestamps are in milliseconds" in text
    assert "sampled" not in text


def test_a_small_sample_is_said_with_its_share(tmp_path: Path) -> None:
    wanted = Wanted(LLAMA, curve_only=True, sample=0.0001)
    assert "curves: sampled: 0.01 % of blocks were looked at" in said(
        plan(open_trace(loop(tmp_path, 200)), wanted)
    )


def test_requests_that_a_recording_has_not_got_are_said() -> None:
    report = make_report()
    for number, words in ((0, None), (1, "1 request is missing"), (41, "41 requests are missing")):
        text = said(replace(report, totals=replace(report.totals, dropped_requests=number)))
        assert f"{words} from the recording" in text if words else "missing" not in text
