"""A trace in files: each is read once from front to back, and several are merged by time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from pathlib import Path

from forebay.errors import TraceError
from forebay.plan.request import TraceRequest
from forebay.plan.traces.base import Format, Row
from forebay.plan.traces.lines import BadLineError, Lines, numbered_records

_REASONS = 5
_LINES_BITS = 40


class Reading:
    """One pass over the files: how far it is, and what it left out."""

    def __init__(self, skip_bad_lines: bool) -> None:
        self.skipped = 0
        self.reasons: list[str] = []
        self._skips = skip_bad_lines
        self._done_bytes = 0
        self._open: set[Lines] = set()

    def bad(self, error: TraceError) -> None:
        """Raises it, unless bad lines are skipped."""
        if not self._skips:
            raise error
        self.skipped += 1
        if len(self.reasons) < _REASONS:
            self.reasons.append(str(error))

    def opened(self, lines: Lines) -> None:
        self._open.add(lines)

    def closed(self, lines: Lines, num_bytes: int) -> None:
        self._open.discard(lines)
        self._done_bytes += num_bytes

    @property
    def bytes_read(self) -> int:
        return self._done_bytes + sum(lines.bytes_read for lines in self._open)


class Source:
    """One file of a trace."""

    def __init__(self, path: Path, place: int) -> None:
        self.path = path
        self.first_time = 0.0
        try:
            self.num_bytes = path.stat().st_size
        except OSError as error:
            raise TraceError(path, None, "a file that can be read", error.strerror or str(error)) from None
        self._place = place << _LINES_BITS

    def rows(self, format_: Format, reading: Reading) -> Iterator[Row]:
        """In the order of the file, which must be that of time."""
        before: float | None = None
        try:
            lines = Lines(self.path)
        except TraceError as error:
            reading.bad(error)
            return
        reading.opened(lines)
        try:
            for number, record in numbered_records(lines):
                try:
                    if isinstance(record, BadLineError):
                        raise record
                    row = format_.row(record, self._place + number)
                    if before is not None and row.time < before:
                        raise BadLineError(f"a time of at least {before}, as on a line before", str(row.time))
                except BadLineError as bad:
                    reading.bad(bad.at(self.path, number))
                    continue
                before = row.time
                yield row
        finally:
            lines.close()
            reading.closed(lines, self.num_bytes)


class FileTrace:
    """Implements Trace. `notes` says what was assumed about the files; `skipped` and `reasons` what the last pass
    over them left out."""

    def __init__(self, name: str, sources: Sequence[Source], format_: Format, *, skip_bad_lines: bool) -> None:
        self.name = name
        self.format = format_.name
        self.block_tokens = format_.block_tokens
        self.has_times = format_.seconds is not None
        self.notes = tuple(format_.notes)
        self.num_bytes: int | None = sum(source.num_bytes for source in sources)
        self._format = format_
        self._skips = skip_bad_lines
        self._reading = Reading(skip_bad_lines)
        self._sources = self._with_requests(sources)

    @property
    def bytes_read(self) -> int:
        return self._reading.bytes_read

    @property
    def skipped(self) -> int:
        """Lines that were skipped because they were bad."""
        return self._reading.skipped

    @property
    def reasons(self) -> Sequence[str]:
        """What was wrong with the first few of them."""
        return tuple(self._reading.reasons)

    def __iter__(self) -> Iterator[TraceRequest]:
        reading = self._reading = Reading(self._skips)
        start: float | None = None
        for row in self._merged(reading):
            if start is None:
                start = row.time
            time_s = (row.time - start) * (self._format.seconds or 0)
            yield TraceRequest(time_s, row.input_tokens, row.output_tokens, row.prefixes)

    def _with_requests(self, sources: Sequence[Source]) -> list[Source]:
        """Those that have any, by the time of their first: a file is opened only when its time has come."""
        found = []
        for source in sources:
            reading = Reading(self._skips)
            first = next(source.rows(self._format, reading), None)
            if first is not None:
                source.first_time = first.time
                found.append(source)
            elif not reading.skipped:
                error = TraceError(source.path, None, "at least one request", "an empty file")
                if len(sources) == 1 or not self._skips:
                    raise error
        if not found:
            raise TraceError(sources[0].path, None, "at least one request", "only lines that are bad")
        return sorted(found, key=lambda source: source.first_time)

    def _merged(self, reading: Reading) -> Iterator[Row]:
        waiting = deque(enumerate(self._sources))
        heap: list[tuple[float, int, Row, Iterator[Row]]] = []
        while waiting or heap:
            while waiting and (not heap or waiting[0][1].first_time <= heap[0][0]):
                order, source = waiting.popleft()
                rows = source.rows(self._format, reading)
                if (row := next(rows, None)) is not None:
                    heappush(heap, (row.time, order, row, rows))
            if not heap:
                return
            _, order, row, rows = heap[0]
            yield row
            if (row := next(rows, None)) is None:
                heappop(heap)
            else:
                heapreplace(heap, (row.time, order, row, rows))
