"""Which answers differ, and whether rounding explains it.

Batches of another shape round differently, and where two tokens are almost equally likely the other one may then
be said, whatever the cache does. So the first token that differs is looked at: how much likelier was the one that
was said without offload? Above a limit the choice was clear, and the answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Answers = Mapping[str, Mapping[str, Any]]
"""By the question's name: "tokens", and where they were asked for "chances", each token's likeliest by token."""


@dataclass(frozen=True)
class Difference:
    name: str
    position: int
    gap: float
    """By how much the token of the reference was likelier, in log-probability."""


def differences(reference: Answers, other: Answers) -> list[Difference]:
    """Only of questions that both have answered. The reference has chances."""
    found = []
    for name, mine in reference.items():
        if name not in other:
            continue
        ours, theirs = mine["tokens"], other[name]["tokens"]
        for position, (token, another) in enumerate(zip(ours, theirs, strict=False)):
            if token != another:
                found.append(Difference(name, position, _gap(mine["chances"][position], token, another)))
                break
        else:
            if len(ours) != len(theirs):
                found.append(Difference(name, min(len(ours), len(theirs)), float("inf")))
    return found


def clear_limit(between_references: Iterable[Difference], floor: float) -> float:
    """Two runs without offload differ by rounding alone; twice the widest gap that this ever bridged is clear."""
    return max([floor, *(2 * each.gap for each in between_references if each.gap != float("inf"))])


def wrong(found: Iterable[Difference], limit: float) -> list[Difference]:
    return [each for each in found if each.gap > limit]


def _gap(chances: Mapping[str, float], token: int, another: int) -> float:
    """A token that is not among the likeliest is at most as likely as the last of them."""
    last = min(chances.values())
    return chances.get(str(token), last) - chances.get(str(another), last)
