from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from math import inf, nan
from typing import Any

import pytest

from forebay.copier import InjectedFaults
from forebay.copier.faults import Fate, Fates
from forebay.errors import ConfigError, UnknownKeyError
from forebay.ids import Rank
from forebay.transfers import Direction

STORE, LOAD = Direction.STORE, Direction.LOAD


def _parse(**settings: Any) -> InjectedFaults:
    return InjectedFaults.parse(settings, "faults")


# --- settings ---------------------------------------------------------------------------------------------


def test_nothing_said_is_no_fault() -> None:
    assert _parse() == InjectedFaults()
    assert not InjectedFaults().concerns(Rank(0))


def test_every_setting_can_be_said() -> None:
    said: dict[str, Any] = {
        "fail_chance": 0.5,
        "spoil": "flip",
        "only": "load",
        "delay_polls": 3,
        "kill_nth": [2, 5],
        "ranks": [1],
        "seed": 7,
    }
    assert said.keys() == {each.name for each in fields(InjectedFaults)}
    assert _parse(**said) == InjectedFaults(0.5, "flip", "load", 3, (2, 5), (1,), 7)
    assert said["kill_nth"] == [2, 5], "what was handed in is left alone"


def test_settings_are_frozen_and_can_be_compared_and_hashed() -> None:
    faults = _parse(kill_nth=[1])
    with pytest.raises(FrozenInstanceError):
        faults.seed = 1  # type: ignore[misc]
    assert {faults: 1}[InjectedFaults(kill_nth=(1,))] == 1


@pytest.mark.parametrize(
    ("setting", "values", "allowed"),
    [
        ("fail_chance", [-0.1, 1.1, nan, inf, "0.5", None, True, [0.5]], "a number from 0 to 1"),
        ("only", ["loads", "LOAD", "", 1, True, {}], "one of store, load, or nothing for both"),
        ("delay_polls", [-1, 1.0, "1", None, True, [1]], "a whole number, at least 0"),
        ("kill_nth", [1, 0, "1", None, True, {}], "a list of whole numbers, each at least 1"),
        ("ranks", [0, "0", True, {}], "a list of whole numbers, each at least 0, or nothing for all"),
        ("seed", [1.5, "1", None, True], "a whole number"),
    ],
)
def test_a_wrong_value_is_a_config_error(setting: str, values: list[object], allowed: str) -> None:
    for value in values:
        with pytest.raises(ConfigError) as error:
            _parse(**{setting: value})
        got = tuple(value) if isinstance(value, list) else value
        assert str(error.value) == f"{setting}: expected {allowed}, got {got!r}"
        assert error.value.setting == setting


@pytest.mark.parametrize(("setting", "wrong"), [("kill_nth", [0]), ("kill_nth", [1.0]), ("ranks", [-1, 2])])
def test_a_wrong_value_in_a_list_is_a_config_error(setting: str, wrong: list[object]) -> None:
    with pytest.raises(ConfigError, match=f"^{setting}: expected a list of whole numbers"):
        _parse(**{setting: wrong})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("fail_chanse", "fail_chance"), ("kill", "kill_nth"), ("rank", "ranks"), ("delay", "delay_polls")],
)
def test_an_unknown_key_names_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(UnknownKeyError) as error:
        _parse(**{key: 1})
    assert str(error.value).startswith(f"faults: unknown key {key!r}; did you mean {nearest!r}?")


def test_settings_that_are_none() -> None:
    with pytest.raises(ConfigError, match=r"^faults: expected settings by name, got \[\]"):
        InjectedFaults.parse([], "faults")  # type: ignore[arg-type]


# --- fates ------------------------------------------------------------------------------------------------


def _fails(faults: InjectedFaults, rank: int, orders: int = 200) -> list[bool]:
    fates = Fates(faults, Rank(rank))
    return [fates.draw(STORE if number % 2 else LOAD).fails for number in range(orders)]


def test_equal_seeds_give_equal_fates_and_ranks_differ() -> None:
    faults = InjectedFaults(fail_chance=0.3, seed=1)
    assert _fails(faults, 0) == _fails(faults, 0)
    assert _fails(faults, 0) != _fails(faults, 1)
    assert _fails(faults, 0) != _fails(InjectedFaults(fail_chance=0.3, seed=2), 0)
    assert 30 < sum(_fails(faults, 0)) < 90


def test_chances_of_none_and_of_all() -> None:
    assert not any(_fails(InjectedFaults(fail_chance=0.0), 0))
    assert all(_fails(InjectedFaults(fail_chance=1), 0))


def test_only_one_direction_is_touched_and_counted() -> None:
    fates = Fates(InjectedFaults(fail_chance=1.0, only="store", delay_polls=2, kill_nth=(2,)), Rank(0))
    assert fates.draw(LOAD) == Fate()
    assert fates.draw(STORE) == Fate(fails=True, kills=False, delay_polls=2)
    assert fates.draw(LOAD) == Fate()
    assert fates.draw(STORE) == Fate(fails=True, kills=True, delay_polls=2)
    assert fates.draw(STORE) == Fate(fails=True, kills=False, delay_polls=2)


def test_only_some_ranks_are_touched() -> None:
    faults = InjectedFaults(fail_chance=1.0, ranks=(1, 3))
    assert [faults.concerns(Rank(rank)) for rank in range(4)] == [False, True, False, True]
    assert not any(_fails(faults, 0))
    assert all(_fails(faults, 3))
    assert not InjectedFaults(only="load", seed=3, ranks=(1,)).concerns(Rank(1)), "there is nothing to happen"
