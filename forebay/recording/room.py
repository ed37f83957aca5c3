"""How much all engines that record into a folder may take there together.

No engine sees another's numbers, only its files. So each counts the same way what the others may still write:

    closed part      its size; the oldest goes first when room is wanted
    open part        its size rounded up to the next step, twice: it is compressed beside itself. It never goes:
                     a file that is deleted while it is written still takes its bytes

A part is open while its writer holds its lock, which the system takes back from engines that are killed. Writers
take the folder's lock to go beyond a step, and write without one until the next.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_NAMED = re.compile(r"forebay-\d{8}T\d{6}Z-[0-9a-f]{16}-\d{6}\.jsonl(\.gz(\.tmp)?)?")
_STEP_BYTES = 16 << 10
_SHARE = 4
_MAX_PART_BYTES = 64 << 20
_PATIENCE_S = 30.0
_PAUSE_S = 0.005


class Closed(NamedTuple):
    path: Path
    num_bytes: int


class Taken(NamedTuple):
    """By others, in a folder."""

    open_parts: int
    open_bytes: int
    """With what they may still take."""
    closed: Sequence[Closed]
    """The oldest first."""


class Room:
    """Raises OSError, from any method."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    @contextmanager
    def alone(self, patience_s: float | None = None) -> Iterator[None]:
        """Nobody else makes room or takes some. Waits only for engines that do either, and not for ever. Raises
        TimeoutError."""
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(folder, _PATIENCE_S if patience_s is None else patience_s)
            yield
        finally:
            unlock(folder)
            os.close(folder)

    def _lock(self, folder: int, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process keeps {self._folder} locked") from None
                time.sleep(_PAUSE_S)
            except OSError:
                return None  # network file systems do not lock folders: two may then take the same last step

    def taken(self, own: Path | None) -> Taken:
        """All but `own`, the part of this engine."""
        sizes = {name: size for name, size in self._files() if own is None or name != own.name}
        opened = {name for name in sizes if name.endswith(".jsonl") and _is_locked(self._folder / name)}
        copies = {f"{name}.gz.tmp" for name in opened}  # they have their room
        closed = [
            Closed(self._folder / name, sizes[name])
            for name in sorted(sizes.keys() - opened - copies)  # by time, whose ever they are
        ]
        return Taken(len(opened), sum(held_for(sizes[name]) for name in opened), closed)

    def _files(self) -> Iterator[tuple[str, int]]:
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not _NAMED.fullmatch(entry.name):
                    continue  # not ours to count, nor to delete
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield entry.name, status.st_size

    def make(self, taken: Taken, num_bytes: int) -> bool:
        """Delete the oldest parts until so many bytes are left. False if that cannot be: others have the rest, in
        open parts, and then nothing is deleted, or in parts that only they may delete."""
        left = self._max_bytes - taken.open_bytes - num_bytes
        if left < 0:
            return False
        total = sum(each.num_bytes for each in taken.closed)
        for path, size in taken.closed:
            if total <= left:
                break
            with suppress(PermissionError):
                path.unlink(missing_ok=True)
                total -= size
        return total <= left

    def part_bytes(self, open_parts: int = 1) -> int:
        """The most that a part grows to beside others. All of them together leave half of the room to closed
        parts."""
        return min(_MAX_PART_BYTES, self._max_bytes // (_SHARE * (open_parts + 1)))


def step_end(size: int) -> int:
    """How far a part of this size may grow before its writer has to look again."""
    return -(-size // _STEP_BYTES) * _STEP_BYTES


def held_for(size: int) -> int:
    """What an open part of this size counts for."""
    return 2 * step_end(size)


def lock(file: int) -> None:
    """Mark a part as open, until it is closed or its process is gone."""
    with suppress(OSError):  # where there are no locks, parts count as closed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(file: int) -> None:
    """Before it is closed: a process that was forked meanwhile has it open too, and would keep the lock."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # gone, or another user's
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False
