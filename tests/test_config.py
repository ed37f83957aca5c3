from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, fields
from decimal import localcontext
from math import inf, nan
from typing import Any

import pytest

from forebay import (
    CapacityError,
    ConfigError,
    ForebayError,
    Key,
    Mode,
    OffloadConfig,
    PolicyError,
    UnknownKeyError,
)
from forebay.config import parse_size
from forebay.policies import LRU, POLICIES, Policy, policy_class
from tests.pool_builders import CUSTOM, NewestFirst


class NotAPolicy:
    pass


class HalfAPolicy(LRU):
    @abstractmethod
    def touch(self, keys: Sequence[Key]) -> None: ...

    @abstractmethod
    def insert(self, keys: Sequence[Key]) -> None: ...


NO_CLASS = 5


def _parse(**settings: Any) -> OffloadConfig:
    return OffloadConfig.parse({"capacity_bytes": 1000, **settings})


def _names(error: ConfigError, setting: str, value: object, *allowed: str) -> None:
    """One line for a person: what is wrong, what it was, what it may be."""
    line = str(error)
    assert "\n" not in line
    assert line.startswith(f"{setting}: ")
    assert line.endswith(f"got {value!r}")
    for each in allowed:
        assert each in line
    assert error.setting == setting


# --- what is right ----------------------------------------------------------------------------------------


def test_only_the_capacity_has_to_be_said() -> None:
    config = OffloadConfig.parse({"capacity_bytes": 1000})
    assert config == OffloadConfig(capacity_bytes=1000)
    assert (config.mode, config.eviction_policy, config.min_load_tokens) == (Mode.EAGER, "lru", 0)
    assert config.load_deadline_s > config.wait_deadline_s > 0
    assert config.store_deadline_s > 0


def test_every_setting_can_be_said() -> None:
    said: dict[str, Any] = {
        "capacity_bytes": "2KiB",
        "mode": "lazy",
        "eviction_policy": "arc",
        "load_deadline_s": 1,
        "wait_deadline_s": 0,
        "store_deadline_s": inf,
        "min_load_tokens": 64,
    }
    assert said.keys() == {each.name for each in fields(OffloadConfig)}
    config = OffloadConfig.parse(said)
    assert {name: getattr(config, name) for name in said} == {
        **said,
        "capacity_bytes": 2048,
        "mode": Mode.LAZY,
    }


def test_settings_do_not_change_once_checked() -> None:
    config = OffloadConfig(1000)
    with pytest.raises(FrozenInstanceError):
        config.capacity_bytes = -1  # type: ignore[misc]


def test_parsing_leaves_the_given_settings_alone() -> None:
    said = {"capacity_bytes": "64GB", "mode": "lazy"}
    OffloadConfig.parse(said)
    assert said == {"capacity_bytes": "64GB", "mode": "lazy"}


@pytest.mark.parametrize("mode", list(Mode))
def test_mode_may_be_text_or_a_member(mode: Mode) -> None:
    assert _parse(mode=mode.value).mode is mode
    assert _parse(mode=mode).mode is mode
    assert OffloadConfig(1, mode=mode).mode is mode


# --- sizes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64GB", 64 * 1000**3),
        ("60GiB", 60 * 1024**3),
        ("1.5GB", 1_500_000_000),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("0.5KiB", 512),
        ("7", 7),
        ("7B", 7),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("1MB", 1000**2),
        ("1MiB", 1024**2),
        ("2TB", 2 * 1000**4),
        ("2TiB", 2 * 1024**4),
        (" 64 GB ", 64 * 1000**3),
        (123, 123),
        # Whole numbers are exact however large they are: floats are not, above 2**53.
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993KiB", (2**53 + 1) * 1024),
    ],
)
def test_size(text: str | int, size: int) -> None:
    assert parse_size("capacity_bytes", text) == size
    assert OffloadConfig.parse({"capacity_bytes": text}).capacity_bytes == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1.001KB", 1001),
        ("2.3GB", 2_300_000_000),
        ("70.362TB", 70_362_000_000_000),
        ("8.2MB", 8_200_000),
        ("7.0", 7),
        ("0.001KB", 1),
        ("0.0009765625KiB", 1),
        ("123456789.123456789GB", 123456789123456789),
    ],
)
def test_decimal_size_loses_no_byte(text: str, size: int) -> None:
    assert parse_size("capacity_bytes", text) == size


def test_size_does_not_depend_on_what_the_program_does_with_decimals() -> None:
    with localcontext() as context:
        context.prec = 6
        assert parse_size("capacity_bytes", "60GiB") == 60 * 1024**3


def test_size_of_very_many_digits_is_exact_or_refused() -> None:
    assert parse_size("capacity_bytes", "12345678901234567890123456789") == 12345678901234567890123456789
    with pytest.raises(ConfigError):
        parse_size("capacity_bytes", "1.0000000000000000000000000001GB")


@pytest.mark.parametrize(
    "value",
    [
        *("64gb", "64G", "64Gb", "64GIB", "64XB", "64PB", "64 G B", "GB", "64GB!"),
        *("", " ", "-1", "-1GB", "+1GB", "1.5e-3", "1,000", "0x10", "1.GB", ".5GB", "1.5.5GB"),
        *("1.5", "1.5B", "0.0001KB", "1.0005KB", "0.3KiB"),  # no whole number of bytes
        *(1.5, 1.5e-3, nan, None, True, False, [64], {"GB": 64}, b"64GB"),
    ],
)
def test_size_that_is_none_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig.parse({"capacity_bytes": value})
    _names(error.value, "capacity_bytes", value, "whole bytes", '"64GB"', '"60GiB"')


def test_capacity_that_is_not_said_is_a_config_error() -> None:
    with pytest.raises(ConfigError) as error:
        OffloadConfig.parse({})
    _names(error.value, "capacity_bytes", None, "whole bytes")


