"""How many different blocks a trace has, in 64 KiB."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import inf, log

_INDEX_BITS = 16
_REST_BITS = 64 - _INDEX_BITS
_REST = (1 << _REST_BITS) - 1


class DistinctCount:
    """HyperLogLog, within 0.4 % mostly, of hashes that are spread evenly over 64 bits. Flajolet et al., 2007; with
    the estimate of Ertl, "New cardinality estimation algorithms for HyperLogLog sketches", 2017, which has no
    range in which it is biased."""

    def __init__(self) -> None:
        self._highest = bytearray(1 << _INDEX_BITS)  # of the hashes that begin alike: one more than leading zeros

    def add(self, hashes: Iterable[int]) -> None:
        highest = self._highest
        for each in hashes:
            rank = _REST_BITS + 1 - (each & _REST).bit_length()
            index = each >> _REST_BITS
            if rank > highest[index]:
                highest[index] = rank

    def estimate(self) -> float:
        size, ranks = len(self._highest), Counter(self._highest)
        weight = 0.0
        for rank in range(_REST_BITS, 0, -1):
            weight = (weight + ranks[rank]) / 2
        weight += size * _untouched(ranks[0] / size)
        return size**2 / (2 * log(2) * weight)


def _untouched(share: float) -> float:
    """What registers weigh that no hash has come to."""
    if share == 1:
        return inf
    weight, before, times = share, -1.0, 1
    while weight != before:
        share *= share
        before, weight, times = weight, weight + share * times, 2 * times
    return weight
