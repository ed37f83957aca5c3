"""What a report says, in sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator

from forebay.amounts import counted, percent, shown
from forebay.plan.advice import TARGET_OF_POSSIBLE, Advice, Choice, Verdict
from forebay.plan.report import Report
from forebay.plan.results import Replay
from forebay.settings import WHERE

_UNITS = (("GB", 10**9), ("MB", 10**6), ("KB", 1000))


def memory(num_bytes: int) -> str:
    """As `2,600 GB`: three digits are enough to read, and sizes that are compared have one unit."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
    return counted(num_bytes, "byte")


def setting(num_bytes: int) -> str | int:
    """Exactly so many bytes, as `2600GB` if that is short."""
    for unit, size in _UNITS:
        if size <= num_bytes < 10**5 * size and num_bytes % (size // 100) == 0:
            return f"{num_bytes / size:.12g}{unit}"
    return num_bytes


def extra_config(choice: Choice, replay: Replay | None) -> dict[str, object]:
    """The settings that the connector is given. What is not replayed stays as it is by default."""
    config: dict[str, object] = {"cpu_bytes_to_use": setting(choice.num_bytes)}
    if replay is not None and replay.mode == "lazy":
        config["lazy_offload"] = True
    if replay is not None and replay.policy != "lru":
        config["eviction_policy"] = replay.policy
    return config


def pasted(report: Report, choice: Choice) -> str:
    return f'"{WHERE}": {json.dumps(extra_config(choice, report.best(choice)))}'


def duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    number = f"{seconds:.3g}"
    return f"{number} second" if number == "1" else f"{number} seconds"


def count(number: int) -> str:
    return f"{number / 1e6:,.1f} million" if number >= 10**6 else f"{number:,}"


def tokens(number: int) -> str:
    return f"{count(number)} tokens" if number >= 10**6 else counted(number, "token")


def totals(report: Report) -> str:
    each = report.totals
    time = f" in {duration(each.duration_s)}" if each.duration_s else ""
    bad, gone = counted(each.skipped_lines, "bad line"), counted(each.dropped_requests, "request")
    skipped = f"; {bad} {'was' if each.skipped_lines == 1 else 'were'} skipped" if each.skipped_lines else ""
    if each.dropped_requests:
        skipped += f"; {gone} {'is' if each.dropped_requests == 1 else 'are'} missing from the recording"
    return (
        f"{counted(each.requests, 'request')}{time}, {tokens(each.input_tokens)} in, "
        f"{count(each.output_tokens)} out, blocks of {counted(each.block_tokens, 'token')}{skipped}"
    )


def model(report: Report) -> str:
    engine = report.engine
    ranks = f" on {engine.ranks} ranks together" if engine.ranks > 1 else ""
    assumed = ", assumed" if engine.model_assumed else ""
    size = f"{counted(engine.kv_bytes_per_token, 'byte')} of KV per token{ranks}"
    return f"{engine.model}{assumed}: {size}, {memory(report.block_bytes)} per block"


def guesses(report: Report) -> Iterator[str]:
    """What was not given but taken for granted, and what was not looked at: it may be wrong."""
    yield from (f"model:  {note}" for note in report.engine.notes)
    if report.totals.notes:
        yield f"trace:  {'; '.join(report.totals.notes)}"
    if report.curve.sampled < 1:
        yield f"curves: {sampled(report)}"


def sampled(report: Report) -> str:
    """With as many digits as it takes: a sample may be small."""
    return f"sampled: {report.curve.sampled * 100:.3g} % of blocks were looked at"


def device(report: Report) -> str:
    engine = report.engine
    assumed = ", assumed" if engine.device_assumed else ""
    return f"{memory(report.device_bytes)} of KV{assumed}: {counted(engine.device_blocks, 'block')}"


def headline(report: Report) -> str:
    """The answer, in one sentence."""
    advice, curve = report.advice, report.curve
    match advice.verdict:
        case Verdict.NOTHING_REPEATS:
            return f"No memory helps: {percent(curve.unbounded_share)} of blocks ever repeat."
        case Verdict.DEVICE_SUFFICES:
            enough = "enough for the target" if advice.knee is not None else "enough"
            return (
                f"The device is {enough}: it finds {percent(advice.device_share)} of blocks alone, and a cache "
                f"without bounds {percent(curve.unbounded_share)}."
            )
    choice = advice.promising
    assert choice is not None
    name = "the size that reaches the target" if advice.target_first else "the knee"
    if advice.verdict is Verdict.NOTHING_GAINED:
        run, alone = report.best(choice), report.without
        assert run is not None
        assert alone is not None
        return (
            f"Nothing is gained: by the curve {memory(choice.num_bytes)} would be {name}, but a replay with "
            f"{memory(run.host_bytes)} finds {percent(run.hit_share)} of tokens, and without host memory "
            f"{percent(alone.hit_share)}."
        )
    return f"Give it {memory(choice.num_bytes)}, {name}: {found(report, choice)}."


def found(report: Report, choice: Choice) -> str:
    device_share = report.advice.device_share
    slots = f"{counted(choice.slots, 'slot')} {'finds' if choice.slots == 1 else 'find'}"
    return (
        f"{slots} {percent(choice.hit_share)} of blocks; the device alone finds "
        f"{percent(device_share)}, a cache without bounds {percent(report.curve.unbounded_share)}"
    )


def target_name(report: Report) -> str:
    return "the target" if report.advice.target_asked else f"{TARGET_OF_POSSIBLE * 100:.0f} % of what is possible"


def target(report: Report) -> str:
    advice, name = report.advice, target_name(report)
    what = f"{name[0].upper()}{name[1:]}, {percent(advice.target_share)} of blocks,"
    if advice.target is None:
        most = percent(report.curve.unbounded_share)
        return f"{what} is out of reach: a cache without bounds finds {most}."
    if advice.device_share >= advice.target_share:
        return f"{what} is what the device reaches alone."
    if advice.target == _first(advice):
        return f"{what} is reached with that."
    return f"{what} takes {memory(advice.target.num_bytes)}: {counted(advice.target.slots, 'slot')}."


def second(report: Report) -> str | None:
    """About the size that is not recommended, of the two. None where there is nothing to say about it."""
    advice = report.advice
    if advice.knee is None or (advice.verdict is Verdict.NOTHING_GAINED and other_choice(report) is None):
        return None
    if _knee_is_second(advice):
        return f"The knee is at {memory(advice.knee.num_bytes)}: {found(report, advice.knee)}."
    return target(report)


def other_choice(report: Report) -> Choice | None:
    """The size that is not recommended, where host memory is needed for it and it is another."""
    advice = report.advice
    if _knee_is_second(advice):
        other = advice.knee
    else:
        other = advice.target if advice.device_share < advice.target_share else None
    return None if other is None or other == _first(advice) or not report.pays(other) else other


def _first(advice: Advice) -> Choice | None:
    """What the headline is about, recommended or not."""
    return advice.promising if advice.verdict is Verdict.NOTHING_GAINED else advice.recommended


def _knee_is_second(advice: Advice) -> bool:
    return _first(advice) is None or advice.target_first


def remarks(report: Report) -> Iterator[str]:
    """What else the numbers say about the sizes and runs that were asked for."""
    if report.without is not None and (refused := report.without.refused):
        were = (
            "1 request is longer than the device and was"
            if refused == 1
            else (f"{refused:,} requests are longer than the device and were")
        )
        yield f"{were} left out."
    choice = report.advice.recommended
    if choice is None:
        return
    if report.sizes_asked:
        least, largest = report.sizes[0], report.sizes[-1]
        if choice.num_bytes <= least:
            yield f"The smallest size asked for, {memory(least)}, is enough."
        elif choice.num_bytes > largest:
            yield f"More than the largest size asked for, {memory(largest)}, would still pay."
    run = report.best(choice)
    if run is not None:
        alone = report.without
        without = "" if alone is None else f", without host memory {percent(alone.hit_share)}"
        yield (
            f"Replayed with {memory(run.host_bytes)}, {run.mode} and {run.policy}: {percent(run.hit_share)} of "
            f"tokens are found{without}; {shown(run.bytes_loaded)} are loaded, {shown(run.bytes_stored)} stored."
        )
        if run.speed is not None:
            yield bus(run)


def bus(run: Replay) -> str:
    speed = run.speed
    assert speed is not None
    share = (
        f"busy {percent(speed.bus_busy_share)} of the time"
        if speed.bus_busy_share <= 1
        else (f"asked for {speed.bus_busy_share:.1f} times what it moves")
    )
    keeps = "The bus keeps up" if speed.bus_busy_share <= 1 else "The bus does not keep up"
    return (
        f"{keeps}: {share}. TTFT p50 {seconds(speed.ttft_p50_s)} instead of {seconds(speed.ttft_p50_without_s)}, "
        f"p99 {seconds(speed.ttft_p99_s)} instead of {seconds(speed.ttft_p99_without_s)}."
    )


def seconds(value: float) -> str:
    return f"{value * 1000:,.0f} ms" if value < 10 else f"{value:,.0f} s"
