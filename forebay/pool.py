"""HostPool: the slots, who holds them, and what they contain.

    free ──reserve──▶ filling ──commit──▶ cached
      ▲                  │                  │ evict: nobody pins it and nothing on the host builds on it
      │                  │                  │
      │◀── last unpin ── │ ◀── forget ──────┤ (while a copy still reads or writes it)
      └─────────────────────────────────────┘

A slot is free, cached (its key is in the index) or filling: held by a copy and without a key that anybody can
find, because it is still being written, or because its key was forgotten while a copy was running. A filling slot
becomes free only when the last pin goes, so memory is never reused under a running copy.

Nothing is kept per slot until it is used: a pool of a million slots is a counter. The books are dicts and sets
over whole batches of keys; no method loops in Python over blocks that are simply stored, found or unpinned.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

from forebay.errors import CapacityError, ensure
from forebay.ids import Key, Slot
from forebay.policies import Policy
from forebay.tally import Tally


class HostPool:
    def __init__(self, slots: int, policy: Policy) -> None:
        if slots < 1:
            raise CapacityError("slots", slots, "at least 1")
        self._capacity = slots
        self._policy = policy
        self._index: dict[Key, Slot] = {}
        self._filling: dict[Key, Slot] = {}
        self._lost: set[Slot] = set()  # filling slots whose key was forgotten; free after the last unpin
        self._pins: Tally[Slot] = Tally()
        self._unused: list[Slot] = []  # slots that were used before and are free again
        self._first_fresh = 0  # slots from here on were never used
        self._parent: dict[Key, Key] = {}  # cached and filling keys that build on another key
        self._children: Counter[Key] = Counter()  # key -> cached and filling keys that build on it
        self._exhausted = False  # the last eviction found too little, and nothing changed since
        self._removed: list[Key] = []
        self.evictions = 0
        self.epoch = 0  # changes whenever keys stop being valid for a reason other than eviction

    # --- sizes -----------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def free(self) -> int:
        return len(self._unused) + self._capacity - self._first_fresh

    @property
    def filling(self) -> int:
        return len(self._filling) + len(self._lost)

    @property
    def cached(self) -> int:
        return len(self._index)

    @property
    def pinned(self) -> int:
        return len(self._pins)

    @property
    def index(self) -> Mapping[Key, Slot]:
        """Cached keys and their slots. Read it, do not keep it."""
        return self._index

    def __contains__(self, key: Key) -> bool:
        """Whether the key is cached."""
        return key in self._index

    def on_the_way(self, key: Key) -> bool:
        """Whether a store of this key is planned or running."""
        return key in self._filling

    def missing(self, keys: Iterable[Key], start: int = 0) -> list[int]:
        """Positions, counted from `start`, of the keys that are neither cached nor on the way."""
        index, filling = self._index, self._filling
        return [i for i, key in enumerate(keys, start) if key not in index and key not in filling]

    # --- the life of a slot ------------------------------------------------------------------------

    def make_room(self, count: int, keep: Container[Key] = ()) -> int:
        """Evict until `count` slots are free or nothing more may go; returns how many of them there are.

        Keys in `keep` stay: what is about to be stored builds on them.
        """
        short = count - self.free
        if short > 0 and not self._exhausted:
            self._evict(short, keep)
        return min(count, self.free)

    def reserve(self, keys: Sequence[Key], parents: Sequence[Key | None] | None) -> list[Slot]:
        """Take a free slot for each key, filling and pinned once, until commit or forget.

        The keys are neither cached nor on the way, and make_room() has said that there is room. `parents` names
        the key each one builds on: while the child is on the host, the parent is not evicted.
        """
        count = len(keys)
        ensure(count <= self.free, "more slots reserved than are free")
        unused = self._unused
        again = min(count, len(unused))
        slots = unused[len(unused) - again :]
        del unused[len(unused) - again :]
        if again < count:
            first = self._first_fresh
            self._first_fresh = first + count - again
            slots += map(Slot, range(first, self._first_fresh))
        before = self.filling
        self._filling.update(zip(keys, slots, strict=True))
        ensure(self.filling == before + count, "a key was reserved twice")
        self._pins.add(slots)
        if parents is not None:
            self._link(keys, parents)
        return slots

    def commit(self, keys: Sequence[Key], slots: Sequence[Slot]) -> None:
        """The bytes of these keys have arrived: they can be found from now on. Chain order, head first.

        The pins stay until unpin().
        """
        deque(map(self._filling.__delitem__, keys), maxlen=0)
        before = len(self._index)
        self._index.update(zip(keys, slots, strict=True))
        ensure(len(self._index) == before + len(keys), "a key was committed twice")
        self._policy.insert(reversed(keys))
        self._exhausted = False

    def pin(self, slots: Collection[Slot]) -> None:
        """Keep these slots from being reused. Who pins says who unpins."""
        self._pins.add(slots)

    def unpin(self, slots: Sequence[Slot]) -> None:
        """Let go of these slots; those that lost their key and their last pin are free."""
        gone = self._pins.drop(slots)
        if self._lost and not self._lost.isdisjoint(gone):
            freed = self._lost.intersection(gone)
            self._lost -= freed
            self._unused += freed
        self._exhausted = False

    def touch(self, keys: Sequence[Key]) -> None:
        """These keys, in chain order, were hit, on the host or on the device: they stay longer."""
        index = self._index
        self._policy.touch([key for key in reversed(keys) if key in index])

    def forget(self, keys: Sequence[Key], slots: Sequence[Slot]) -> None:
        """These keys must not be found in these slots any more, cached or on the way: a copy failed or is not
        wanted. A key that has found another slot in the meantime stays there."""
        cached = _still_there(self._index, keys, slots)
        if cached:
            self._policy.remove(cached)
            self._drop_slots(self._index, cached)
            self._removed += cached
        filling = _still_there(self._filling, keys, slots)
        if filling:
            self._drop_slots(self._filling, filling)
        self._unlink(cached + filling)
        self._exhausted = False
        self.epoch += 1

    def reset(self) -> None:
        """Forget every key at once. Slots that copies still use become free when those have ended."""
        self._policy.clear()
        self._drop_slots(self._index, list(self._index))
        self._drop_slots(self._filling, list(self._filling))
        self._parent.clear()
        self._children.clear()
        self._removed.clear()
        self._exhausted = False
        self.epoch += 1

    def grow(self, capacity: int) -> None:
        """More slots are ready. A pool never shrinks: slots with higher numbers may be in use."""
        if capacity < self._capacity:
            raise CapacityError("slots", capacity, f"at least the {self._capacity} there are")
        self._capacity = capacity
        self._policy.resize(capacity)
        self._exhausted = False

    def take_removed(self) -> list[Key]:
        """Keys that were evicted or forgotten one by one since the last call."""
        removed, self._removed = self._removed, []
        return removed

    # --- inside ------------------------------------------------------------------------------------

    def _drop_slots(self, books: dict[Key, Slot], keys: Sequence[Key]) -> None:
        slots = list(map(books.pop, keys))
        pins = self._pins
        if len(pins):
            held = [slot for slot in slots if slot in pins]
            self._lost.update(held)
            slots = [slot for slot in slots if slot not in pins]
        self._unused += slots

    def _evict(self, count: int, keep: Container[Key]) -> None:
        """Free up to `count` slots.

        The policy names candidates in its order. One that is pinned, kept, or has something on the host building
        on it must stay: without its head a tail cannot be hit, so tails go first. Where a head came up before its
        tail, it is next as soon as the tail has gone.
        """
        index, pins, children, parent = self._index, self._pins, self._children, self._parent
        victims: list[Key] = []
        staying: dict[Key, None] = {}
        kept_one = False
        for candidate in self._policy.candidates():
            key: Key | None = candidate
            while key is not None:
                if key in children or key in keep or index[key] in pins:
                    kept_one = kept_one or key in keep
                    staying[key] = None
                    break
                victims.append(key)
                above = parent.pop(key, None)
                key = None
                if above is not None:
                    left = children[above] - 1
                    if left:
                        children[above] = left
                    else:
                        del children[above]
                        if above in staying and len(victims) < count:
                            del staying[above]
                            key = above
            if len(victims) >= count:
                break
        # A chain that came up head first goes back tail first, so that next time its tail is found at once.
        self._policy.postpone(list(staying)[::-1])
        self._policy.evict(victims)
        self._unused += map(index.pop, victims)
        self._removed += victims
        self.evictions += len(victims)
        # What was only kept for this caller may go for the next one.
        self._exhausted = len(victims) < count and not kept_one

    def _link(self, keys: Sequence[Key], parents: Sequence[Key | None]) -> None:
        known = [above for above in parents if above is not None]
        if len(known) == len(keys):
            self._parent.update(zip(keys, known, strict=True))
        else:
            pairs = zip(keys, parents, strict=True)
            self._parent.update((key, above) for key, above in pairs if above is not None)
        self._children.update(known)

    def _unlink(self, keys: Iterable[Key]) -> None:
        for key in keys:
            above = self._parent.pop(key, None)
            if above is not None:
                self._children[above] -= 1
                if not self._children[above]:
                    del self._children[above]

    def check(self, pins: Counter[Slot], filling: Mapping[Key, Slot]) -> None:
        """Raise InvariantError unless the books agree with each other and with their owners': `pins` that live
        transfers and matches hold, and the keys that live stores are `filling`."""
        free = set(self._unused) | set(range(self._first_fresh, self._capacity))
        cached = set(self._index.values())
        busy = set(self._filling.values()) | self._lost
        ensure(len(free) == self.free, "a slot is free twice")
        ensure(len(cached) == self.cached, "two keys share a slot")
        ensure(len(busy) == self.filling, "two copies fill one slot")
        ensure(self.free + self.filling + self.cached == self._capacity, "slots were lost or invented")
        ensure(len(free | cached | busy) == self._capacity, "a slot is in two states")
        ensure(self._index.keys().isdisjoint(self._filling), "a cached key is on the way again")
        ensure(self._pins.counts() == pins, "a pin without a live owner, or an owner without its pin")
        ensure(free.isdisjoint(pins), "a free slot is pinned")
        ensure(busy <= pins.keys(), "a filling slot without a pin")
        ensure(self._filling == dict(filling), "a filling key without a live store")
        policy_keys = self._policy.keys()
        ensure(len(policy_keys) == self.cached, "the policy counts other keys than the index")
        ensure(self._index.keys() == set(policy_keys), "the policy orders other keys than the index")
        self._policy.check()
        resident = self._index.keys() | self._filling.keys()
        ensure(self._parent.keys() <= resident, "a key that is gone still holds its parent")
        ensure(Counter(self._parent.values()) == self._children, "children are counted wrong")


def _still_there(books: dict[Key, Slot], keys: Sequence[Key], slots: Sequence[Slot]) -> list[Key]:
    return [key for key, slot in zip(keys, slots, strict=True) if books.get(key) == slot]
