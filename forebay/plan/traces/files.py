"""A trace in files: each is read once from front to back, and several are merged by time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush, heapreplace
from operator import itemgetter

from forebay.errors import TraceError
from forebay.plan.request import TraceRequest
from forebay.plan.traces.base import Row
from forebay.plan.traces.reading import Reading, Source, total_bytes


class FileTrace:
    """Implements Trace."""

    def __init__(
        self,
        name: str,
        format_: str,
        sources: Sequence[Source],
        *,
        block_tokens: int,
        seconds: float | None,
        notes: Sequence[str],
        skip_bad_lines: bool,
    ) -> None:
        """`seconds` in one unit of the rows' times, None if they have none."""
        self.name = name
        self.format = format_
        self.block_tokens = block_tokens
        self.has_times = seconds is not None
        self.notes = tuple(notes)
        """What was assumed about the files, in words."""
        self._total_bytes = total_bytes(sources)
        self._seconds = seconds or 0.0
        self._skips = skip_bad_lines
        self._reading = Reading(skip_bad_lines)
        self._sources = self._with_requests(sources)

    @property
    def num_bytes(self) -> int:
        """As the files were when they were opened."""
        return self._total_bytes

    @property
    def bytes_read(self) -> int:
        # A recording may grow while it is read.
        return min(self._reading.bytes_read, self._total_bytes)

    @property
    def skipped(self) -> int:
        """Lines that the last pass has skipped because they were bad, and files that it could not read on."""
        return self._reading.skipped

    @property
    def reasons(self) -> Sequence[str]:
        """What was wrong with the first few of them."""
        return tuple(self._reading.reasons)

    @property
    def dropped(self) -> int:
        """Requests that a recording says it has not got, by the last pass."""
        return self._reading.dropped

    def __iter__(self) -> Iterator[TraceRequest]:
        reading = self._reading = Reading(self._skips)
        start: float | None = None
        for time, input_tokens, output_tokens, prefixes in self._merged(reading):
            if start is None:
                start = time
            yield TraceRequest((time - start) * self._seconds, input_tokens, output_tokens, prefixes)

    def _with_requests(self, sources: Sequence[Source]) -> list[tuple[float, Source]]:
        """Those that have any, by the time of their first: a file is opened only when its time has come."""
        found = []
        for source in sources:
            reading = Reading(self._skips)
            start = source.start(reading)
            if start is not None:
                found.append((start, source))
            elif not reading.skipped and not source.may_be_empty:
                reading.bad(TraceError(source.path, None, "at least one request", "an empty file"))
        if not found:
            raise TraceError(sources[0].path, None, "at least one request", "none that can be read")
        return sorted(found, key=itemgetter(0))

    def _merged(self, reading: Reading) -> Iterator[Row]:
        waiting = deque(enumerate(self._sources))
        heap: list[tuple[float, int, Row, Iterator[Row]]] = []  # no two have the same number
        while waiting or heap:
            while waiting and (not heap or waiting[0][1][0] < heap[0][0]):
                number, (_, source) = waiting.popleft()
                rows = source.rows(reading)
                if (row := next(rows, None)) is not None:
                    heappush(heap, (row.time, number, row, rows))
            if not heap:
                return
            _, number, row, rows = heap[0]
            yield row
            following = next(rows, None)
            if following is None:
                heappop(heap)
            else:
                heapreplace(heap, (following.time, number, following, rows))