@pytest.mark.parametrize("value", [0, -1, "0", "0GB", "0.000KB"])
def test_capacity_below_one_byte_is_a_capacity_error(value: object) -> None:
    with pytest.raises(CapacityError) as error:
        OffloadConfig.parse({"capacity_bytes": value})
    assert error.value.setting == "capacity_bytes"
    assert "at least one block" in str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "64GB", None, True])
def test_capacity_given_directly_must_be_whole_bytes(value: Any) -> None:
    with pytest.raises(CapacityError) as error:
        OffloadConfig(capacity_bytes=value)
    _names(error.value, "capacity_bytes", value, "whole bytes")


# --- everything else that can be wrong -----------------------------------------------------------------------


@pytest.mark.parametrize("value", ["EAGER", "sometimes", "", None, 1, True, ["eager"], {}])
def test_mode_that_is_none_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        _parse(mode=value)
    _names(error.value, "mode", value, "eager", "lazy")


def test_text_for_a_mode_is_refused_where_nobody_parses_it() -> None:
    # Taken as it is, it would be neither of the modes: `mode is Mode.LAZY` is false for the text "lazy".
    with pytest.raises(ConfigError) as error:
        OffloadConfig(1, mode="lazy")  # type: ignore[arg-type]
    _names(error.value, "mode", "lazy", "eager")


@pytest.mark.parametrize("setting", ["load_deadline_s", "wait_deadline_s", "store_deadline_s"])
@pytest.mark.parametrize("value", [-1, -0.5, -inf, nan, "1", "soon", None, True, [1]])
def test_deadline_that_is_none_is_a_config_error(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        _parse(**{setting: value})
    _names(error.value, setting, value, "seconds", "at least 0")


@pytest.mark.parametrize("value", [-1, 1.5, 64.0, "64", None, True, [64]])
def test_min_load_tokens_that_is_no_count_is_a_config_error(value: object) -> None:
    with pytest.raises(ConfigError) as error:
        _parse(min_load_tokens=value)
    _names(error.value, "min_load_tokens", value, "whole number", "at least 0")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("capacity", "capacity_bytes"),
        ("capacity_byte", "capacity_bytes"),
        ("evictionpolicy", "eviction_policy"),
        ("load_deadline", "load_deadline_s"),
        ("min_tokens", "min_load_tokens"),
        ("Mode", "mode"),
    ],
)
def test_unknown_key_names_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(UnknownKeyError) as error:
        _parse(**{key: 1})
    line = str(error.value)
    assert line.startswith(f"forebay: unknown key {key!r}; did you mean {nearest!r}?")
    assert "\n" not in line


def test_unknown_key_with_nothing_near_it_names_all_that_are_known() -> None:
    with pytest.raises(UnknownKeyError) as error:
        OffloadConfig.parse({"capacity_bytes": 1, "zzz": 1}, where="kv_connector_extra_config")
    line = str(error.value)
    assert line.startswith("kv_connector_extra_config: unknown key 'zzz'")
    assert "did you mean" not in line
    for each in fields(OffloadConfig):
        assert each.name in line


def test_unknown_key_is_named_before_a_wrong_value() -> None:
    # A misspelt capacity_bytes is more likely than one that was left out.
    with pytest.raises(UnknownKeyError, match="capacity_bytes"):
        OffloadConfig.parse({"capacity_byts": "64GB"})


# --- policies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(POLICIES))
def test_policy_by_name(name: str) -> None:
    assert policy_class(_parse(eviction_policy=name).eviction_policy) is POLICIES[name]


def test_policy_by_module_and_class() -> None:
    assert policy_class(_parse(eviction_policy=CUSTOM).eviction_policy) is NewestFirst
    assert policy_class("forebay.policies.lru:LRU") is LRU


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mru", ""),
        ("LRU", ""),
        ("", ""),
        ("forebay.policies.LRU", ""),
        ("no_such_module_of_anybody:LRU", "no_such_module_of_anybody"),
        ("forebay.no_such_module:LRU", "no_such_module"),
        ("forebay.policies:MRU", "MRU"),
        ("forebay.policies:", "no attribute"),
        (":LRU", ""),
        (":", ""),
        (".policies:LRU", ""),
        ("..:LRU", ""),
        ("forebay.policies:LRU:LRU", "LRU:LRU"),
        (f"{__name__}:NO_CLASS", "5"),
        (f"{__name__}:NotAPolicy", "NotAPolicy"),
        ("forebay.policies:policy_class", "policy_class"),
        (None, ""),
        (5, ""),
        (True, ""),
        (["lru"], ""),
        ({"name": "lru"}, ""),
    ],
)
def test_policy_that_is_none_is_a_policy_error(name: Any, reason: str) -> None:
    with pytest.raises(PolicyError) as error:
        _parse(eviction_policy=name)
    _names(error.value, "eviction_policy", name, "lru", "s3fifo", "arc", "module:Class", reason)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        (f"{__name__}:HalfAPolicy", "insert, touch"),
        ("forebay.policies:Policy", "candidates, clear, evict, insert, keys, postpone, remove, touch"),
    ],
)
def test_abstract_policy_is_a_policy_error_that_names_what_it_lacks(name: str, missing: str) -> None:
    with pytest.raises(PolicyError) as error:
        _parse(eviction_policy=name)
    _names(error.value, "eviction_policy", name, f"it lacks {missing}")


def test_policy_is_checked_where_the_settings_are() -> None:
    # Before anything expensive starts, not when the pool is built.
    with pytest.raises(PolicyError):
        OffloadConfig(1, eviction_policy="mru")
    assert issubclass(PolicyError, ForebayError)
    assert issubclass(policy_class("lru"), Policy)
