"""JSON that people write by hand, and paths in it: what cannot be used is found out while it is read."""

from __future__ import annotations

import json
import os
from os.path import isabs
from pathlib import Path
from typing import Any, TextIO

_MOST_CHARACTERS = 4 << 20
_DEEPEST = 100  # no setting has more than a few; far deeper ones cannot even be shown


def read_all(file: TextIO) -> str:
    """What a file of settings holds. Raises ValueError for what cannot be one: a device, or a log, may not end."""
    text = file.read(_MOST_CHARACTERS + 1)
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"more than {_MOST_CHARACTERS:,} characters")
    return text


def read_json(path: Path) -> Any:
    """Raises OSError and ValueError."""
    with path.open() as file:
        return parse_json(read_all(file))


def parse_json(text: str) -> Any:
    """Raises ValueError, also for what is nested so deeply that Python gives up."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    layer = [value]
    for _ in range(_DEEPEST):
        layer = [inner for each in layer for inner in _inside(each)]
        if not layer:
            return value
    raise ValueError(f"nested more than {_DEEPEST} deep")


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def is_absolute_path(value: object) -> bool:
    """Whether the system could have a file of this name: text, absolute, and no NUL or half a character in it."""
    if not isinstance(value, str) or not isabs(value) or "\0" in value:
        return False
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return True
