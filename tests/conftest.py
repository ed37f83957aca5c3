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

# A shell lets what it runs in the background ignore the first of these, and nohup the second. All commands that
# tests start would, too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STEPS.total:
        terminalreporter.write_line(f"checked engine steps: {STEPS.total:,}")
