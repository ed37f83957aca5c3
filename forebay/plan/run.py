"""From a trace to a report: read once, curves, sizes, replays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

from forebay.config import Mode
from forebay.errors import ConfigError
from forebay.plan.advice import Verdict, advise, automatic_sizes
from forebay.plan.curve import read_curves
from forebay.plan.models import ModelKV
from forebay.plan.replay import Setup, replay
from forebay.plan.report import Engine, Report, Totals
from forebay.plan.request import Trace
from forebay.plan.results import Replay
from forebay.plan.speed import Speeds
from forebay.plan.spool import Spool, Spooling
from forebay.plan.words import memory
from forebay.plan.workers import Tell, cores, run_jobs

Show = Callable[[str, float], None]

USUAL_MODEL = "llama-3.1-8b"
"""If nobody says."""
DEVICE_BYTES = 40 * 10**9
"""Of a rank, if nobody says: about what a model leaves of 80 GB."""
SMALL_BLOCKS = 50_000
"""Of a trace: to start processes takes longer than to replay it here."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be found out."""

    model: ModelKV
    model_assumed: bool = False
    device_bytes: int | None = None
    """Of all ranks together; one of the two, or what is usual."""
    device_tokens: int | None = None
    sizes: Sequence[int] = ()
    modes: Sequence[str] = ("eager", "lazy")
    policies: Sequence[str] = ("lru",)
    target_share: float | None = None
    prefill_tokens_per_s: float | None = None
    bus_bytes_per_s: float | None = None
    curve_only: bool = False
    sample: float = 1.0
    processes: int | None = None


def plan(trace: Trace, wanted: Wanted, show: Show = lambda what, share: None) -> Report:
    with TemporaryDirectory(prefix="forebay-plan-", ignore_cleanup_errors=True) as folder:
        return _plan(trace, wanted, show, Path(folder))


