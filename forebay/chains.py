"""Chains: which keys on the host build on which.

A prompt is a chain of keys, each of which builds on the one before it. Chains share heads, so they are a tree, in
runs: stretches without a branch. While a key is on the host, what it builds on must not go, or it could never be
hit: so keys leave at the ends.

    [ a b c ] ──┬── [ d e f ]        ends: f and h; c has two branches
                └── [ g h ]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from forebay.errors import ensure
from forebay.ids import Key, Slot

_MANY_RUNS = 256  # by then, to look up every key is as quick


class Run:
    """A stretch of a chain: every key builds on the one before it, the first on `above`. Keys come and go at its
    end."""

    __slots__ = ("above", "keys")

    def __init__(self, keys: list[Key], above: Key | None) -> None:
        self.keys = keys
        self.above = above


class Chains:
    def __init__(self, slots: Mapping[Key, Slot]) -> None:
        """`slots`: of every key that is on the host. It is the pool's own, and changes."""
        self._slots = slots
        self._runs: list[Run | None] = []  # by slot, up to the first that was never used
        self._branches: dict[Key, list[Run]] = {}  # key -> runs that begin on it

    @property
    def num_slots(self) -> int:
        """Slots that were ever used: 0 to num_slots - 1."""
        return len(self._runs)

    def add(self, keys: Sequence[Key], slots: Sequence[Slot], *, chained: bool, above: Key | None) -> None:
        """These keys are about to get these slots: some that were used before, then the next ones that were not.
        If they are `chained`, each builds on the one before and the first on `above`."""
        run = self._extended_run(keys, above) if chained else None
        fresh = max(0, slots[-1] + 1 - len(self._runs)) if slots else 0
        self._runs += [run] * fresh
        for slot in slots[: len(slots) - fresh]:
            self._runs[slot] = run

    def _extended_run(self, keys: Sequence[Key], above: Key | None) -> Run:
        """The run that ends on `above`, longer by these keys, or a new one."""
        slot = self._slots.get(above) if above is not None else None
        run = self._runs[slot] if slot is not None else None
        if run is not None and run.keys[-1] == above and above not in self._branches:
            run.keys += keys
            return run
        run = Run(list(keys), above)
        self._begin_branch(run)
        return run

    def hold(self, head: Key, key: Key) -> bool:
        """Whether the chain of this key is on the host, from the head of its prompt on: all of a run is there, and
        it says what it builds on. False also if nobody can say, or it is in too many runs to be quick."""
        for _ in range(_MANY_RUNS):
            slot = self._slots.get(key)
            run = self._runs[slot] if slot is not None else None
            if run is None:
                return False
            if run.above is None:  # it begins there, or what is above it was not known
                return run.keys[0] == head
            key = run.above
        return False

    # --- ends --------------------------------------------------------------------------------------

    def tail(self, key: Key) -> Key:
        """The end of a chain that builds on this key: the key itself, if nothing does."""
        run = self._runs[self._slots[key]]
        while True:
            if run is not None:
                key = run.keys[-1]
            if key not in self._branches:
                return key
            run = self._branches[key][-1]

    def leave(self, key: Key) -> Key | None:
        """This end of a chain goes; returns the key it was built on."""
        run = self._runs[self._slots[key]]
        if run is None:
            return None
        run.keys.pop()
        if run.keys:
            return run.keys[-1]
        self._end_branch(run)
        return run.above

    def length_to(self, key: Key) -> int:
        """How long the run is that this key is the end of; 0 if it is not the end of one."""
        run = self._runs[self._slots[key]]
        return len(run.keys) if run is not None and run.keys[-1] == key else 0

    def num_ends(self, keys: Sequence[Key]) -> int:
        """How many of these may go in this order, each the end of one and the same run when its turn comes. The
        first one is, and they are not more than the run has."""
        run = self._runs[self._slots[keys[0]]]
        ends = run.keys[: -len(keys) - 1 : -1] if run is not None else []
        if ends != keys:  # also if one is a tuple
            ends = [end for end, _ in _equal_pairs(ends, keys)]
        if self._branches.keys().isdisjoint(ends):
            return len(ends)
        return next(i for i, key in enumerate(ends) if key in self._branches)

    def leave_together(self, key: Key, count: int) -> None:
        """This end of a run goes, and `count` - 1 keys before it."""
        run = self._runs[self._slots[key]]
        if run is not None:
            del run.keys[-count:]
            if not run.keys:
                self._end_branch(run)

    # --- gone for other reasons ----------------------------------------------------------------------

    def remove(self, gone: Sequence[tuple[Key, Slot]]) -> None:
        """Keys go, wherever in a run they are: what is left of a run behind one of them becomes a run of its own,
        which still builds on the key that went."""
        by_run: dict[Run, set[Key]] = {}
        for key, slot in gone:
            run = self._runs[slot]
            if run is not None:
                by_run.setdefault(run, set()).add(key)
        for run, lost in by_run.items():
            self._end_branch(run)
            piece = Run([], run.above)
            for key in run.keys:
                if key in lost:
                    piece = Run([], key)
                    continue
                if not piece.keys:
                    self._begin_branch(piece)
                piece.keys.append(key)
                self._runs[self._slots[key]] = piece
        for _, slot in gone:
            self._runs[slot] = None

    def clear(self) -> None:
        self._branches.clear()
        self._runs = [None] * len(self._runs)

    def _begin_branch(self, run: Run) -> None:
        if run.above is not None:
            self._branches.setdefault(run.above, []).append(run)

    def _end_branch(self, run: Run) -> None:
        if run.above is not None:
            siblings = self._branches[run.above]
            siblings.remove(run)
            if not siblings:
                del self._branches[run.above]

    # --- proof -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise InvariantError unless the runs are those of the keys that are there."""
        runs = {self._runs[slot] for slot in self._slots.values()} - {None}
        for run in runs:
            if run is not None:
                there = [self._runs[self._slots[key]] is run for key in run.keys if key in self._slots]
                ensure(all(there) and len(there) == len(run.keys) > 0, "a run names keys that left it")
        in_runs = sum(len(run.keys) for run in runs if run is not None)
        chained = sum(self._runs[slot] is not None for slot in self._slots.values())
        ensure(in_runs == chained, "a key is missing from its run")
        above = Counter((run.above, run) for run in runs if run is not None and run.above is not None)
        known = Counter((key, run) for key, siblings in self._branches.items() for run in siblings)
        ensure(above == known, "branches are booked wrong")


def _equal_pairs(a: Iterable[Key], b: Iterable[Key]) -> Iterable[tuple[Key, Key]]:
    return takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))
