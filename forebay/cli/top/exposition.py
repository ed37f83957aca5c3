"""Prometheus' text format, read line by line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|(?=\}))')
_CLOSE = re.compile(r"[ \t]*\}")
_VALUE = re.compile(r"[ \t]*([^ \t_]+)")  # without `_`, which Python takes in a number and Prometheus does not
# What may follow a value: a time in milliseconds, and an exemplar. Neither is of use here.
_REST = re.compile(r"([ \t]+-?[0-9.]+)?([ \t]+#.*)?[ \t]*")
_ESCAPED = re.compile(r"\\(.)")
_LONGEST_SHOWN = 60


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class ExpositionError(ValueError):
    """This is not the text format."""

    def __init__(self, number: int, line: str) -> None:
        shown = line if len(line) <= _LONGEST_SHOWN else f"{line[:_LONGEST_SHOWN]}..."
        super().__init__(f"line {number}: expected a name, labels and a number, got {shown!r}")


def samples(text: str) -> Iterator[Sample]:
    """In their order. Raises ExpositionError on the first line that is none."""
    # Not splitlines(): a label may contain what Python also takes for the end of a line.
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.strip(" \t\r")
        if stripped and not stripped.startswith("#"):
            sample = _sample(stripped)
            if sample is None:
                raise ExpositionError(number, stripped)
            yield sample


def _sample(line: str) -> Sample | None:
    name = _NAME.match(line)
    if name is None:
        return None
    labels: dict[str, str] = {}
    end = name.end()
    if line.startswith("{", end):
        end += 1
        while label := _LABEL.match(line, end):
            labels[label[1]] = _ESCAPED.sub(_unescaped, label[2])
            end = label.end()
        closed = _CLOSE.match(line, end)
        if closed is None:
            return None
        end = closed.end()
    elif not line.startswith((" ", "\t"), end):
        return None
    value = _VALUE.match(line, end)
    if value is None or not _REST.fullmatch(line, value.end()):
        return None
    try:
        return Sample(name[0], labels, float(value[1]))
    except ValueError:
        return None


def _unescaped(escape: re.Match[str]) -> str:
    return {"n": "\n", '"': '"', "\\": "\\"}.get(escape[1], escape[0])
