"""ARC: two queues that share the capacity, and two memories that move the border between them.

    seen once   [ B1 ghost ][ T1 ──────── ]      hit in B1: T1 was too small, the border moves right
    seen twice  [ B2 ghost ][ T2 ──────── ]      hit in B2: T2 was too small, the border moves left

After Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003. There a page is replaced
when its successor is known; here room is made before it is known what will be inserted, so the paper's tie rule
for a key that comes back from B2 does not apply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from forebay.errors import ensure
from forebay.ids import Key
from forebay.policies.base import Policy


class ARC(Policy):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once: OrderedDict[Key, None] = OrderedDict()  # T1
        self._again: OrderedDict[Key, None] = OrderedDict()  # T2
        self._once_ghost: OrderedDict[Key, None] = OrderedDict()  # B1
        self._again_ghost: OrderedDict[Key, None] = OrderedDict()  # B2
        self._out: dict[Key, OrderedDict[Key, None]] = {}  # candidates: where from
        self._once_target = 0.0  # the border: how many slots T1 should have

    def insert(self, keys: Sequence[Key]) -> None:
        once, again = self._once, self._again
        once_ghost, again_ghost = self._once_ghost, self._again_ghost
        for key in reversed(keys):
            if key in once_ghost:
                step = max(1.0, len(again_ghost) / len(once_ghost))
                self._once_target = min(float(self.capacity), self._once_target + step)
                del once_ghost[key]
                again[key] = None
            elif key in again_ghost:
                step = max(1.0, len(once_ghost) / len(again_ghost))
                self._once_target = max(0.0, self._once_target - step)
                del again_ghost[key]
                again[key] = None
            else:
                once[key] = None
        self._trim()

    def touch(self, keys: Sequence[Key]) -> None:
        once, again = self._once, self._again
        for key in reversed(keys):
            if key in once:
                del once[key]
                again[key] = None
            else:
                again.move_to_end(key)

    def candidates(self) -> Iterator[Key]:
        once, again = self._once, self._again
        while once or again:
            queue = once if once and (len(once) > self._once_target or not again) else again
            key, _ = queue.popitem(last=False)
            self._out[key] = queue
            yield key

    def evict(self, keys: Sequence[Key]) -> None:
        for key in keys:
            ghost = self._once_ghost if self._out.pop(key) is self._once else self._again_ghost
            ghost[key] = None
        self._trim()

    def postpone(self, keys: Sequence[Key]) -> None:
        for key in reversed(keys):
            self._out.pop(key)[key] = None

    def _trim(self) -> None:
        """|T1| + |B1| <= capacity, and all four together <= twice the capacity."""
        _drop_oldest(self._once_ghost, len(self._once) + len(self._once_ghost) - self.capacity)
        total = sum(map(len, (self._once, self._again, self._once_ghost, self._again_ghost)))
        _drop_oldest(self._again_ghost, total - 2 * self.capacity)

    def remove(self, keys: Sequence[Key]) -> None:
        for key in keys:
            del (self._once if key in self._once else self._again)[key]

    def clear(self) -> None:
        for queue in (self._once, self._again, self._once_ghost, self._again_ghost):
            queue.clear()
        self._once_target = 0.0

    def keys(self) -> Collection[Key]:
        return [*self._once, *self._again]

    def check(self) -> None:
        queues = (self._once, self._again, self._once_ghost, self._again_ghost)
        ensure(len(set().union(*queues)) == sum(map(len, queues)), "arc: a key is in two queues")
        ensure(len(self._once_ghost) <= self.capacity, "arc: B1 outgrew the capacity")
        ensure(sum(map(len, queues)) <= 2 * self.capacity, "arc: more than twice the capacity kept")
        ensure(not self._out, "arc: a candidate was neither evicted nor postponed")
        ensure(0 <= self._once_target <= self.capacity, "arc: the border left the cache")


def _drop_oldest(queue: OrderedDict[Key, None], count: int) -> None:
    for key in list(islice(queue, max(0, count))):
        del queue[key]
