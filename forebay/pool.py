"""HostPool: the slots, who holds them, and what they contain.

    free ──reserve──▶ filling ──commit──▶ cached
      ▲                  │                  │ evict: nobody pins it and nothing on the host builds on it
      │                  │                  │
      │◀── copy ended ── │ ◀── forget ──────┤ (while a copy still reads or writes it)
      └─────────────────────────────────────┘

A slot is free, cached (its key can be found) or filling: in the hands of a copy and without a key that anybody can
find, because it is still being written, or because its key was forgotten while a copy was running. Such a slot
becomes free only when that copy has ended, so memory is never reused under it.

Host memory may become usable piece by piece. Slots from 0 on are *ready*, and none beyond them is given out.

Nothing is kept per slot until it is used: a pool of a million slots is a counter. The books are dicts and sets,
kept by the batch; no method loops in Python over blocks that are simply stored, found or unpinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import cast

from forebay.chains import Chains
from forebay.errors import CapacityError, ensure, is_whole
from forebay.ids import Key, Slot
from forebay.policies import Policy
from forebay.tally import Tally

_AT_ONCE = 64  # keys that are looked at together: at first, and again once some of them had to stay
_PUT_OFF = 256  # runs of keys that were hit and that the policy hears of later, at most
_FEW = 16  # fewer than these do not pay for a change between together and one by one


class HostPool:
    def __init__(self, slots: int, policy: Policy, ready: int | None = None) -> None:
        """`ready`: how many of the slots may be used from the start, the others after grow(). None: all."""
        if not is_whole(slots) or slots < 1:
            raise CapacityError("slots", slots, "a whole number of at least 1")
        self._capacity = slots
        self._policy = policy
        self._ready = 0
        self._slots: dict[Key, Slot] = {}  # every key that has a slot, cached or filling
        self._filling: set[Slot] = set()  # slots of keys that are on the way
        self._lost: set[Slot] = set()  # slots whose key was forgotten while a copy uses them
        self._pins: Tally[Slot] = Tally()
        self._unused: list[Slot] = []  # slots that were used before and are free again
        self._chains = Chains(self._slots)
        self._exhausted = False  # the last eviction found too little, and nothing changed since
        self._removed: list[Key] = []
        self._touched: list[Sequence[Key]] = []  # and the policy does not know it yet
        self.evictions = 0
        self.epoch = 0  # changes whenever keys stop being valid for a reason other than eviction
        self.grow(slots if ready is None else ready)

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def ready(self) -> int:
        """Slots that may be used by now: 0 to ready - 1."""
        return self._ready

    @property
    def free(self) -> int:
        return len(self._unused) + self._ready - self._chains.num_slots

    @property
    def filling(self) -> int:
        return len(self._filling) + len(self._lost)

    @property
    def cached(self) -> int:
        return len(self._slots) - len(self._filling)

    @property
    def pinned(self) -> int:
        """Slots that matches and loads hold."""
        return len(self._pins)

    # --- looking -----------------------------------------------------------------------------------

    def __contains__(self, key: Key) -> bool:
        """Whether the key is cached."""
        slot = self._slots.get(key)
        return slot is not None and slot not in self._filling

    def on_the_way(self, key: Key) -> bool:
        """Whether a store of this key is planned or running."""
        return self._slots.get(key) in self._filling

    def index(self) -> dict[Key, Slot]:
        """A copy of all cached keys and their slots, for tests and tools."""
        return {key: slot for key, slot in self._slots.items() if slot not in self._filling}

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[Slot]:
        """Slots that hold keys[start], keys[start + 1], … until the first that is not cached."""
        slots = self._slots
        if start >= stop or keys[start] not in slots:
            return []
        found: list[Slot] = []
        with suppress(KeyError):  # what came before the first miss is in the list
            found.extend(map(slots.__getitem__, keys[start:stop]))
        if self._filling and not self._filling.isdisjoint(found):
            filling = self._filling
            del found[next(i for i, slot in enumerate(found) if slot in filling) :]
        return found

    def missing(self, keys: Sequence[Key], start: int = 0) -> Sequence[int]:
        """Positions, counted from `start`, of the keys that are neither cached nor on the way."""
        slots = self._slots
        if slots.keys().isdisjoint(keys):
            return range(start, start + len(keys))
        if all(map(slots.__contains__, keys)):
            return ()
        return [i for i, key in enumerate(keys, start) if key not in slots]

    def hold(self, head: Key, key: Key) -> bool:
        """Whether nothing of a chain is missing, from the head of a prompt to this key. False also if that cannot
        be told quickly."""
        return self._chains.hold(head, key)

    # --- the life of a slot ------------------------------------------------------------------------

    def make_room(self, count: int, keep: Container[Key] = ()) -> int:
        """Evict until `count` slots are free or nothing more may go; returns how many of them there are.

        Keys in `keep` stay: what is about to be stored builds on them.
        """
        short = count - self.free
        if short > 0 and not self._exhausted:
            self._evict(short, keep)
        return min(count, self.free)

    def reserve(self, keys: Sequence[Key], *, chained: bool, above: Key | None = None) -> list[Slot]:
        """Take a free slot for each key, filling until commit() or forget().

        The keys are new here, and make_room() has said that there is room. If they are `chained`, each builds on
        the one before and the first on `above`: while a key is on the host, what it builds on is not evicted.
        """
        count = len(keys)
        ensure(count <= self.free, "more slots reserved than are free")
        unused = self._unused
        again = min(count, len(unused))
        slots = unused[len(unused) - again :]
        del unused[len(unused) - again :]
        first_fresh = self._chains.num_slots
        slots += cast("Iterable[Slot]", range(first_fresh, first_fresh + count - again))
        self._chains.add(keys, slots, chained=chained, above=above)
        before = len(self._slots)
        self._slots.update(zip(keys, slots, strict=True))
        ensure(len(self._slots) == before + count, "a key was reserved that has a slot")
        self._filling.update(slots)
        return slots

    def commit(self, keys: Sequence[Key], slots: Sequence[Slot]) -> None:
        """The bytes of these keys have arrived: they can be found from now on. Chain order, head first."""
        self.settle()
        before = len(self._filling)
        self._filling.difference_update(slots)
        ensure(len(self._filling) == before - len(slots), "a slot was committed that is not filling")
        self._policy.insert(keys)
        self._exhausted = False

    def release(self, slots: Iterable[Slot]) -> None:
        """The store into these slots has ended: those that lost their key are free."""
        if self._lost:
            self._free_lost(self._lost.intersection(slots))

    def pin(self, slots: Collection[Slot]) -> None:
        """Keep these cached slots from being reused. Who pins says who unpins."""
        self._pins.add(slots)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Let go of these slots; those that lost their key and their last pin are free."""
        gone = self._pins.drop(slots)
        if self._lost:
            self._free_lost(self._lost.intersection(gone))
        self._exhausted = False

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys, in chain order, were hit, on the host or on the device: they stay longer. The policy hears
        of it in settle(), or before anything else that it has to know."""
        if keys:
            self._touched.append(keys)
            if len(self._touched) > _PUT_OFF:
                self.settle()

    def settle(self, leave: int = 0) -> None:
        """Do what was put off, but for the last so many: an engine that admits a request waits for every look at a
        book."""
        end = max(0, len(self._touched) - leave)
        touched, self._touched = self._touched[:end], self._touched[end:]
        for keys in touched:
            there = list(filter(self._slots.__contains__, keys))
            if self._filling and not self._filling.isdisjoint(map(self._slots.__getitem__, there)):
                there = [key for key in there if key in self]
            if there:
                self._policy.touch(there)

    def forget(self, keys: Sequence[Key], slots: Sequence[Slot]) -> None:
        """These keys must not be found in these slots any more, cached or on the way: a copy failed or is not
        wanted. A key that has found another slot in the meantime stays there. A slot that a copy still uses is
        free when release() or the last unpin() says that the copy has ended."""
        self.settle()
        there = [(key, slot) for key, slot in zip(keys, slots, strict=True) if self._slots.get(key) == slot]
        cached = [key for key, slot in there if slot not in self._filling]
        if cached:
            self._policy.remove(cached)
            self._removed += cached
        self._chains.remove(there)
        for key, slot in there:
            del self._slots[key]
            if slot in self._filling:
                self._filling.remove(slot)
                self._lost.add(slot)
            elif slot in self._pins:
                self._lost.add(slot)
            else:
                self._unused.append(slot)
        self._exhausted = False
        self.epoch += 1

    def reset(self) -> None:
        """Forget every key at once. Slots that copies still use become free when those have ended."""
        self._policy.clear()
        used = set(self._slots.values())
        in_use = {slot for slot in used if slot in self._filling or slot in self._pins}
        self._lost |= in_use
        self._unused += used - in_use
        self._slots.clear()
        self._filling.clear()
        self._chains.clear()
        self._removed.clear()
        self._exhausted = False
        self.epoch += 1

    def grow(self, ready: int) -> None:
        """So many slots may be used by now. Never fewer than before: those with higher numbers may be in use."""
        if not is_whole(ready) or not self._ready <= ready <= self._capacity:
            allowed = f"a whole number, at least the {self._ready} there are and at most {self._capacity}"
            raise CapacityError("ready slots", ready, allowed)
        if ready == self._ready:
            return
        self._ready = ready
        self.settle()
        self._policy.resize(max(1, ready))  # policies know no cache without a slot

    def take_removed(self) -> list[Key]:
        """Keys that were evicted or forgotten one by one since the last call."""
        removed, self._removed = self._removed, []
        return removed

    # --- inside ------------------------------------------------------------------------------------

    def _free_lost(self, slots: set[Slot]) -> None:
        self._lost -= slots
        self._unused += slots

    def _evict(self, count: int, keep: Container[Key]) -> None:
        """Free up to `count` slots.

        The policy names candidates in its order. Without its head a tail cannot be hit, so for a candidate that
        something on the host builds on, the tail of its chain goes in its place. A tail that is pinned or kept
        stays, and the candidate with it.
        """
        self.settle()
        kept_one = False
        before = self.evictions
        at_once = _AT_ONCE
        while (short := count - (self.evictions - before)) > 0:
            gone = self._evict_together(min(short, at_once), keep)
            # To look at many where few may go would cost more than it saves.
            at_once = 2 * at_once if gone == at_once else _AT_ONCE
            if gone < min(short, _FEW):
                kept, more = self._evict_one_by_one(short - gone, keep)
                kept_one = kept_one or kept
                if not more:
                    break
        # What was only kept for this caller may go for the next one.
        self._exhausted = short > 0 and not kept_one

    def _evict_together(self, count: int, keep: Container[Key]) -> int:
        """Free up to `count` slots at once: of keys that are next in the policy's order and the end of a chain, as
        the blocks of most prompts are. Returns how many."""
        slots, pins = self._slots, self._pins
        for first in self._policy.oldest(1):
            longest = self._chains.length_to(first)
            keys = self._policy.oldest(min(count, longest)) if longest else ()
            keys = keys[: self._chains.num_ends(keys)] if keys else ()
            if not pins.isdisjoint(map(slots.__getitem__, keys)) or any(map(keep.__contains__, keys)):
                keys = keys[: next(i for i, key in enumerate(keys) if slots[key] in pins or key in keep)]
            if keys:
                self._chains.leave_together(first, len(keys))
                self._let_go(keys)
            return len(keys)
        return 0

    def _evict_one_by_one(self, count: int, keep: Container[Key]) -> tuple[bool, bool]:
        """Free up to `count` slots, or fewer if from there on they may go together. Returns whether something had
        to stay only for `keep`, and whether there may be more."""
        slots, pins = self._slots, self._pins
        victims: dict[Key, None] = {}
        staying: dict[Key, None] = {}  # candidates that are still there
        kept_one, more = False, False
        together = bool(self._policy.oldest(1))
        for candidate in self._policy.candidates():
            if candidate in victims:
                continue  # it went in the place of another
            staying[candidate] = None
            key: Key | None = self._chains.tail(candidate)
            # One tail for each candidate, and then whatever came up before and is a tail now.
            while key is not None and len(victims) < count:
                slot = slots[key]
                if slot in pins or key in keep or slot in self._filling:
                    kept_one = kept_one or key in keep
                    break
                victims[key] = None
                staying.pop(key, None)
                key = self._chains.leave(key)
                if key is None or key not in staying or self._chains.tail(key) != key:
                    break
            more = len(victims) == count or (together and not staying and len(victims) >= _FEW)
            if more:
                break
        self._policy.postpone(list(staying))
        self._let_go(list(victims))
        return kept_one, more

    def _let_go(self, keys: Sequence[Key]) -> None:
        self._policy.evict(keys)
        self._unused += map(self._slots.pop, keys)
        self._removed += keys
        self.evictions += len(keys)

    # --- proof -------------------------------------------------------------------------------------

    def check(self, pins: Counter[Slot], storing: Collection[Slot], filling: Mapping[Key, Slot]) -> None:
        """Raise InvariantError unless the books agree with each other and with their owners': the `pins` that
        matches and live loads hold, the slots that live stores write, wanted or not, and the keys of the wanted
        ones, which are `filling`."""
        free = set(self._unused) | set(range(self._chains.num_slots, self._ready))
        index = self.index()
        cached = set(index.values())
        busy = self._filling | self._lost
        ensure(len(free) == self.free, "a slot is free twice")
        ensure(len(cached) == len(index) == self.cached, "two keys share a slot")
        ensure(len(busy) == self.filling, "a slot is filling and lost")
        ensure(self.free + self.filling + self.cached == self._ready, "slots were lost or invented")
        ensure(len(free | cached | busy) == self._ready, "a slot is in two states")
        ensure(max(free | cached | busy, default=-1) < self._ready, "a slot is used that is not ready")
        ensure(self._pins.counts() == pins, "a pin without a live owner, or an owner without its pin")
        ensure(free.isdisjoint(pins), "a free slot is pinned")
        ensure(busy <= pins.keys() | set(storing), "a filling slot without a copy")
        ensure(set(storing) <= busy, "a store writes to a slot that is not its own")
        ensure(
            {k: s for k, s in self._slots.items() if s in self._filling} == dict(filling), "filling keys differ"
        )
        policy_keys = self._policy.keys()
        ensure(len(policy_keys) == self.cached, "the policy counts other keys than the index")
        ensure(index.keys() == set(policy_keys), "the policy orders other keys than the index")
        self._policy.check()
        self._chains.check()
