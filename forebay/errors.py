"""Everything Forebay raises.

    ForebayError
    ├── ConfigError            a setting is wrong; the line names it, its value and what is allowed
    │   ├── UnknownKeyError    a key nobody knows; names the nearest one that exists
    │   ├── CapacityError      the memory asked for does not hold a single block
    │   ├── PolicyError        no such eviction policy, or it is not one
    │   └── LayoutError        groups, block sizes or KV memory that do not fit together
    ├── TraceError             a trace that cannot be read; the line names the file, its line and what was expected
    ├── LostLoadError          a load failed where the engine cannot compute instead; going on would be wrong
    ├── TransitionError        a transfer was asked to make a move its state machine does not have
    └── InvariantError         check() found the books wrong; always a bug in Forebay or in an adapter

Configuration errors are for people and are raised before anything expensive starts. The last two are for
developers: in a running server they mean that continuing could serve wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from os import PathLike, fspath
from typing import TypeGuard


class ForebayError(Exception):
    """Base of everything raised here."""


class ConfigError(ForebayError, ValueError):
    """A setting has a value that cannot be used."""

    def __init__(self, setting: str, value: object, allowed: str) -> None:
        super().__init__(f"{setting}: expected {allowed}, got {value!r}")
        self.setting = setting
        self.value = value
        self.allowed = allowed


class UnknownKeyError(ConfigError):
    """A key that no setting has."""

    def __init__(self, key: str, known: Iterable[str], where: str) -> None:
        known = sorted(known)
        near = get_close_matches(key, known, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        ForebayError.__init__(self, f"{where}: unknown key {key!r}{hint} (known keys: {', '.join(known)})")
        self.setting = where
        self.value = key
        self.allowed = f"one of {', '.join(known)}"
        self.nearest: str | None = near[0] if near else None


class CapacityError(ConfigError):
    """The host memory asked for is smaller than one block."""


class PolicyError(ConfigError):
    """An eviction policy that does not exist or does not fulfil the contract."""


class LayoutError(ConfigError):
    """Groups whose sizes do not fit together, or memory in which blocks cannot be told apart."""


class TraceError(ForebayError, ValueError):
    """A file of requests, or a line of one, that is not what a trace has to be."""

    def __init__(self, path: str | PathLike[str], line: int | None, expected: str, got: str) -> None:
        where = fspath(path) if line is None else f"{fspath(path)}:{line}"
        super().__init__(f"{where}: expected {expected}, got {got}")
        self.path = fspath(path)
        self.line = line
        self.expected = expected
        self.got = got


class LostLoadError(ForebayError):
    """A load failed for good on an engine that cannot take it back."""


class TransitionError(ForebayError):
    """A transfer was asked for a move that its state machine does not allow."""


class InvariantError(ForebayError, AssertionError):
    """The books do not agree with each other."""


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a setting is a whole number. True and False are not, whatever Python thinks."""
    return isinstance(value, int) and not isinstance(value, bool)


def ensure(condition: bool, what: str) -> None:
    """Raise InvariantError(what) unless the condition holds. Unlike assert, it survives `python -O`."""
    if not condition:
        raise InvariantError(what)
