"""The files of a recording: plain while written, gzipped after, and never more than so many bytes together."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

VERSION = 1
LEAST_BYTES = 1_000_000
_NAMED = re.compile(r"forebay-\d{8}T\d{6}Z-[0-9a-f]{16}-\d{6}\.jsonl(\.gz(\.tmp)?)?")
_SHARE = 8
_MAX_PART_BYTES = 64 << 20
_COMPRESSION = 1  # keys are as good as random: more effort finds nothing more


class Parts:
    """Writes lines. Every part begins with a header, so that each can be read without the others. All recordings
    in the folder share the bound: the oldest part goes first, whose ever it is.

    Raises OSError, from any method."""

    def __init__(self, folder: Path, recording: str, block_tokens: int, max_bytes: int) -> None:
        self._folder = folder
        self._recording = recording
        self._block_tokens = block_tokens
        self._max_bytes = max_bytes
        self._part_bytes = min(_MAX_PART_BYTES, max_bytes // _SHARE)
        self._number = 0
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._begin()

    @property
    def path(self) -> Path:
        """Of the part that is being written."""
        return self._path

    def write(self, record: dict[str, Any]) -> bool:
        """False if the line is too long for any part."""
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        if self._size + len(line) > self._part_bytes:
            if self._header_bytes + len(line) > self._part_bytes:
                return False
            self._rotate()
        self._file.write(line)
        self._size += len(line)
        return True

    def flush(self) -> None:
        """What was written is the system's now: killing this process does not lose it."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _begin(self) -> None:
        self._prune()
        self._number += 1
        # Names sort by time, across recordings too.
        began = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self._path = self._folder / f"forebay-{began}-{self._recording}-{self._number:06}.jsonl"
        # Who may read a recording learns which requests had the same beginnings: its owner only.
        self._file = os.fdopen(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")
        self._size = 0
        header = {"forebay_recording": VERSION, "recording": self._recording, "part": self._number}
        self._header_bytes = self._file.write(
            json.dumps({**header, "block_tokens": self._block_tokens}, separators=(",", ":")).encode() + b"\n"
        )
        self._size = self._header_bytes

    def _rotate(self) -> None:
        self._file.close()
        self._prune()
        compressed = self._path.with_name(f"{self._path.name}.gz")
        unfinished = compressed.with_name(f"{compressed.name}.tmp")
        try:
            with self._path.open("rb") as source, _create(unfinished) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            unfinished.replace(compressed)
            self._path.unlink()
        except FileNotFoundError:
            pass  # another engine with the same folder found it the oldest
        self._begin()

    def _prune(self) -> None:
        """Make room for a part and for its compressed copy."""
        found = []
        for path in sorted(self._folder.iterdir()):
            if not _NAMED.fullmatch(path.name):
                continue  # not ours to delete
            try:
                found.append((path, path.stat().st_size))
            except FileNotFoundError:
                continue
        room = self._max_bytes - 2 * self._part_bytes
        total = sum(size for _, size in found)
        for path, size in found:
            if total <= room:
                return
            if self._number and path == self._path:
                continue  # about to be compressed; it has its room
            path.unlink(missing_ok=True)
            total -= size


def _create(path: Path) -> gzip.GzipFile:
    raw = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
    return _OwningGzip(raw)


class _OwningGzip(gzip.GzipFile):
    """Closes the file under it too. Written without a name and a time, which are nobody's business."""

    def __init__(self, raw: Any) -> None:
        super().__init__(filename="", mode="wb", compresslevel=_COMPRESSION, fileobj=raw, mtime=0)
        self._raw = raw

    def close(self) -> None:
        super().close()
        self._raw.close()
