"""Traces made up on the spot, and caches of prefixes in the plainest way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from forebay.plan.request import TraceRequest

Path = tuple[int, ...]


@dataclass
class ListTrace:
    """A trace in memory."""

    requests: Sequence[TraceRequest]
    block_tokens: int = 4
    name: str = "made up"
    num_bytes: int | None = None
    bytes_read: int = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @classmethod
    def of(cls, paths: Iterable[Path], block_tokens: int = 4) -> ListTrace:
        """Every request ends with a full block and one token more."""
        return cls(
            [TraceRequest(float(i), len(path) * block_tokens, 1, path) for i, path in enumerate(paths)],
            block_tokens,
        )


def grow_paths(steps: Iterable[tuple[int, int, int]]) -> list[Path]:
    """Each request goes back to an earlier one, keeps a part of its path and goes on with blocks of its own."""
    paths: list[Path] = []
    fresh = 0
    for back, kept, new in steps:
        before = paths[-1 - back % len(paths)] if paths else ()
        path = before[: kept % (len(before) + 1)] + tuple(range(fresh, fresh + new))
        fresh += new
        if path:
            paths.append(path)
    return paths


def path_lists(max_requests: int = 40, max_new: int = 6) -> st.SearchStrategy[list[Path]]:
    step = st.tuples(st.integers(0, 12), st.integers(0, 30), st.integers(0, max_new))
    return st.lists(step, min_size=1, max_size=max_requests).map(grow_paths)


def random_paths(seed: int, requests: int, max_new: int = 8, reach: int = 50) -> list[Path]:
    rng = Random(seed)
    return grow_paths((rng.randrange(reach), rng.randrange(40), rng.randrange(max_new)) for _ in range(requests))


class PlainStack:
    """Batches of blocks, the newest last."""

    def __init__(self) -> None:
        self.batches: list[set[int]] = []

    def use(self, path: Path) -> list[tuple[int, int, int, int]]:
        runs: dict[int, tuple[int, int, int, int]] = {}
        for block in path:
            for turn, batch in enumerate(self.batches):
                if block in batch:
                    newer = sum(map(len, self.batches[turn + 1 :]))
                    count = runs[turn][3] if turn in runs else 0
                    runs[turn] = (turn, newer, len(batch), count + 1)
        for batch in self.batches:
            batch.difference_update(path)
        self.batches.append(set(path))
        return list(runs.values())


def leading_hits(path: Path, cache: OrderedDict[int, None] | set[int]) -> int:
    return next((i for i, block in enumerate(path) if block not in cache), len(path))


def lru_hits(paths: Iterable[Path], size: int) -> int:
    """Blocks found by a cache that evicts the least recently used one whenever there is one too many."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for path in paths:
        hits += leading_hits(path, cache)
        for block in path:
            cache[block] = None
            cache.move_to_end(block)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits


def most_hits(paths: Sequence[Path], size: int) -> int:
    """Blocks found if, of what a request has and the cache had, those stay that are used again first."""
    cache: set[int] = set()
    hits = 0
    for now, path in enumerate(paths):
        hits += leading_hits(path, cache)
        later = {
            block: next((t for t, other in enumerate(paths[now + 1 :]) if block in other), len(paths))
            for block in cache.union(path)
        }
        depth = {block: i for other in paths for i, block in enumerate(other)}
        cache = set(sorted(later, key=lambda block: (later[block], depth[block]))[:size])
    return hits


def hits_of_any_cache(paths: Iterable[Path], size: int, rng: Random) -> int:
    """Blocks found by a cache that keeps what it likes."""
    cache: set[int] = set()
    hits = 0
    for path in paths:
        hits += leading_hits(path, cache)
        both = sorted(cache.union(path))
        cache = set(rng.sample(both, min(size, len(both))))
    return hits
