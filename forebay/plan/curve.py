"""Miss-ratio curves: what a cache of any size would have found, from one reading of the trace.

The cache holds blocks and nothing else is modelled: no device in front of it, no copies. A request finds the
longest leading run of its prefixes that the cache has (what lies behind a missing block is no hit) and then uses
all of its blocks, in the order of the prompt. Of C blocks the least recently used go; or those that the best
possible cache would do without.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from forebay.errors import ConfigError, is_whole
from forebay.plan.best import BestCache
from forebay.plan.distinct import DistinctCount
from forebay.plan.request import Trace
from forebay.plan.results import Curve
from forebay.reuse import HASH_RANGE, ReuseStack, Run

MAX_BLOCKS = 1_000_000
"""Different blocks up to which curves are exact: about 100 MB. Of a trace with more it is a sample, in 300 MB."""

SIZES = sorted({round(2 ** (half / 2)) for half in range(4, 49)})
"""Two for each doubling, from 4 blocks to 16 million."""

_EVERY_REQUESTS = 256  # that progress is told
_DIGITS = 10  # binary ones, of a size that is an estimate


@dataclass(frozen=True, slots=True)
class Curves:
    lru: Curve
    best: Curve
    requests: int


def read_curves(
    trace: Trace,
    sizes: Iterable[int] = (),
    *,
    max_blocks: int = MAX_BLOCKS,
    rate: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Curves:
    """Both curves at these sizes, in blocks of the trace, and at a grid of others up to where the first is flat;
    that of the first is finer.

    Memory does not grow with the trace: it is read once, and beyond `max_blocks` different blocks, or with a
    `rate` below 1 from the start, only a sample of them is looked at; the curves say so. `seed` draws another
    sample. `progress` is told requests and bytes, now and then.
    """
    asked = sorted(set(sizes))
    for size in asked:
        if not is_whole(size) or size < 1:
            raise ConfigError("sizes", size, "whole numbers of at least 1 block")
    if not is_whole(max_blocks) or max_blocks < 1:
        raise ConfigError("max_blocks", max_blocks, "a whole number of at least 1")
    if not 0 < rate <= 1:
        raise ConfigError("rate", rate, "more than 0 and at most 1")
    stack, reading = ReuseStack(max_blocks, rate), _Reading()
    best = {size: BestCache(size) for size in sorted({*asked, *SIZES})}
    requests = 0
    for requests, request in enumerate(trace, 1):
        path = prefix_path(request.prefixes, seed)
        runs = stack.use(path)
        reading.add(path, runs)
        if runs:
            for cache in best.values():
                cache.use(runs, requests - 1)
        if requests % _EVERY_REQUESTS == 0:
            for cache in best.values():
                cache.simplify(stack.turns)
            if progress is not None:
                progress(requests, trace.bytes_read)
    if progress is not None:
        progress(requests, trace.bytes_read)
    return Curves(*_curves(reading.close(stack.rate), best, asked, stack.rate), requests)


def prefix_path(prefixes: Sequence[int], seed: int = 0) -> list[int]:
    """The same prefixes as hashes, evenly spread below HASH_RANGE. Each is made from the one before it: ids that
    name only the content of a block, in other traces than ours, become prefixes by that."""
    mask = HASH_RANGE - 1
    return [each & mask for each in accumulate(prefixes, _hash_next, initial=seed)][1:]


def _hash_next(above: int, prefix: int) -> int:
    return hash((above, prefix))  # of numbers, so the same in every process


class _Reading:
    """What all requests found, by the size of a cache that would just have had it."""

    def __init__(self) -> None:
        self.blocks = 0
        self._known: dict[int, float] = {}
        self._sampled: dict[int, float] = {}
        self._distinct = DistinctCount()

    def add(self, path: Sequence[int], runs: Iterable[Run]) -> None:
        self.blocks += len(path)
        seen_for_sure = 0
        for run in runs:
            # Used head first, a batch also leaves head first, and is of no use from then on: there has to be room
            # for all that is left of it.
            size = round(run.newer + run.left)
            if run.known:
                self._known[size] = self._known.get(size, 0) + run.blocks
                seen_for_sure += int(run.blocks)
            else:
                size = _rounded(size)
                self._sampled[size] = self._sampled.get(size, 0) + run.blocks
        self._distinct.add(path[seen_for_sure:])

    def close(self, rate: float) -> Found:
        """All is read."""
        known, sampled = sum(self._known.values()), sum(self._sampled.values())
        distinct = self.blocks - known
        if rate < 1:
            # Every block but a new one was used before. How many are new is known better than from the sample,
            # and so is how much the hits in the sample stand for.
            distinct = min(distinct, self._distinct.estimate())
        scale = (self.blocks - known - distinct) / sampled if sampled else 0.0
        by_size: dict[int, float] = dict(self._known)
        for size, blocks in self._sampled.items():
            by_size[size] = by_size.get(size, 0) + blocks * scale
        sizes = sorted(by_size)
        return Found(self.blocks, round(distinct), scale, sizes, list(accumulate(map(by_size.__getitem__, sizes))))


@dataclass(frozen=True, slots=True)
class Found:
    blocks: int
    distinct: int
    scale: float
    """What a block of the sample stands for, more than the sample says itself."""
    sizes: Sequence[int]
    hits: Sequence[float]
    """That a cache of each of these sizes has, and any up to the next."""

    def hits_at(self, size: int) -> float:
        at = bisect_right(self.sizes, size)
        return self.hits[at - 1] if at else 0

    def share(self, hits: float) -> float:
        return hits / self.blocks if self.blocks else 0.0


def _rounded(size: int) -> int:
    """Estimates are kept with a few digits: so there is an end to how many different ones there are."""
    beyond = max(0, size.bit_length() - _DIGITS)
    return (size >> beyond) << beyond


def _curves(found: Found, best: Mapping[int, BestCache], asked: Sequence[int], rate: float) -> tuple[Curve, Curve]:
    flat_from = found.sizes[-1] if found.sizes else 1
    grid = [size for size in SIZES if size < flat_from]
    sizes = sorted({*asked, *grid, *SIZES[len(grid) : len(grid) + 1]})
    fine = sorted({*sizes, *_fine(sizes[-1])})  # the first curve is known at every size
    lru = [found.hits_at(size) for size in sizes]
    bound = [best[size].known_hits + best[size].sampled_hits * found.scale for size in sizes]
    if rate < 1:
        bound = list(map(max, lru, bound))  # so it is, but two estimates need not know
    unbounded = found.share(found.hits[-1] if found.hits else 0)

    def curve(name: str, at: Sequence[int], hits: Iterable[float]) -> Curve:
        shares = list(map(found.share, hits))
        return Curve(name, at, shares, rate, unbounded, found.blocks, found.distinct)

    return curve("lru", fine, map(found.hits_at, fine)), curve("best possible", sizes, bound)


def _fine(last: int) -> Iterable[int]:
    """Sizes up to the last, each about two percent larger than the one before."""
    size = 1
    while size < last:
        yield size
        size += max(1, size // 50)
