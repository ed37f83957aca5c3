"""Axes and shapes, drawn by hand: nothing has to be fetched or run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import log10

from forebay.page import round_step

FONT = 12
LETTER = 6.6
"""Pixels of a letter of that size, rather more than less: for what has to fit."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where the axes cross and end, in pixels: a chart is drawn as wide as it is shown."""

    width: int
    height: int
    left: int = 46
    right: int = 10
    top: int = 14
    bottom: int = 56

    @property
    def end(self) -> int:
        return self.width - self.right

    @property
    def ground(self) -> int:
        return self.height - self.bottom


@dataclass(frozen=True, slots=True)
class Scale:
    low: float
    high: float
    begin: float
    end: float
    factors: bool = False
    """Equal distances are equal factors."""

    def at(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        low, high = self.low, self.high
        if self.factors:
            value, low, high = log10(value), log10(low), log10(high)
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)


def share_scale(frame: Frame, most: float) -> Scale:
    """For shares up to `most`, and a little room above."""
    step = round_step(most, 0.01)
    high = min(1.0, step * -(-most * 1.04 // step))
    return Scale(0.0, max(high, most), frame.ground, frame.top)


def share_axis(frame: Frame, scale: Scale) -> Iterable[str]:
    step = round_step(scale.high, 0.01)
    for number in range(int(scale.high / step + 0.001) + 1):
        y = scale.at(number * step)
        yield f'<path class="grid" d="M{frame.left} {y}H{frame.end}"/>'
        yield text(frame.left - 7, y + 4, f"{number * step * 100:.3g} %", "faint", "end")


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], kind: str) -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in points)
    return f'<path class="{kind}" d="M{path}"/>'


def area(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], kind: str) -> str:
    path = "L".join(f"{x:g} {y:g}" for x, y in [*upper, *reversed(lower)])
    return f'<path class="{kind}" d="M{path}Z"/>'


def picture(frame: Frame, parts: Iterable[str], label: str, kind: str) -> str:
    inside = "\n".join(parts)
    box = f"0 0 {frame.width} {frame.height}"
    return f'<svg class="{kind}" viewBox="{box}" role="img" aria-label="{escape(label)}">\n{inside}\n</svg>'


_SHAPES = {
    "lru": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0Z",
    "s3fifo": "M-4 -4H4V4H-4Z",
    "arc": "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
}
_OTHER_SHAPE = "M0 -5.5L5 4H-5Z"


def mark(x: float, y: float, mode: str, policy: str, words: str = "") -> str:
    """A shape for each policy, a colour for each mode."""
    title = f"<title>{escape(words)}</title>" if words else ""
    shape = _SHAPES.get(policy, _OTHER_SHAPE)
    return f'<path class="mark {escape(mode)}" transform="translate({x:.1f} {y:.1f})" d="{shape}">{title}</path>'
