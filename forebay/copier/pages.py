"""The host memory of a GPU rank: slots in private memory that is touched, pinned and published piece by piece.

    slots    0 ···        a ···               b ···               c ···        e
    pieces   [ published ][ published        ][ registering      ][ touching  ][ not mapped yet
                                              ▲
                                              ready

To touch and to pin what a server has takes many seconds. No engine waits for that: slots come while it runs. But
both take locks, of the process and of the driver: beside them, a graph of vLLM's took 0.7 s to capture instead of
0.1. So if asked to, this waits with all but the first piece until the engine has started.

One thread maps, registers and publishes piece after piece, and nobody else changes anything here until close().
Others touch the pieces ahead of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, TypeAlias

import numpy as np

from forebay.copier import memory
from forebay.copier.memory import PAGE_BYTES, gpu_numa_node
from forebay.errors import CapacityError, InvariantError, is_whole

__all__ = ["HostPages", "gpu_numa_node"]

logger = logging.getLogger("forebay")

_MIB, _GIB = 1 << 20, 1 << 30
_FIRST_BYTES = 32 * _MIB
"""The first piece is small, so that the first slots are there at once."""

_STEP_BYTES = 32 * _MIB
"""Touched in one call: what close() waits for."""

_AHEAD = 3
"""Pieces that are being touched while one is registered."""

_MAX_THREADS = 16
_NICENESS = 10
_CLOSE_S = 10.0
_MEMLOCK_HINT = "raise the limit of locked memory (`ulimit -l`, or that of the container)"


@dataclass(slots=True)
class _Piece:
    """A run of slots in one mapping. Copies never span two, because registrations must not be spanned."""

    first_slot: int
    end_slot: int
    address: int
    length: int
    touched: list[Future[None]]
    registered: bool = False


class _Step(NamedTuple):
    address: int
    length: int
    done: Future[None]


_Steps: TypeAlias = "SimpleQueue[_Step | None]"  # None ends the thread that gets it


class _NoMoreError(Exception):
    """Growth ends here, for a reason that can happen. What is ready stays."""


class HostPages:
    """Grows by itself. Nothing that goes wrong while it does is raised: there are fewer slots, or they are not
    pinned, and one line in the log says why.

    `register(address, length)` and `unregister(address)` make a device know the memory, and forget it. They are
    called from the growing thread, `unregister` also from the one that closes. Memory ends with close(), or with
    the process however that ends. A child that was forked has none of it.
    """

    def __init__(
        self,
        slots: int,
        bytes_per_slot: int,
        *,
        register: Callable[[int, int], None] | None = None,
        unregister: Callable[[int], None] | None = None,
        numa_node: int | None = None,
        threads: int | None = None,
        piece_bytes: int = 256 * _MIB,
        waits: bool = False,
    ) -> None:
        """`waits`: there is no more than the first piece until go_on() is called."""
        for name, number in (("slots", slots), ("bytes_per_slot", bytes_per_slot)):
            if not is_whole(number) or number < 1:
                raise CapacityError(name, number, "a whole number, at least 1")
        self.slots = slots
        self.bytes_per_slot = bytes_per_slot
        self.ready = 0
        """Slots below this one can be used. Grows, from one thread, and can be read from any. 0 once closed."""
        self.pinned = False
        """Whether what is ready is registered."""
        self._register, self._unregister = register, unregister
        self._numa_node = numa_node
        self._threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) - 2) if threads is None else threads)
        # The first piece is as large as the others, but begins before slot 0: so a division finds a slot's piece.
        self._slots_per_piece = max(1, piece_bytes // bytes_per_slot)
        self._slots_before = self._slots_per_piece - max(1, min(piece_bytes, _FIRST_BYTES) // bytes_per_slot)
        self._begins = range(-self._slots_before, slots, self._slots_per_piece)
        # By piece: where slot 0 would be if all slots were in one run with those of the piece.
        self._origins = np.zeros(len(self._begins), np.int64)
        self._published: list[_Piece] = []
        self._pid = os.getpid()
        self._stop, self._ended, self._go = Event(), Event(), Event()
        if not waits:
            self._go.set()
        self._thread = Thread(target=self._run, name="forebay-pages", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Grow beyond the first piece. May be called at any time, and twice."""
        self._go.set()

    @property
    def growing(self) -> bool:
        """Whether there will be more."""
        return not self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until nothing grows any more. Whether that is so."""
        return self._ended.wait(timeout_s)

    def addresses(self, slots: np.ndarray) -> np.ndarray:
        """uint64, where these slots (int64) begin. All of them must be ready."""
        slots = slots.astype(np.int64, copy=False)  # smaller types would overflow, and not say so
        if slots.size and not 0 <= slots.min() <= slots.max() < self.ready:
            raise InvariantError(f"slots {slots.min()} to {slots.max()} are in use, and only {self.ready} ready")
        found: np.ndarray = self._origins[self.pieces(slots)] + slots * self.bytes_per_slot
        return found.view(np.uint64)

    def pieces(self, slots: np.ndarray) -> np.ndarray:
        """The number of the piece that each slot is in."""
        found: np.ndarray = (slots + self._slots_before) // self._slots_per_piece
        return found

    def row(self, slot: int) -> np.ndarray:
        """The bytes of one slot, for tests and tools. Must not be touched after close()."""
        [address] = self.addresses(np.array([slot], np.int64))
        return memory.view(int(address), self.bytes_per_slot)

    def close(self) -> None:
        """Stop growing and let go of the memory. Nobody may use it any more, no device either. If the thread hangs
        in a call of the driver, the memory is left to it; another close() tries again."""
        if os.getpid() != self._pid:
            return  # forked: the addresses are the parent's, and something else may be there by now
        self._stop.set()
        self._go.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("host memory: still growing %.0f s after it was told to stop; not unmapped", _CLOSE_S)
            return
        self.ready = 0
        while self._published:
            self._release(self._published.pop())

    # --- the growing thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        _be_nice()
        steps: _Steps = SimpleQueue()
        touching: list[Thread] = []
        ahead: deque[_Piece] = deque()
        try:
            for _ in range(self._threads):
                thread = Thread(target=self._touch, args=(steps,), name="forebay-touch", daemon=True)
                thread.start()
                touching.append(thread)
            self._grow(ahead, steps)
        except _NoMoreError as reason:
            logger.warning("host memory: stays at %d of %d slots: %s", self.ready, self.slots, reason)
        except BaseException as error:  # noqa: BLE001 - nobody waits for this thread
            line = "host memory: stays at %d of %d slots: its thread died (%r)"
            logger.warning(line, self.ready, self.slots, error)
        finally:
            self._drop(ahead)
            for _ in touching:
                steps.put(None)
            for thread in touching:
                thread.join()
            self._ended.set()

    def _grow(self, ahead: deque[_Piece], steps: _Steps) -> None:
        """In `ahead` is what is mapped and not published."""
        begins = iter(self._begins)
        reason: _NoMoreError | None = None
        while not self._stop.is_set():
            most = 1 + (_AHEAD if self._go.is_set() else 0)
            while reason is None and len(ahead) < most and (begin := next(begins, None)) is not None:
                try:
                    ahead.append(self._map(begin, sum(map(_untouched_bytes, ahead)), steps))
                except _NoMoreError as error:
                    reason = error  # told when those before it are published
            if not ahead:
                break
            self._finish(ahead[0])
            if not self._stop.is_set():
                self._publish(ahead.popleft())
                if self.ready < self.slots:
                    self._go.wait()
        if reason:
            raise reason

    def _map(self, begin: int, untouched_bytes: int, steps: _Steps) -> _Piece:
        first_slot, end_slot = max(0, begin), min(self.slots, begin + self._slots_per_piece)
        length = (end_slot - first_slot) * self.bytes_per_slot
        length += -length % PAGE_BYTES
        # What is still to be touched is not yet missing from what is available.
        self._check_room(length + untouched_bytes)
        try:
            address = memory.map_private(length)
        except OSError as error:
            raise _NoMoreError(f"no more could be mapped ({error})") from error
        self._bind(address, length)
        offsets = range(0, length, _STEP_BYTES)
        todo = [_Step(address + at, min(_STEP_BYTES, length - at), Future()) for at in offsets]
        for step in todo:
            steps.put(step)
        return _Piece(first_slot, end_slot, address, length, [step.done for step in todo])

    def _check_room(self, wanted_bytes: int) -> None:
        """An engine that runs out of memory is killed. A small cache is better."""
        for limit in memory.memory_limits():
            reserve = limit.reserve_bytes(self.slots * self.bytes_per_slot)
            if limit.available_bytes < wanted_bytes + reserve:
                left, kept = limit.available_bytes / _GIB, reserve / _GIB
                raise _NoMoreError(f"{limit.name} has {left:.2f} GiB left, and {kept:.2f} are kept for others")

    def _bind(self, address: int, length: int) -> None:
        if self._numa_node is None:
            return
        try:
            memory.bind(address, length, self._numa_node)
        except OSError as error:
            logger.debug("host memory: not bound to NUMA node %d (%s)", self._numa_node, error)
            self._numa_node = None  # it would fail for all pieces, and need not be said again

    def _finish(self, piece: _Piece) -> None:
        """Wait for its pages, and make the device know them."""
        for each in piece.touched:
            each.result()
        is_first = piece.first_slot == 0
        if self._stop.is_set() or self._register is None or not (is_first or self.pinned):
            return
        try:
            self._register(piece.address, piece.length)
        except Exception as error:
            if not is_first:
                raise _NoMoreError(f"no more could be pinned ({error!r}); {_MEMLOCK_HINT}") from error
            logger.warning("host memory: not pinned, so copies are slow (%r); %s", error, _MEMLOCK_HINT)
            return
        piece.registered = True

    def _publish(self, piece: _Piece) -> None:
        self._origins[len(self._published)] = piece.address - piece.first_slot * self.bytes_per_slot
        self._published.append(piece)
        # Last, for other threads look at it first.
        self.pinned = piece.registered
        self.ready = piece.end_slot

    def _drop(self, pieces: deque[_Piece]) -> None:
        self._stop.set()  # what is not touched by now need not be
        for piece in pieces:
            wait(piece.touched)
            self._release(piece)

    def _release(self, piece: _Piece) -> None:
        try:
            if piece.registered and self._unregister:
                self._unregister(piece.address)
        except Exception as error:  # noqa: BLE001 - a process that ends may have lost its driver before
            logger.debug("host memory: could not be unregistered (%r)", error)
        with suppress(OSError):
            memory.unmap(piece.address, piece.length)

    # --- the touching threads -----------------------------------------------------------------------------

    def _touch(self, steps: _Steps) -> None:
        while step := steps.get():
            try:
                if not self._stop.is_set():
                    memory.touch(step.address, step.length)
                step.done.set_result(None)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                step.done.set_exception(error)


def _be_nice() -> None:
    """Let the engine's threads go first. Holds for the calling thread, and for those that it starts."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS))


def _untouched_bytes(piece: _Piece) -> int:
    return min(piece.length, _STEP_BYTES * sum(not each.done() for each in piece.touched))
