"""Faults of a copier, on demand: how an engine behaves when copies fail is tried out, not argued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from random import Random
from typing import Any, Literal, NamedTuple

from forebay.errors import ConfigError, UnknownKeyError, is_whole
from forebay.ids import Rank
from forebay.transfers import Direction

GARBAGE = 0xA5
"""What an injected failure leaves in every byte it should have written: who ignores the failure is found out."""


class Spoil(Enum):
    """How a copy goes wrong without anybody saying so."""

    FLIP = "flip"  # stores: a bit of a slot flips when the store is done
    REUSE = "reuse"  # loads: a slot is filled with something else before it is read
    EARLY = "early"  # the copy is reported before it is done


_DIRECTIONS = tuple(direction.value for direction in Direction)
_SPOILS = tuple(each.value for each in Spoil)
_SPOILED = {Spoil.FLIP: (Direction.STORE,), Spoil.REUSE: (Direction.LOAD,), Spoil.EARLY: tuple(Direction)}


@dataclass(frozen=True, slots=True)
class InjectedFaults:
    fail_chance: float = 0.0
    """Part of the transfers that fail. They leave garbage where they should have written: who ignores the failure
    is found out."""
    spoil: Literal["flip", "reuse", "early"] | None = None
    """Those transfers do not fail but go wrong in silence, for checksums to notice. `"flip"`: a bit of a stored
    slot flips. `"reuse"`: a slot is filled with something else before it is loaded. `"early"`, on GPUs: a copy is
    reported before it is done."""
    only: Literal["load", "store"] | None = None
    """`"load"` or `"store"`: only transfers in this direction are touched, and counted by `kill_nth`."""
    delay_polls: int = 0
    """Reports are held back for so many polls, one a step. The bytes are not."""
    kill_nth: tuple[int, ...] = ()
    """The copying thread dies when it takes the transfers with these numbers, counted from 1, as in `[2, 7]`. It
    leaves garbage."""
    ranks: tuple[int, ...] | None = None
    """Only these ranks are touched, as in `[1]`."""
    seed: int = 0
    """Equal seeds give a rank equal faults for equal transfers; ranks differ."""

    def __post_init__(self) -> None:
        chance = self.fail_chance
        if isinstance(chance, bool) or not isinstance(chance, int | float) or not 0 <= chance <= 1:
            raise ConfigError("fail_chance", chance, "a number from 0 to 1")
        if self.spoil is not None and self.spoil not in _SPOILS:
            raise ConfigError("spoil", self.spoil, f"one of {', '.join(_SPOILS)}, or nothing")
        if self.only is not None and self.only not in _DIRECTIONS:
            raise ConfigError("only", self.only, f"one of {', '.join(_DIRECTIONS)}, or nothing for both")
        if not is_whole(self.delay_polls) or self.delay_polls < 0:
            raise ConfigError("delay_polls", self.delay_polls, "a whole number, at least 0")
        if not _are_whole(self.kill_nth, at_least=1):
            raise ConfigError("kill_nth", self.kill_nth, "a list of whole numbers, each at least 1")
        if self.ranks is not None and not _are_whole(self.ranks, at_least=0):
            raise ConfigError("ranks", self.ranks, "a list of whole numbers, each at least 0, or nothing for all")
        if not is_whole(self.seed):
            raise ConfigError("seed", self.seed, "a whole number")

    @classmethod
    def parse(cls, settings: Mapping[str, Any], where: str) -> InjectedFaults:
        """Build from plain data such as JSON; unknown keys raise and name the nearest right one."""
        if not isinstance(settings, Mapping):
            raise ConfigError(where, settings, "settings by name")
        known = [each.name for each in fields(cls)]
        for key in settings:
            if key not in known:
                raise UnknownKeyError(str(key), known, where)
        values: dict[str, Any] = dict(settings)
        for key, value in settings.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        return cls(**values)

    def concerns(self, rank: Rank) -> bool:
        """Whether anything at all can happen to a copier of this rank."""
        return self != InjectedFaults(only=self.only, ranks=self.ranks, seed=self.seed) and (
            self.ranks is None or rank in self.ranks
        )


class Fate(NamedTuple):
    """What will happen to one order."""

    fails: bool = False
    kills: bool = False
    delay_polls: int = 0
    spoils: Spoil | None = None


class Fates:
    """The fates of a rank's orders, drawn as they are submitted: when a thread takes them, nobody can foretell."""

    def __init__(self, faults: InjectedFaults, rank: Rank) -> None:
        self._faults = faults
        self._concerned = faults.concerns(rank)
        self._rng = Random(f"{faults.seed} of rank {rank}")
        self._submitted = 0

    def draw(self, direction: Direction) -> Fate:
        faults = self._faults
        if not self._concerned or faults.only not in (None, direction.value):
            return Fate()
        self._submitted += 1
        drawn = self._rng.random() < faults.fail_chance
        spoil = None if faults.spoil is None else Spoil(faults.spoil)
        return Fate(
            fails=drawn and spoil is None,
            spoils=spoil if drawn and spoil is not None and direction in _SPOILED[spoil] else None,
            kills=self._submitted in faults.kill_nth,
            delay_polls=faults.delay_polls,
        )


def _are_whole(values: object, at_least: int) -> bool:
    return isinstance(values, tuple) and all(is_whole(each) and each >= at_least for each in values)
