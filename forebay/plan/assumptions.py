"""What a report rests on, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.amounts import counted
from forebay.plan import words
from forebay.plan.report import Report


def assumptions(report: Report) -> Iterator[str]:
    engine, curve = report.engine, report.curve
    otherwise = " --model or --kv-bytes-per-token says otherwise." if engine.model_assumed else ""
    yield f"Model: {words.model(report)}.{otherwise}"
    yield from (f"Model: {note}." for note in engine.notes)
    yield from (f"Trace: {note}." for note in report.totals.notes)
    otherwise = " That is about what a model leaves on a GPU of 80 GB; --device-memory says otherwise."
    yield f"Device: {words.device(report)}.{otherwise if engine.device_assumed else ''}"
    block = counted(report.totals.block_tokens, "token")
    yield (
        f"One slot here is one block of the trace, {block}. An engine with smaller "
        "blocks has as many more slots in the same memory."
    )
    how = "exact" if curve.sampled == 1 else words.sampled(report)
    yield (
        "The curve is that of one cache that evicts the least recently used block, in blocks that are asked for "
        f"({how}). Eager mode keeps on the host what the device has too, so memory smaller than the device's adds "
        "nothing."
    )
    yield (
        "The knee is where the gain is farthest above a straight line from no memory to the memory beyond which "
        "no more is found: up to there a GB brings more than the average GB, beyond it less."
    )
    if report.bound is not None:
        yield "The best possible is Belady's bound: a cache that knows the future. No policy finds more blocks."
    if report.replays:
        yield (
            "Replays run the trace through the manager and the policies that run in an engine, one request after "
            "the other. They count tokens, of whole blocks only, and answers are kept too: their share differs a "
            "little from that of the curve."
        )
    if speeds := list(_speeds(report)):
        yield f"Speeds: {', '.join(speeds)}. Arrival times are those of the trace."


def _speeds(report: Report) -> Iterator[str]:
    if (prefill := report.engine.prefill_tokens_per_s) is not None:
        yield f"prefill of {counted(round(prefill), 'token')} a second"
    if (moved := report.engine.bus_bytes_per_s) is not None:
        yield f"a bus of {words.memory(int(moved))} a second each way"
