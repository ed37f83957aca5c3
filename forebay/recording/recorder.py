"""Recorder: takes what the manager sees from the scheduling thread, and writes it from one of its own."""

from __future__ import annotations

import logging
import os
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from hashlib import blake2b
from os import PathLike, fspath
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from forebay.errors import ConfigError, is_whole
from forebay.recording.parts import LEAST_BYTES, Parts
from forebay.warner import Warner

logger = logging.getLogger("forebay")

MAX_WAITING_HASHES = 1 << 18
"""Of requests that are not written yet. Four million tokens in blocks of 16; about 20 MB."""

DEFAULT_BYTES = 1_000_000_000
_CLOSE_S = 10.0
_AT_ONCE = 512


class _Arrival(NamedTuple):
    number: int
    time_s: float
    input_tokens: int
    hashes: Sequence[bytes]


class _End(NamedTuple):
    number: int
    output_tokens: int


class Recorded(NamedTuple):
    """A request that is in the recording."""

    number: int
    input_tokens: int


class Recorder:
    """arrived() and ended() never wait and never raise. If the writer cannot keep up, requests are dropped and
    counted; if it cannot write, recording stops. Either is said once, in the log, and the engine goes on."""

    def __init__(
        self,
        folder: str | PathLike[str],
        block_tokens: int,
        *,
        max_bytes: int = DEFAULT_BYTES,
        max_waiting_hashes: int = MAX_WAITING_HASHES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begins a recording of its own, also where the folder has others. `block_tokens` is what a hash stands
        for. Raises ConfigError if nothing can be written there."""
        if not is_whole(max_bytes) or max_bytes < LEAST_BYTES:
            raise ConfigError("record_trace_bytes", max_bytes, f"at least {LEAST_BYTES:,} bytes")
        try:
            self._parts = Parts(Path(folder), os.urandom(8).hex(), block_tokens, max_bytes)
            self._parts.flush()
        except (OSError, ValueError) as error:  # ValueError: a path that cannot be one
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError("record_trace", fspath(folder), f"a folder to write to ({reason})") from None
        # Prompts can be guessed and hashed again. Keyed with something that nobody has, the ids say which requests
        # of this recording begin alike, and nothing else.
        self._keyed = blake2b(digest_size=8, key=os.urandom(32))
        self._clock = clock
        self._last_time_s = 0.0
        self._max_waiting = max_waiting_hashes
        self._queue: SimpleQueue[_Arrival | _End | None] = SimpleQueue()
        # Changed by the scheduling thread only, and then those that the writing thread changes.
        self._put = 0  # hashes
        self._number = 0
        self._warner = Warner()
        self._dropped = 0
        self._taken = 0  # hashes
        self._no_room = 0
        self._told_dropped = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="forebay-recorder", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Of the part that is being written."""
        return self._parts.path

    @property
    def dropped(self) -> int:
        """Requests that are not in the recording."""
        return self._dropped + self._no_room

    # --- the scheduling thread ---------------------------------------------------------------------

    def arrived(self, input_tokens: int, hashes: Sequence[bytes]) -> Recorded | None:
        """A request has come. None if it is not recorded, else what to say when it ends."""
        cost = len(hashes) + 1
        if self._stopped or self._put - self._taken + cost > self._max_waiting:
            self._dropped += 1
            if not self._stopped:
                self._warner.warn("dropped", "forebay: the recording cannot keep up: a request is not in it")
            return None
        self._put += cost
        self._number += 1
        # Clocks are set back; requests are recorded as they came.
        self._last_time_s = max(self._last_time_s, self._clock())
        self._queue.put(_Arrival(self._number, self._last_time_s, input_tokens, hashes[:]))
        return Recorded(self._number, input_tokens)

    def ended(self, request: Recorded, num_tokens: int) -> None:
        """With so many tokens, input and output."""
        if not self._stopped:
            self._put += 1
            self._queue.put(_End(request.number, max(0, num_tokens - request.input_tokens)))

    def close(self) -> None:
        """Write what waits. May be called twice."""
        self._stopped = True
        self._queue.put(None)
        self._thread.join(_CLOSE_S)

    # --- the writing thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while (entry := self._queue.get()) is not None:
                self._write(entry)
                self._parts.flush()  # a kill loses no more than what waits
            self._tell_dropped()
        except OSError as error:
            logger.warning("forebay: recording stops: %s", error)
        except Exception:
            logger.exception("forebay: recording stops: a bug")
        finally:
            self._stopped = True
            self._close_parts()

    def _close_parts(self) -> None:
        try:
            self._parts.close()
        except OSError as error:
            logger.warning("forebay: the end of a recording was not written: %s", error)

    def _write(self, entry: _Arrival | _End) -> None:
        if isinstance(entry, _End):
            self._parts.write({"request": entry.number, "output_tokens": entry.output_tokens})
            self._taken += 1
            return
        self._tell_dropped()
        written = self._parts.write(
            {
                "request": entry.number,
                "time_s": round(entry.time_s, 6),
                "input_tokens": entry.input_tokens,
                "ids": b64encode(self._ids(entry.hashes)).decode(),
            }
        )
        self._taken += len(entry.hashes) + 1
        if not written:
            self._no_room += 1
            self._warner.warn("no room", "forebay: the recording has no room for a request: it is not in it")

    def _ids(self, hashes: Sequence[bytes]) -> bytes:
        ids = bytearray()
        for start in range(0, len(hashes), _AT_ONCE):
            for each in hashes[start : start + _AT_ONCE]:
                keyed = self._keyed.copy()
                keyed.update(each)
                ids += keyed.digest()
            time.sleep(0)  # the scheduling thread may wait for the interpreter
        return bytes(ids)

    def _tell_dropped(self) -> None:
        dropped = self.dropped
        new = dropped - self._told_dropped
        if new and self._parts.write({"dropped": new}):
            self._told_dropped = dropped
