"""What the log has: little, whatever happens. Requests have no lines of their own above debug level."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Mode
from forebay.settings import ConnectorSettings
from forebay.testing import Faults
from forebay.warner import INTERVAL_S
from tests.builders import lose_device, make_engine, prompt, served

PACKAGE = Path(__file__).parent.parent / "forebay"
LEVELS = ("info", "warning", "warning_once", "error", "exception", "critical")

LOGGED_DIRECTLY = {
    "copier/pages.py close": "at the end of a process",
    "copier/pages.py _run": "once: the thread that grows has ended",
    "copier/pages.py _finish": "once: of the first piece",
    "copier/threaded.py __init__": "at start",
    "copier/threaded.py poll": "once: the copier has stopped",
    "copier/threaded.py close": "at the end of a process",
    "vllm/compat.py warn_if_untested": "at start",
    "vllm/connector.py __init__": "at start",
    "vllm/scheduler.py agree_on_slots": "at start",
    "vllm/worker.py register_kv_caches": "at start",
    "vllm/worker.py _build_copier": "at start",
    "warner.py warn": "the rate limit itself",
}
"""By file and function: what logs above debug level without asking a Warner, and why traffic cannot repeat it."""


def _calls(tree: ast.AST, function: str = "") -> Iterator[str]:
    """The function that each logging call above debug level stands in."""
    for node in ast.iter_child_nodes(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("logger" | "logging"), attr=level)) if level in LEVELS:
                yield function
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from _calls(node, name)


def test_what_traffic_can_repeat_goes_through_the_rate_limit() -> None:
    found = {
        f"{path.relative_to(PACKAGE)} {function}"
        for path in PACKAGE.rglob("*.py")
        for function in _calls(ast.parse(path.read_text()))
    }
    assert found == set(LOGGED_DIRECTLY)


@pytest.mark.parametrize("mode", list(Mode), ids=lambda mode: mode.value)
def test_requests_that_go_well_say_nothing(mode: Mode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forebay")
    engine = make_engine(mode=mode, slots=20, num_blocks=32)
    for family in range(60):
        served(engine, prompt(24, family * family % 7), 2)
        lose_device(engine)
    assert engine.manager.stats.loaded_blocks
    assert engine.manager.pool.evictions
    assert caplog.messages == []


def test_many_failures_are_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """Every kind of trouble at once, for a quarter of an hour: at most a line of each kind a minute."""
    engine = make_engine(ranks=2, load_deadline_s=1.0, store_deadline_s=1.0, slots=256, num_blocks=64)
    began = engine.clock()
    trouble = [
        Faults(mismatch_chance=1.0),
        Faults(drop_chance=1.0),
        Faults(duplicate=True, stray=True),
        Faults(fail_chance=1.0),
    ]
    for round_ in range(400):
        engine.copiers[1].faults = Faults()
        engine.submit(prompt(24, round_ % 8))
        for _ in range(8):
            engine.step()
        lose_device(engine)
        engine.copiers[1].faults = trouble[round_ % len(trouble)]
        engine.submit(prompt(25, round_ % 8))
        for _ in range(12):
            engine.step()
            engine.clock.advance(0.2)
        engine.deliver_lost_reports()
    engine.clock.advance(INTERVAL_S)
    engine.copiers[1].faults = Faults(mismatch_chance=1.0)
    lose_device(engine)
    engine.submit(prompt(25))
    engine.run()
    stats = engine.manager.stats
    assert min(stats.checksum_mismatches, stats.overdue_transfers, stats.unknown_reports, stats.late_reports) > 40
    minutes = (engine.clock() - began) / INTERVAL_S
    assert minutes > 10
    kinds = 7  # mismatch; late loads and stores; unknown transfer and rank; rank that had reported, transfer ended
    assert 2 * minutes < len(caplog.records) <= kinds * (minutes + 1)
    assert stats.checksum_mismatches == _stood_for(caplog, "a load was refused: its bytes on rank 1")


@pytest.mark.parametrize(
    ("settings", "ranks", "line"),
    [
        (
            {},
            1,
            "slots=7 bytes_per_rank=8589934592 ranks=1 mode=eager policy=lru verify=all layout=engine",
        ),
        (
            {
                "cpu_bytes_to_use": "64GB",
                "lazy_offload": True,
                "eviction_policy": "s3fifo",
                "verify": "sampled",
                "block_layout": True,
            },
            4,
            "slots=7 bytes_per_rank=16000000000 ranks=4 mode=lazy policy=s3fifo verify=sampled layout=block",
        ),
    ],
)
def test_the_line_at_start(settings: dict[str, object], ranks: int, line: str) -> None:
    assert ConnectorSettings.parse(settings).summary(7, ranks) == line


def _stood_for(caplog: pytest.LogCaptureFixture, beginning: str) -> int:
    """How often the trouble occurred, as the log has it: lines, and what they say was not logged."""
    lines = [line for line in caplog.messages if line.startswith(beginning)]
    return sum(1 + int(line.partition(" (and ")[2].partition(" ")[0] or 0) for line in lines)
