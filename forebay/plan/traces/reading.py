"""One pass over the files of a trace: how far it is, and what it left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from pathlib import Path
from typing import Protocol

from forebay.errors import TraceError
from forebay.plan.traces.base import Format, Record, Row
from forebay.plan.traces.lines import BadLineError, Lines, gzipped_name, numbered_records

_REASONS = 5
_LINES_BITS = 40
_MAX_AHEAD_IDS = 1 << 20


class Reading:
    def __init__(self, skip_bad_lines: bool) -> None:
        self.skipped = 0
        self.reasons: list[str] = []
        self.dropped = 0
        """Requests that the recording itself says it has not got."""
        self._skips = skip_bad_lines
        self._done_bytes = 0
        self._open: set[Lines] = set()

    @property
    def bytes_read(self) -> int:
        return self._done_bytes + sum(lines.bytes_read for lines in self._open)

    def bad(self, error: TraceError) -> None:
        """Raises it, unless bad lines are skipped."""
        if not self._skips:
            raise error
        self.skipped += 1
        if len(self.reasons) < _REASONS:
            self.reasons.append(str(error))

    def records(self, path: Path, *, torn_end: bool = False) -> Iterator[tuple[int, Record]]:
        """Lines with their numbers. With `torn_end`, a last line that its writer did not finish is none."""
        try:
            lines = Lines(path)
        except TraceError as error:
            self.bad(error)
            return
        self._open.add(lines)
        try:
            for number, record in numbered_records(lines):
                if not isinstance(record, BadLineError):
                    yield number, record
                elif not (torn_end and lines.torn):
                    self.bad(record.at(path, number))
        finally:
            self._open.remove(lines)
            self._done_bytes += lines.bytes_read
            lines.close()


class Source(Protocol):
    """Rows in the order of time."""

    may_be_empty: bool

    @property
    def path(self) -> Path: ...

    @property
    def num_bytes(self) -> int: ...

    def start(self, reading: Reading) -> float | None:
        """The time of the first row, for little work. None if there is no row."""

    def rows(self, reading: Reading) -> Iterator[Row]: ...


class FileSource:
    """One file, one request a line."""

    may_be_empty = False

    def __init__(self, path: Path, place: int, format_: Format) -> None:
        self.path = path
        self.num_bytes = size_of(path)
        self._place = place << _LINES_BITS
        self._format = format_

    def start(self, reading: Reading) -> float | None:
        times: list[float] = []
        for number, record in reading.records(self.path):
            try:
                # A file of another format is found out now, and not after an hour.
                times.append(self._format.time(record) if times else self._format.row(record, number).time)
            except BadLineError as bad:
                reading.bad(bad.at(self.path, number))
            if len(times) > self._format.late_lines:
                break
        return min(times, default=None)

    def rows(self, reading: Reading) -> Iterator[Row]:
        before: float | None = None
        for number, row in self._in_order(reading):
            try:
                check_time(row.time, before)
            except BadLineError as bad:
                reading.bad(bad.at(self.path, number))
                continue
            before = row.time
            yield row

    def _in_order(self, reading: Reading) -> Iterator[tuple[int, Row]]:
        """By time, of those lines that are not too late."""
        ahead: list[tuple[float, int, Row]] = []
        ahead_ids = 0
        for number, row in self._numbered(reading):
            heappush(ahead, (row.time, number, row))
            ahead_ids += len(row.prefixes)
            while len(ahead) > self._format.late_lines or ahead_ids > _MAX_AHEAD_IDS:
                _, due, earliest = heappop(ahead)
                ahead_ids -= len(earliest.prefixes)
                yield due, earliest
        while ahead:
            _, due, earliest = heappop(ahead)
            yield due, earliest

    def _numbered(self, reading: Reading) -> Iterator[tuple[int, Row]]:
        for number, record in reading.records(self.path):
            try:
                yield number, self._format.row(record, self._place + number)
            except BadLineError as bad:
                reading.bad(bad.at(self.path, number))


def check_time(time: float, before: float | None) -> None:
    if before is not None and time < before:
        raise BadLineError(f"a time of at least {before}, as on lines before: sort by time", str(time))


def size_of(path: Path) -> int:
    """0 if it has gone: who reads it says so."""
    for each in (path, gzipped_name(path)):
        with suppress(OSError):
            return each.stat().st_size
    return 0


def total_bytes(sources: Sequence[Source]) -> int:
    return sum(source.num_bytes for source in sources)
