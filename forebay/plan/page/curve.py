"""The chart of what each size finds."""

from __future__ import annotations

from collections.abc import Iterator
from math import log

from forebay.amounts import counted, percent
from forebay.plan import words
from forebay.plan.advice import Choice
from forebay.plan.document import thinned
from forebay.plan.page import svg
from forebay.plan.report import Report
from forebay.plan.results import Curve

_TICK_PIXELS = 74
"""Between two labels of the lower axis, at least."""
_ROOMY = 600


def chart(report: Report, frame: svg.Frame, kind: str) -> str:
    return svg.picture(frame, _Chart(report, frame).parts(), label(report), kind)


def label(report: Report) -> str:
    curve, advice = report.curve, report.advice
    found = [f"Share of blocks found by host memory: {percent(curve.unbounded_share)} without bounds"]
    found += [
        f"{percent(each.hit_share)} at {words.memory(each.num_bytes)} (the {name})"
        for name, each in advice.named.items()
    ]
    return ", ".join(found)


class _Chart:
    def __init__(self, report: Report, frame: svg.Frame) -> None:
        self._report, self._frame, self._block = report, frame, report.block_bytes
        self._device = report.engine.device_blocks * self._block
        sizes = [*report.sizes, max(1, self._device), *(each.num_bytes for each in report.advice.named.values())]
        low = max(min(sizes) // 2, self._block)
        self._x = svg.Scale(low, max(max(sizes) * 2, low * 10), frame.left, frame.end, factors=True)
        shares = [report.curve.unbounded_share, *(each.hit_share for each in report.replays), 0.01]
        self._y = svg.share_scale(frame, max(shares))

    def parts(self) -> Iterator[str]:
        frame, report = self._frame, self._report
        yield from self._device_part()
        yield from svg.share_axis(frame, self._y)
        yield from self._size_axis()
        top = self._y.at(report.curve.unbounded_share)
        yield svg.line([(frame.left, top), (frame.end, top)], "unbounded")
        if report.bound is not None:
            yield self._line(report.bound, "bound")
        yield self._line(report.curve, "lru")
        yield from self._marks()
        named = sorted(report.advice.named.items(), key=lambda each: each[1].num_bytes)
        for number, (name, choice) in enumerate(named):
            yield from self._drop(name, choice, number, to_left=number < len(named) - 1)
        unbounded = f"without bounds {percent(report.curve.unbounded_share)}"
        begin, width = max(frame.left, self._x.at(self._device)) + 5, len(unbounded) * svg.LETTER
        if begin + width < frame.end:
            yield svg.text(begin, top - 5, unbounded, "faint over")
        else:
            yield svg.text(frame.end, top - 5, unbounded, "faint over", "end")

    def _device_part(self) -> Iterator[str]:
        frame, x = self._frame, self._x.at(self._device)
        if self._device <= self._x.low:
            return
        width = x - frame.left
        yield (
            f'<rect class="device" x="{frame.left}" y="{frame.top}" width="{width:.1f}" '
            f'height="{frame.ground - frame.top}"><title>Smaller than the device pool: adds nothing</title></rect>'
        )
        name = f"device {words.memory(self._device)}"
        if width > len(name) * svg.LETTER + 8:
            yield svg.text(x - 5, frame.top + 14, name, "faint", "end")
        else:
            taken = self._y.at(self._report.curve.unbounded_share) - 5  # another name is there
            near = abs(taken - frame.top - 14) < 16
            yield svg.text(x + 5, taken + 20 if near else frame.top + 14, name, "faint over")

    def _size_axis(self) -> Iterator[str]:
        frame, ground = self._frame, self._frame.ground
        last = -1000.0
        power = 1
        ticks = []
        while power <= self._x.high:
            ticks += [factor * power for factor in (1, 2, 5)]
            power *= 10
        shown = [tick for tick in ticks if self._x.low <= tick <= self._x.high]
        decades = [tick for tick in shown if str(tick)[0] == "1"]
        wide = (frame.end - frame.left) / max(1, len(shown)) >= _TICK_PIXELS
        for tick in shown if wide or len(decades) < 2 else decades:
            x = self._x.at(tick)
            if x - last < _TICK_PIXELS * 0.8 or x > frame.end - 12:
                continue
            last = x
            yield f'<path class="tick" d="M{x} {ground}v5"/>'
            yield svg.text(x, ground + 17, _round(tick), "", "middle")
            slots = tick // self._block
            yield svg.text(x, ground + 31, f"{slots:,}" if slots else "< 1", "faint", "middle")
        yield f'<path class="axis" d="M{frame.left} {ground}H{frame.end}"/>'
        tokens = self._report.totals.block_tokens
        yield svg.text(
            (frame.left + frame.end) / 2,
            frame.height - 6,
            f"host memory, and slots of {counted(tokens, 'token')}",
            "faint",
            "middle",
        )

    def _line(self, curve: Curve, kind: str) -> str:
        """From where the curve begins, or enters, to the end: it stays as high as it was."""
        found = [(max(1, size) * self._block, share) for size, share in zip(*thinned(curve), strict=True)]
        points = [(self._x.at(size), self._y.at(share)) for size, share in found if size >= self._x.low]
        before = [each for each in found if each[0] < self._x.low]
        if before and points:
            (low, below), (high, above) = before[-1], found[len(before)]
            part = (log(self._x.low) - log(low)) / (log(high) - log(low))
            points.insert(0, (self._frame.left, self._y.at(below + part * (above - below))))
        last = found[-1][1] if found else 0.0
        return svg.line([*points, (self._frame.end, self._y.at(last))], kind)

    def _drop(self, name: str, choice: Choice, number: int, *, to_left: bool) -> Iterator[str]:
        """A line from the curve down to the axis, and beside it what it stands for: under the curve there is room.
        Names go to different sides where they can, and to different heights."""
        frame, x, y = self._frame, self._x.at(choice.num_bytes), self._y.at(choice.hit_share)
        yield f'<path class="drop" d="M{x} {y}V{frame.ground}"/><circle class="named" cx="{x}" cy="{y}" r="6"/>'
        lines = [name, words.memory(choice.num_bytes)]
        if frame.width >= _ROOMY:
            lines[1] += f", {percent(choice.hit_share)}"
        width = max(map(len, lines)) * svg.LETTER + 8
        to_left = x - width > frame.left and (to_left or x + width > frame.end)
        anchor, beside = ("end", x - 7) if to_left else ("start", x + 7)
        base = frame.ground - 30 - number * 38
        yield svg.text(beside, base, lines[0], "over name", anchor)
        yield svg.text(beside, base + 15, lines[1], "over", anchor)

    def _marks(self) -> Iterator[str]:
        for size in self._report.sizes:
            runs = self._report.of_size(size)
            for number, run in enumerate(runs):
                aside = (number - (len(runs) - 1) / 2) * 7  # runs of one size often find the same
                told = f"{words.memory(size)}, {run.mode}, {run.policy}: {percent(run.hit_share)} of tokens found"
                yield svg.mark(self._x.at(size) + aside, self._y.at(run.hit_share), run.mode, run.policy, told)


def _round(tick: int) -> str:
    return f"{tick // 10**12:,} TB" if tick >= 10**12 else words.memory(tick)
