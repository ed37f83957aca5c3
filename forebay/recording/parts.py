"""The files of a recording: plain while written, gzipped after, and never more than so many bytes together."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from forebay.errors import ensure
from forebay.recording.room import Room, held_for, lock, step_end, unlock

VERSION = 1
LEAST_BYTES = 1_000_000
_AT_START_S = 1.0
_COMPRESSION = 1  # keys are as good as random: more effort finds nothing more


class Parts:
    """Writes lines. Every part begins with a header, so that each can be read without the others. All recordings
    in the folder share the bound: the oldest part goes first, whose ever it is.

    Raises OSError, from any method."""

    def __init__(self, folder: Path, recording: str, block_tokens: int, max_bytes: int) -> None:
        self._folder = folder
        self._recording = recording
        self._block_tokens = block_tokens
        self._room = Room(folder, max_bytes)
        self._number = 0
        self._path = folder
        self._file: BinaryIO | None = None
        """None while the parts of others leave no room for one, or their locks no turn."""
        self._size = self._header_bytes = self._granted = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # An engine that starts neither waits long for others nor fails for them: the first write will.
        with suppress(TimeoutError), self._room.alone(_AT_START_S):
            self._begin()

    @property
    def path(self) -> Path:
        """Of the part that is being written."""
        return self._path

    def write(self, record: dict[str, Any]) -> bool:
        """False if the line is too long for any part, or if others leave no room for it."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self._file is None or self._size + len(line) > self._granted:
            return self._write_alone(line)
        self._file.write(line)
        self._size += len(line)
        return True

    def flush(self) -> None:
        """What was written is the system's now: killing this process does not lose it."""
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None and not self._file.closed:
            try:
                self._file.flush()
            finally:
                unlock(self._file.fileno())
                self._file.close()

    def check(self) -> None:
        """That the open part is where others see it, and no larger than they count it. Raises InvariantError."""
        if self._file is not None:
            status = os.fstat(self._file.fileno())
            ensure(status.st_nlink == 1, f"{self._path} was deleted, and still takes its bytes")
            ensure(status.st_size <= self._size <= self._granted, f"{self._path} is larger than it may be")
            ensure(self._granted <= step_end(status.st_size), f"others do not know how far {self._path} may grow")

    def _write_alone(self, line: bytes) -> bool:
        with self._room.alone():
            if self._file is None and not self._begin():
                return False
            if self._grow(line):
                return True
        too_long = self._header_bytes + len(line) > self._room.part_bytes()
        if too_long or self._size == self._header_bytes:
            return False
        self._rotate()
        with self._room.alone():
            return self._file is not None and self._grow(line)

    def _begin(self) -> bool:
        """A new part, if there is room. Nobody else may take some meanwhile."""
        header = {"forebay_recording": VERSION, "recording": self._recording, "part": self._number + 1}
        line = json.dumps({**header, "block_tokens": self._block_tokens}, separators=(",", ":")).encode() + b"\n"
        if not self._room.make(self._room.taken(None), held_for(len(line))):
            return False
        self._number += 1
        # Names sort by time, across recordings too.
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._path = self._folder / f"forebay-{began}-{self._recording}-{self._number:06}.jsonl"
        self._file = _created(self._path)
        lock(self._file.fileno())
        self._file.write(line)
        self._file.flush()
        self._size = self._header_bytes = len(line)
        self._granted = step_end(len(line))
        return True

    def _grow(self, line: bytes) -> bool:
        """Write beyond what is granted, if the part is not full and there is room. Nobody else may take some
        meanwhile, and all must see the new size after."""
        assert self._file is not None
        taken = self._room.taken(self._path)
        size, most = self._size + len(line), self._room.part_bytes(taken.open_parts + 1)
        if size > most and (self._size > self._header_bytes or size > self._room.part_bytes()):
            return False
        if not self._room.make(taken, held_for(size)):
            return False
        self._file.write(line)
        self._file.flush()
        self._size, self._granted = size, max(size, min(step_end(size), most))
        return True

    def _rotate(self) -> None:
        """Compress the part, in the room that is held for that, and begin another."""
        assert self._file is not None
        self._file.flush()
        compressed = self._path.with_name(f"{self._path.name}.gz")
        unfinished = compressed.with_name(f"{compressed.name}.tmp")
        kept = os.fstat(self._file.fileno()).st_nlink > 0  # somebody may have deleted it
        try:
            if kept:
                self._file.seek(0)
                with _create(unfinished) as target:
                    shutil.copyfileobj(self._file, target, 1 << 20)
            with self._room.alone():
                if kept:
                    unfinished.replace(compressed)
                    self._path.unlink(missing_ok=True)
                self._file.close()
                self._file = None
                self._begin()
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise


def _created(path: Path) -> BinaryIO:
    """A file that was not there before: where others may write too, a name could lead elsewhere. Who may read a
    recording learns which requests had the same beginnings: its owner only."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w+b")


def _create(path: Path) -> gzip.GzipFile:
    path.unlink(missing_ok=True)  # nobody writes there but this engine
    return _OwningGzip(_created(path))


class _OwningGzip(gzip.GzipFile):
    """Closes the file under it too. Written without a name and a time, which are nobody's business."""

    def __init__(self, raw: Any) -> None:
        super().__init__(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=raw, mtime=0)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()
