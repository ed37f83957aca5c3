"""Reports that nobody measured."""

from __future__ import annotations

from collections.abc import Sequence
from math import sin

from forebay.plan.advice import advise, automatic_sizes
from forebay.plan.report import Engine, Report, Totals
from forebay.plan.results import Curve, Moment, Replay, Speed

BLOCK_TOKENS, KV_BYTES = 512, 131_072
BLOCK_BYTES = BLOCK_TOKENS * KV_BYTES
# A service of an hour: sizes in blocks, and what they find.
SIZES = [1, 100, 300, 1000, 3000, 5000, 10_000, 20_000, 30_000, 38_000, 50_000, 80_000, 150_000]
SHARES = [0.01, 0.04, 0.042, 0.045, 0.065, 0.11, 0.211, 0.287, 0.326, 0.349, 0.355, 0.362, 0.366]
BEST = [0.02, 0.08, 0.11, 0.17, 0.24, 0.27, 0.31, 0.34, 0.35, 0.36, 0.364, 0.366, 0.366]


def make_curve(sizes: Sequence[int] = SIZES, shares: Sequence[float] = SHARES, name: str = "lru") -> Curve:
    most = max(shares, default=0.0)
    return Curve(name, sizes, shares, 1.0, most, num_blocks=288_500, distinct_blocks=int(288_500 * (1 - most)))


def make_replay(
    size: int, share: float, *, mode: str = "eager", policy: str = "lru", speed: Speed | None = None
) -> Replay:
    tokens, slots = 144_793_823, size // BLOCK_BYTES
    device = int(tokens * min(share, 0.04))
    host = int(tokens * share) - device
    moments = [
        Moment(
            time_s=number * 60.0,
            input_tokens=tokens // 59,
            device_tokens=device // 59,
            host_tokens=int(host / 59 * (1 + 0.3 * sin(number / 3)) * min(1.0, number / 15)),
            occupied_slots=min(slots, number * 3000),
            evictions=max(0, number * 3000 - slots),
        )
        for number in range(59)
    ]
    return Replay(
        mode,
        policy,
        device_blocks=596,
        slots=slots,
        host_bytes=size,
        requests=12_031,
        input_tokens=tokens,
        device_tokens=device,
        host_tokens=host,
        bytes_loaded=host * KV_BYTES,
        bytes_stored=(tokens - host) * KV_BYTES,
        evictions=max(0, 180_000 - slots),
        occupied_slots=min(slots, 180_000),
        moments=moments,
        speed=speed,
    )


def make_report(
    curve: Curve | None = None,
    *,
    runs: Sequence[tuple[str, str]] = (("eager", "lru"), ("lazy", "lru"), ("eager", "s3fifo")),
    sizes: Sequence[int] = (),
    target: float | None = None,
    speeds: bool = False,
    device_blocks: int = 596,
    bound: bool = True,
    name: str = "chats.jsonl",
) -> Report:
    curve = make_curve() if curve is None else curve
    advice = advise(curve, BLOCK_BYTES, device_blocks, target)
    chosen = list(sizes) or automatic_sizes(curve, advice, BLOCK_BYTES, device_blocks)
    speed = Speed(0.41, 9.3, 0.78, 31.0, 0.62) if speeds else None
    replays = [
        make_replay(
            size,
            (curve.share_at(size // BLOCK_BYTES) + 0.003 * number) * 0.97,
            mode=mode,
            policy=policy,
            speed=speed,
        )
        for size in chosen
        for number, (mode, policy) in enumerate(runs)
    ]
    return Report(
        Totals(name, BLOCK_TOKENS, 12_031, 144_793_823, 4_122_048, 126_195, 3537.0),
        Engine("Llama-3.1-8B", True, KV_BYTES, 1, device_blocks, True, *((20_000.0, 50e9) if speeds else ())),
        curve,
        make_curve(shares=BEST, name="best possible") if bound else None,
        advice,
        chosen,
        bool(sizes),
        replays,
        make_replay(0, advice.device_share, mode="off", speed=None) if replays else None,
    )
