"""The chart of what was found where, over time."""

from __future__ import annotations

from collections.abc import Iterator

from forebay.amounts import percent
from forebay.page import round_step
from forebay.plan import words
from forebay.plan.page import svg
from forebay.plan.results import Replay

_UNITS = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


def chart(run: Replay, duration_s: float, frame: svg.Frame, kind: str) -> str:
    label = (
        f"Where the tokens of prompts were found over time, with {words.memory(run.host_bytes)}: in all "
        f"{percent(run.hit_share)}, of which {percent(run.host_share)} on the host"
    )
    return svg.picture(frame, _parts(run, duration_s, frame), label, kind)


def _parts(run: Replay, duration_s: float, frame: svg.Frame) -> Iterator[str]:
    last = max(duration_s, run.moments[-1].time_s) or 1.0
    x = svg.Scale(0.0, last, frame.left, frame.end)
    y = svg.Scale(0.0, 1.0, frame.ground, frame.top)
    yield from svg.share_axis(frame, y)
    yield from _time_axis(frame, x)
    ground: list[tuple[float, float]] = []
    device: list[tuple[float, float]] = []
    host: list[tuple[float, float]] = []
    filled: list[tuple[float, float]] = []
    ends = [*(each.time_s for each in run.moments[1:]), last]
    for moment, end in zip(run.moments, ends, strict=True):
        asked = max(1, moment.input_tokens)
        on_device, on_host = moment.device_tokens / asked, moment.host_tokens / asked
        for edge in (x.at(moment.time_s), x.at(end)):  # what holds for a part is drawn as a step
            ground.append((edge, frame.ground))
            device.append((edge, y.at(on_device)))
            host.append((edge, y.at(on_device + on_host)))
        filled.append((x.at(end), y.at(moment.occupied_slots / max(1, run.slots))))
    yield svg.area(device, ground, "on-device")
    yield svg.area(host, device, "on-host")
    yield svg.line([(frame.left, frame.ground), *filled], "filled")
    yield f'<path class="axis" d="M{frame.left} {frame.ground}H{frame.end}"/>'


def _time_axis(frame: svg.Frame, x: svg.Scale) -> Iterator[str]:
    unit, size = next((each for each in _UNITS if x.high >= 2 * each[1]), _UNITS[-1])
    step = round_step(x.high / size)
    for number in range(int(x.high / size / step) + 1):
        at = x.at(number * step * size)
        yield f'<path class="tick" d="M{at} {frame.ground}v5"/>'
        if at <= frame.end - 10:
            yield svg.text(at, frame.ground + 17, f"{number * step:g}", "", "middle")
    yield svg.text((frame.left + frame.end) / 2, frame.ground + 34, unit, "faint", "middle")
