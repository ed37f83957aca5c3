"""How much memory is worth giving, by a curve.

Eager mode keeps on the host what the device has too, so host memory adds something only where it is larger than
the device pool. What a size adds is its *gain*: what one cache of that size finds, less what the device finds
alone.

    share
    found │               ____------- unbounded
          │           ___x             x  the knee: where the gain is farthest above
          │         _/  .                 the straight line from nothing to everything.
          │       _/ .                    Up to there a GB brings more than the average GB,
          │______/.                       beyond it less.
          │   .
          └────────────────────────── host memory
          0   device           where no more is found
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from math import floor, isqrt, log10

from forebay.plan.results import Curve

TARGET_OF_POSSIBLE = 0.9
WORTH = 0.01
"""A gain below one block in a hundred is not worth memory."""


class Verdict(Enum):
    NOTHING_REPEATS = "nothing repeats"
    DEVICE_SUFFICES = "the device suffices"
    GIVE = "give"
    NOTHING_GAINED = "nothing is gained"
    """The curve says give, and a replay with that much finds no more than one without."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A size of the host pool, as it can be typed."""

    num_bytes: int
    slots: int
    """Blocks of the trace."""
    hit_share: float
    """Of blocks, by the curve."""


@dataclass(frozen=True, slots=True)
class Advice:
    verdict: Verdict
    device_share: float
    """What the device finds alone, by the curve."""
    knee: Choice | None
    target: Choice | None
    """None if no memory reaches it."""
    target_share: float
    target_asked: bool

    @property
    def recommended(self) -> Choice | None:
        return self.promising if self.verdict is Verdict.GIVE else None

    @property
    def promising(self) -> Choice | None:
        """What would be recommended by the curve alone."""
        return self.target if self.target_first else self.knee

    @property
    def named(self) -> dict[str, Choice]:
        """Sizes worth marking. Where both are one size, it is the knee."""
        found = {}
        if self.knee is not None:
            found["knee"] = self.knee
            if self.target is not None and self.target != self.knee and self.device_share < self.target_share:
                found["target"] = self.target
        return found

    def by(self, curve: Curve, device_blocks: int) -> Advice:
        """The same sizes, and what they and the device find by a curve that has them exactly."""

        def again(choice: Choice | None) -> Choice | None:
            return None if choice is None else replace(choice, hit_share=curve.share_at(choice.slots))

        device_share = curve.share_at(device_blocks)
        return replace(self, device_share=device_share, knee=again(self.knee), target=again(self.target))

    @property
    def target_first(self) -> bool:
        """Whether it counts more than the knee: it was asked for, and can be had."""
        return self.target_asked and self.target is not None


def advise(curve: Curve, block_bytes: int, device_blocks: int, target_share: float | None = None) -> Advice:
    device_share = curve.share_at(device_blocks)
    most = max(curve.hit_share, default=0.0)
    gain = most - device_share
    possible = TARGET_OF_POSSIBLE * most if target_share is None else target_share
    if curve.unbounded_share < WORTH:
        verdict = Verdict.NOTHING_REPEATS
    elif gain < WORTH or (target_share is not None and target_share <= device_share):
        verdict = Verdict.DEVICE_SUFFICES
    else:
        verdict = Verdict.GIVE

    def choice(blocks: int | None) -> Choice | None:
        if blocks is None:
            return None
        num_bytes = round_up(blocks * block_bytes)
        slots = num_bytes // block_bytes
        return Choice(num_bytes, slots, curve.share_at(slots))

    return Advice(
        verdict=verdict,
        device_share=device_share,
        knee=choice(knee(curve, device_blocks)) if curve.unbounded_share >= WORTH <= gain else None,
        target=choice(curve.size_for(possible)),
        target_share=possible,
        target_asked=target_share is not None,
    )


def knee(curve: Curve, device_blocks: int) -> int | None:
    """In blocks. The smallest, if several are as good."""
    nothing = curve.share_at(device_blocks)
    everything = max(curve.hit_share, default=0.0)
    end = curve.size_for(everything)
    if end is None or everything <= nothing:
        return None
    found, best = end, 0.0
    for size, share in zip(curve.sizes, curve.hit_share, strict=True):
        if device_blocks < size < end:
            above = (share - nothing) / (everything - nothing) - size / end
            if above > best:
                found, best = size, above
    return found


def automatic_sizes(
    curve: Curve, advice: Advice, block_bytes: int, device_blocks: int, count: int = 8
) -> list[int]:
    """So many sizes in bytes: those that are recommended, from where gain begins to where it ends, and always one
    more in the widest gap."""
    begin, end = _interesting(curve, device_blocks)
    sizes = {round_up(begin * block_bytes), round_up(end * block_bytes)}
    sizes |= {each.num_bytes for each in advice.named.values()}
    while len(sizes) < count:
        known = sorted(sizes)
        low, high = max(pairwise(known), key=lambda gap: gap[1] / gap[0], default=(0, 0))
        between = round_up(isqrt(low * high))
        if between in sizes or between < block_bytes:
            break
        sizes.add(between)
    return sorted(sizes)


def _interesting(curve: Curve, device_blocks: int) -> tuple[int, int]:
    """From where a twentieth of the gain is there to where it is all but complete, in blocks."""
    nothing, everything = curve.share_at(device_blocks), max(curve.hit_share, default=0.0)

    def reached(part: float) -> int:
        return curve.size_for(nothing + part * (everything - nothing)) or 1

    end = reached(0.99)
    return max(1, min(reached(0.05), max(end // 8, device_blocks))), end


def round_up(num_bytes: int) -> int:
    """To two digits: no plan is more exact than that."""
    if num_bytes < 1:
        return 1
    unit: int = 10 ** max(0, floor(log10(num_bytes)) - 1)
    return -(-num_bytes // unit) * unit
