"""Small builders for tests of the pool and its policies: keys from small numbers, blocks stored at once."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import Protocol

from forebay.ids import Key, Slot, hash_of, make_key
from forebay.policies import Policy, policy_class
from forebay.pool import HostPool


class NewestFirst(Policy):
    """Evicts what came last and ignores hits: the order that spoils chains most, heads before their tails."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def insert(self, keys: Iterable[Key]) -> None:
        for each in keys:
            self._order[each] = None
            self._order.move_to_end(each, last=False)

    def touch(self, keys: Iterable[Key]) -> None:
        pass

    def candidates(self, count: int) -> list[Key]:
        return list(islice(self._order, count))

    def evict(self, keys: Sequence[Key]) -> None:
        for each in keys:
            del self._order[each]

    def remove(self, keys: Sequence[Key]) -> None:
        self.evict(keys)

    def postpone(self, keys: Sequence[Key]) -> None:
        for each in keys:
            self._order.move_to_end(each)

    def clear(self) -> None:
        self._order.clear()

    def keys(self) -> Collection[Key]:
        return list(self._order)


CUSTOM = f"{__name__}:NewestFirst"  # as a user would name it in `eviction_policy`
POLICY_NAMES = ("lru", "s3fifo", "arc", CUSTOM)


def key(number: int) -> Key:
    return make_key(number.to_bytes(4, "big"), 0)


def keys(*wanted: int) -> list[Key]:
    return [key(number) for number in wanted]


def numbers(some_keys: Iterable[Key]) -> list[int]:
    """The numbers that keys were built from, in the order given."""
    return [int.from_bytes(hash_of(each), "big") for each in some_keys]


def make_policy(name: str, capacity: int) -> Policy:
    return policy_class(name)(capacity)


def make_pool(name: str, slots: int) -> HostPool:
    return HostPool(slots, make_policy(name, slots))


def chain_parents(chain: Sequence[Key], above: Key | None = None) -> list[Key | None]:
    """What each key of a chain builds on; `above` is what the first one builds on."""
    return [above, *chain[:-1]]


def cache(pool: HostPool, wanted: Sequence[Key], parents: Sequence[Key | None] | None = None) -> list[Slot]:
    """Reserve, commit and unpin at once. There must be room."""
    slots = pool.reserve(wanted, parents)
    pool.commit(wanted, slots)
    pool.unpin(slots)
    return slots


def cached_numbers(pool: HostPool) -> list[int]:
    return sorted(numbers(pool.index))


def evict_one(pool: HostPool) -> int:
    """Make room for exactly one more block and say which key had to go for it."""
    pool.take_removed()
    pool.make_room(pool.free + 1)
    (gone,) = numbers(pool.take_removed())
    return gone


def check_idle(pool: HostPool) -> None:
    """The books are right, and no copy is running."""
    pool.check(Counter(), {})


class Cache(Protocol):
    """A cache of one-block entries, as papers describe one."""

    def access(self, number: int) -> bool:
        """Whether it was a hit. A miss caches the entry."""


class PoolCache:
    """A whole HostPool, used one block at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.pool = make_pool(name, capacity)

    def access(self, number: int) -> bool:
        wanted = keys(number)
        if wanted[0] in self.pool:
            self.pool.touch(wanted)
            return True
        assert self.pool.make_room(1) == 1
        cache(self.pool, wanted)
        return False


class PolicyCache:
    """A policy without a pool around it, asked for one victim at a time."""

    def __init__(self, name: str, capacity: int) -> None:
        self.policy = make_policy(name, capacity)

    def access(self, number: int) -> bool:
        wanted = keys(number)
        held = self.policy.keys()
        if wanted[0] in held:
            self.policy.touch(wanted)
            return True
        if len(held) == self.policy.capacity:
            self.policy.evict(self.policy.candidates(1))
        self.policy.insert(wanted)
        return False


def hits(tested: Cache, trace: Iterable[int]) -> int:
    return sum(tested.access(number) for number in trace)


def first_difference(tested: Cache, reference: Cache, trace: Iterable[int]) -> int | None:
    """The first access that only one of them hits."""
    for position, number in enumerate(trace):
        if tested.access(number) != reference.access(number):
            return position
    return None


def random_traces(seeds: int, different: int, accesses: int) -> list[list[int]]:
    """Uniform accesses to so few keys that every queue and every memory of a small cache is used."""
    return [random.Random(seed).choices(range(different), k=accesses) for seed in range(seeds)]


def popular_and_scans(seed: int = 7, accesses: int = 6_000) -> list[int]:
    """Popular keys drawn by rank (Zipf), with a scan of keys that never come back after every fifth part."""
    rng = random.Random(seed)
    popular = range(400)
    weights = [1 / (rank + 1) ** 0.9 for rank in popular]
    trace: list[int] = []
    for part in range(5):
        trace += rng.choices(popular, weights, k=accesses // 5)
        trace += range(1_000 + part * 100, 1_100 + part * 100)
    return trace
