from __future__ import annotations

import os
import signal

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.watched import STEPS

_COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": list(HealthCheck),
}
# The same traffic every time, so that a change is what makes a test fail. New traffic is for the long run.
settings.register_profile("default", max_examples=100, derandomize=True, database=None, **_COMMON)  # type: ignore[arg-type]
settings.register_profile(
    "long",
    max_examples=100,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    **_COMMON,  # type: ignore[arg-type]
)
settings.register_profile(
    "no-shrink",
    max_examples=100,
    database=None,
    phases=[Phase.generate],
    **_COMMON,  # type: ignore[arg-type]
)
settings.load_profile(os.environ.get("FOREBAY_PROFILE", "default"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell lets what it runs in the background ignore this, and all commands that tests start would too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STEPS.total:
        terminalreporter.write_line(f"checked engine steps: {STEPS.total:,}")
