"""Kinds of arguments, and what is said about wrong ones."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

_MOST_DIGITS = 30
_MOST = 1e30  # what is computed with it must not become infinite
_SHARE = re.compile(r"(\d+(?:\.\d+)?)\s*(%?)")


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if len(text) > _MOST_DIGITS:
            raise argparse.ArgumentTypeError(f"expected at most {_MOST_DIGITS} digits, got {len(text):,}")
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number, at least {least}, got {text!r}")
        return int(text)

    return parse


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST:
        most = f" and at most {_MOST:g}" if value > _MOST else ""
        raise argparse.ArgumentTypeError(f"expected a number above 0{most}, got {text!r}")
    return value


def between(least: float, most: float, unit: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"expected {least:g} to {most:g} {unit}, got {text!r}")
        return value

    return parse


def share(text: str) -> float:
    """`0.3` or `30%`."""
    match = _SHARE.fullmatch(text.strip())
    value = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share such as 30% or 0.3, got {text!r}")
    return value
