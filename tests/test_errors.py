from __future__ import annotations

import subprocess
import sys

import pytest

from forebay.errors import (
    CapacityError,
    ConfigError,
    ForebayError,
    InvariantError,
    LayoutError,
    PolicyError,
    TransitionError,
    UnknownKeyError,
    ensure,
)


@pytest.mark.parametrize(
    ("error", "bases"),
    [
        (ConfigError, (ForebayError, ValueError)),
        (UnknownKeyError, (ConfigError,)),
        (CapacityError, (ConfigError,)),
        (PolicyError, (ConfigError,)),
        (LayoutError, (ConfigError,)),
        (TransitionError, (ForebayError,)),
        (InvariantError, (ForebayError, AssertionError)),
    ],
)
def test_error_can_be_caught_by_its_bases(error: type[Exception], bases: tuple[type[Exception], ...]) -> None:
    for base in bases:
        assert issubclass(error, base)


def test_bugs_are_not_caught_as_wrong_settings() -> None:
    for bug in (TransitionError, InvariantError):
        assert not issubclass(bug, ValueError)


@pytest.mark.parametrize("error", [ConfigError, CapacityError, PolicyError, LayoutError])
def test_config_error_names_the_setting_the_value_and_what_is_allowed(error: type[ConfigError]) -> None:
    raised = error("speed", "fast\nest", "a number")
    assert str(raised) == "speed: expected a number, got 'fast\\nest'"
    assert (raised.setting, raised.value) == ("speed", "fast\nest")


def test_unknown_key_names_the_nearest_and_all_that_are_known() -> None:
    raised = UnknownKeyError("colour", ["shape", "color", "size"], "paint")
    assert str(raised) == "paint: unknown key 'colour'; did you mean 'color'? (known keys: color, shape, size)"
    assert (raised.setting, raised.value) == ("paint", "colour")


def test_unknown_key_with_nothing_near_it_suggests_nothing() -> None:
    assert "did you mean" not in str(UnknownKeyError("xyz", ["shape", "color"], "paint"))


def test_ensure_raises_what_is_wrong_and_only_then() -> None:
    ensure(True, "fine")
    with pytest.raises(InvariantError, match="the sky fell"):
        ensure(False, "the sky fell")


def test_ensure_survives_python_without_asserts() -> None:
    script = "from forebay.errors import ensure; assert False; ensure(False, 'the sky fell')"
    done = subprocess.run(
        [sys.executable, "-O", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "InvariantError: the sky fell" in done.stderr