def _plan(trace: Trace, wanted: Wanted, show: Show, folder: Path) -> Report:
    block_bytes = _kv_bytes_per_token(wanted.model, trace.block_tokens) * trace.block_tokens
    _check_sizes(wanted, trace.block_tokens, block_bytes)
    engine = _engine(wanted, trace.block_tokens, block_bytes)
    # Between two sizes a curve has that of the smaller, which may lie just below what the device needs.
    device = [engine.device_blocks]
    spooling = Spooling(trace, folder / "trace")
    total = trace.num_bytes or 1
    curves = read_curves(
        spooling, device, rate=wanted.sample, progress=lambda _, done: show("reading the trace", done / total)
    )
    spool, totals = spooling.spool, spooling.totals
    if wanted.prefill_tokens_per_s is not None and not totals.duration_s:
        raise ConfigError("--prefill-tokens-per-s", totals.name, "a trace with times")
    advice = advise(curves.lru, block_bytes, engine.device_blocks, wanted.target_share)
    sizes = sorted(set(wanted.sizes))
    if not sizes and advice.knee is not None:
        sizes = automatic_sizes(curves.lru, advice, block_bytes, engine.device_blocks)
    if sizes:
        slots = device + [size // block_bytes for size in sizes]
        slots += [choice.slots for choice in (advice.knee, advice.target) if choice is not None]
        curves = read_curves(
            spool, slots, rate=wanted.sample, progress=lambda done, _: show("curves", done / totals.requests)
        )
        advice = advice.by(curves.lru, engine.device_blocks)
    replays: Sequence[Replay] = ()
    without = None
    if sizes and not wanted.curve_only:
        without, *replays = _replays(wanted, spool, totals, engine, sizes, show)
    report = Report(totals, engine, curves.lru, curves.best, advice, sizes, bool(wanted.sizes), replays, without)
    if advice.recommended is not None and not report.pays(advice.recommended):
        return replace(report, advice=replace(advice, verdict=Verdict.NOTHING_GAINED))
    return report


def _check_sizes(wanted: Wanted, block_tokens: int, block_bytes: int) -> None:
    """Once the trace has said how large a block is."""
    named = [("--sizes", size) for size in wanted.sizes]
    named += [("--device-memory", size) for size in (wanted.device_bytes,) if size is not None]
    for option, size in named:
        if size < block_bytes:
            raise ConfigError(option, memory(size), f"at least a block of the trace, {memory(block_bytes)}")
    if wanted.device_tokens is not None:
        if wanted.device_tokens < block_tokens:
            raise ConfigError(
                "--device-tokens", wanted.device_tokens, f"at least a block of the trace, {block_tokens}"
            )
    elif wanted.device_bytes is None and _assumed_bytes(wanted.model) < block_bytes:
        raise ConfigError(
            "--device-memory",
            f"{memory(_assumed_bytes(wanted.model))}, assumed",
            f"at least a block of the trace, {memory(block_bytes)}",
        )


def _engine(wanted: Wanted, block_tokens: int, block_bytes: int) -> Engine:
    model = wanted.model
    if wanted.device_tokens is not None:
        blocks = wanted.device_tokens // block_tokens
    else:
        blocks = (wanted.device_bytes or _assumed_bytes(model)) // block_bytes
    return Engine(
        model.name,
        wanted.model_assumed,
        _kv_bytes_per_token(model, block_tokens),
        model.tensor_parallel,
        blocks,
        wanted.device_bytes is None and wanted.device_tokens is None,
        wanted.prefill_tokens_per_s,
        wanted.bus_bytes_per_s,
        model.notes,
    )


def _assumed_bytes(model: ModelKV) -> int:
    return DEVICE_BYTES * model.tensor_parallel


def _kv_bytes_per_token(model: ModelKV, block_tokens: int) -> int:
    """That the host keeps, of all ranks together."""
    return ceil(model.host_bytes_per_token(block_tokens) * model.tensor_parallel)


@dataclass(frozen=True, slots=True)
class _Replay:
    """A job for another process."""

    spool: Spool
    requests: int
    setup: Setup
    ranks: int
    host_bytes: int
    """As they were asked for. The setup has whole slots of one rank."""

    def __call__(self, tell: Tell) -> Replay:
        result = replay(self.spool, self.setup, lambda done, _: tell(done / max(1, self.requests)))
        return replace(
            result,
            host_bytes=self.host_bytes,
            bytes_loaded=result.bytes_loaded * self.ranks,
            bytes_stored=result.bytes_stored * self.ranks,
        )


def _replays(
    wanted: Wanted, spool: Spool, totals: Totals, engine: Engine, sizes: Sequence[int], show: Show
) -> list[Replay]:
    """Without host memory first, then by size, mode and policy."""
    layout, ranks = wanted.model.layout(totals.block_tokens), engine.ranks
    device_bytes = engine.device_blocks * totals.block_tokens * engine.kv_bytes_per_token
    speeds = None
    if wanted.prefill_tokens_per_s is not None and wanted.bus_bytes_per_s is not None:
        speeds = Speeds(wanted.prefill_tokens_per_s, wanted.bus_bytes_per_s)
    # One more: an engine's own block that stands for "nothing here".
    usual = Setup(layout, max(1, device_bytes // ranks // layout.bytes_per_block) + 1, 0, speeds=speeds)
    jobs = [_Replay(spool, totals.requests, usual, ranks, 0)]
    for size in sizes:
        slots = size // ranks // layout.bytes_per_block
        for mode, policy in product(wanted.modes, wanted.policies):
            setup = replace(usual, slots=slots, mode=Mode(mode), policy=policy)
            jobs.append(_Replay(spool, totals.requests, setup, ranks, size))
    blocks = totals.input_tokens // totals.block_tokens
    processes = 1 if blocks < SMALL_BLOCKS else wanted.processes or cores()
    return run_jobs(jobs, processes, lambda share: show("replays", share))
