"""A multiset for batches in which nearly every item is held once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from forebay.errors import ensure

T = TypeVar("T", bound=Hashable)


class Tally(Generic[T]):
    """Counts holds. A whole batch is added or dropped with set operations, not one item at a time;
    only items that are held more than once cost a Python step each."""

    __slots__ = ("_extra", "_held")

    def __init__(self) -> None:
        self._held: set[T] = set()  # held at least once
        self._extra: dict[T, int] = {}  # holds beyond the first

    def __contains__(self, item: object) -> bool:
        return item in self._held

    def __len__(self) -> int:
        """How many different items are held."""
        return len(self._held)

    def isdisjoint(self, items: Iterable[T]) -> bool:
        return self._held.isdisjoint(items)

    def add(self, items: Collection[T]) -> None:
        """One more hold for each item of the batch, which must not name an item twice."""
        held = self._held
        if held.isdisjoint(items):
            before = len(held)
            held.update(items)
            ensure(len(held) == before + len(items), "one batch names an item twice")
            return
        extra = self._extra
        ensure(len(set(items)) == len(items), "one batch names an item twice")
        for item in items:
            if item in held:
                extra[item] = extra.get(item, 0) + 1
            else:
                held.add(item)

    def drop(self, items: Sequence[T]) -> Sequence[T]:
        """One hold less for each item; returns those that nobody holds any more."""
        held, extra = self._held, self._extra
        ensure(held.issuperset(items), "an item was dropped that nobody holds")
        if not extra or extra.keys().isdisjoint(items):
            before = len(held)
            held.difference_update(items)
            ensure(len(held) == before - len(items), "one batch names an item twice")
            return items
        ensure(len(set(items)) == len(items), "one batch names an item twice")
        gone = []
        for item in items:
            left = extra.get(item)
            if left is None:
                held.remove(item)
                gone.append(item)
            elif left == 1:
                del extra[item]
            else:
                extra[item] = left - 1
        return gone

    def clear(self) -> None:
        self._held.clear()
        self._extra.clear()

    def counts(self) -> Counter[T]:
        """Holds by item, for check()."""
        counts = Counter(self._held)
        counts.update(self._extra)
        return counts
