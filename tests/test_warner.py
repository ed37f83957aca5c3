"""Warnings that repeat: the first at once, then at most one of a kind in an interval, and none goes uncounted."""

from __future__ import annotations

import re
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.testing import ManualClock
from forebay.warner import Warner

INTERVAL_S = 60.0
_MORE = re.compile(r" \(and (\d+) more since the last such line\)$")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_first_is_logged_at_once_and_the_next_after_a_minute_says_how_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    warner = Warner(clock)
    for number in range(100):
        warner.warn("failed", "transfer %d could not be copied", number)
    assert told(caplog) == ["transfer 0 could not be copied"]
    clock.advance(59.9)
    warner.warn("failed", "transfer %d could not be copied", 100)
    assert len(told(caplog)) == 1
    clock.advance(0.2)
    warner.warn("failed", "transfer %d could not be copied", 101)
    assert told(caplog)[1:] == ["transfer 101 could not be copied (and 100 more since the last such line)"]
    clock.advance(1000)
    warner.warn("failed", "transfer %d could not be copied", 102)
    assert told(caplog)[2:] == ["transfer 102 could not be copied"]


def test_kinds_do_not_silence_each_other(caplog: pytest.LogCaptureFixture) -> None:
    warner = Warner(ManualClock())
    for _ in range(3):
        for kind in ("failed", "late"):
            warner.warn(kind, "a load is %s", kind)
    assert told(caplog) == ["a load is failed", "a load is late"]


def test_what_is_logged_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    warner = Warner(ManualClock())
    try:
        raise RuntimeError("out of luck")
    except RuntimeError:
        warner.warn("failed", "it failed", exc_info=True)
    assert "out of luck" in caplog.text


def test_threads_together_are_counted_right(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    warner = Warner(clock)

    def fail() -> None:
        for _ in range(500):
            warner.warn("failed", "it failed")

    threads = [Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told(caplog) == ["it failed"]
    clock.advance(INTERVAL_S)
    warner.warn("failed", "it failed")
    assert told(caplog)[1:] == ["it failed (and 1999 more since the last such line)"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 90)), max_size=60))
def test_any_traffic(calls: list[tuple[str, float]]) -> None:
    """Against the definition: per kind, lines are an interval apart, a call is silent only if a line of its kind
    is younger than that, and what lines say they stand for adds up to all calls."""
    clock = ManualClock()
    warner = Warner(clock, INTERVAL_S)
    with pytest.MonkeyPatch.context() as patch:
        lines: list[tuple[str, float, int]] = []

        def record(message: str, *values: object, exc_info: bool) -> None:
            text = message % values
            more = _MORE.search(text)
            lines.append((text[0], clock(), int(more[1]) if more else 0))

        patch.setattr("forebay.warner.logger.warning", record)
        silent = dict.fromkeys("abc", 0)
        for kind, after_s in calls:
            clock.advance(after_s)
            before = [at for name, at, _ in lines if name == kind]
            count = len(lines)
            warner.warn(kind, "%s went wrong", kind)
            may_speak = not before or clock() - before[-1] >= INTERVAL_S
            assert (len(lines) - count) == may_speak
            if may_speak:
                assert lines[-1] == (kind, clock(), silent[kind])
                silent[kind] = 0
            else:
                silent[kind] += 1
    assert len(calls) == sum(1 + more for _, _, more in lines) + sum(silent.values())
