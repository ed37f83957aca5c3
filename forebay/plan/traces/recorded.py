"""Forebay's own recordings, as forebay.recording writes them."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from xxhash import xxh3_64_intdigest

from forebay.amounts import counted
from forebay.errors import TraceError
from forebay.plan.traces.base import Record, Row, count, number, text
from forebay.plan.traces.lines import BadLineError, Lines, numbered_records, shown
from forebay.plan.traces.reading import Reading, check_time, size_of
from forebay.recording.parts import VERSION

MARK = "forebay_recording"
_ID_BYTES = 8
# How far is read ahead for the end of a request: requests, and bytes of their ids. One that has not ended by then,
# because it never did or because it takes so long, has no output.
_MAX_AHEAD = 1 << 14
_MAX_AHEAD_BYTES = 64 << 20
_MAX_UNKNOWN = 1 << 16  # blocks of an input without ids


@dataclass(slots=True)
class Part:
    path: Path
    recording: str
    number: int
    block_tokens: int

    @classmethod
    def of(cls, path: Path) -> Part | None:
        """By the first line. None if not even that was finished before its writer was killed."""
        with Lines(path) as lines:
            line, record = next(numbered_records(lines), (0, None))
            if record is None or (isinstance(record, BadLineError) and lines.torn):
                return None
            try:
                if isinstance(record, BadLineError):
                    raise record
                if record.get(MARK) != VERSION:
                    raise BadLineError(f"a recording of version {VERSION}", shown(record.get(MARK, record)))
                tokens = count(record, "block_tokens")
                if not tokens:
                    raise BadLineError("block_tokens of at least 1", "0")
                return cls(path, text(record, "recording"), count(record, "part"), tokens)
            except BadLineError as bad:
                raise bad.at(path, line) from None


@dataclass(slots=True)
class _Arrival:
    time: float
    input_tokens: int
    ids: bytes
    request: int
    output_tokens: int | None = None


class RecordedSource:
    """One recording: its parts, in order."""

    may_be_empty = True  # of an engine that nobody asked

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = sorted(parts, key=attrgetter("number"))
        self.path = self._parts[0].path
        self.num_bytes = sum(size_of(part.path) for part in parts)
        self.block_tokens = self._parts[0].block_tokens
        self._seed = xxh3_64_intdigest(self._parts[0].recording.encode())

    def start(self, reading: Reading) -> float | None:
        return next((entry.time for _, entry in self._entries(reading) if isinstance(entry, _Arrival)), None)

    def rows(self, reading: Reading) -> Iterator[Row]:
        """A request is given out once its end is known, and all before it."""
        running: dict[int, _Arrival] = {}
        order: deque[int] = deque()
        ahead_bytes = 0
        for request, entry in self._entries(reading):
            if isinstance(entry, _Arrival):
                running[request] = entry
                order.append(request)
                ahead_bytes += len(entry.ids)
            elif request in running:  # or its part is gone, or it was given up
                running[request].output_tokens = entry
            while order and (
                running[order[0]].output_tokens is not None
                or len(order) > _MAX_AHEAD
                or ahead_bytes > _MAX_AHEAD_BYTES
            ):
                arrival = running.pop(order.popleft())
                ahead_bytes -= len(arrival.ids)
                yield self._row(arrival)
        for request in order:
            yield self._row(running.pop(request))

    def _entries(self, reading: Reading) -> Iterator[tuple[int, _Arrival | int]]:
        before: float | None = None
        last = 0
        newest = self._parts[-1]
        for part in self._parts:
            # Whoever was writing the newest part may have been killed, or may still be writing.
            for line, record in reading.records(part.path, torn_end=part is newest):
                try:
                    if MARK in record:
                        continue
                    if "dropped" in record:
                        reading.dropped += count(record, "dropped")
                        continue
                    request = count(record, "request")
                    if "output_tokens" in record:
                        yield request, count(record, "output_tokens")
                        continue
                    if request <= last:
                        raise BadLineError(f"a request with a number above {last}", str(request))
                    arrival = self._arrival(record, request)
                    check_time(arrival.time, before)
                except BadLineError as bad:
                    reading.bad(bad.at(part.path, line))
                    continue
                last, before = request, arrival.time
                yield request, arrival

    def _arrival(self, record: Record, request: int) -> _Arrival:
        input_tokens = count(record, "input_tokens")
        encoded = text(record, "ids")
        try:
            ids = b64decode(encoded, validate=True)
        except ValueError:
            raise BadLineError("ids in base64", shown(encoded)) from None
        blocks, known = input_tokens // self.block_tokens, len(ids) // _ID_BYTES
        # An engine may not have hashed all of the input.
        if len(ids) % _ID_BYTES or not 0 <= blocks - known <= _MAX_UNKNOWN:
            wanted = f"{blocks * _ID_BYTES:,} bytes of ids for {counted(input_tokens, 'token')}"
            raise BadLineError(wanted, f"{len(ids):,}")
        return _Arrival(number(record, "time_s"), input_tokens, ids, request)

    def _row(self, arrival: _Arrival) -> Row:
        prefixes = [*struct.unpack(f"<{len(arrival.ids) // _ID_BYTES}Q", arrival.ids)]
        # What has no key is like nothing else.
        missing = -(-arrival.input_tokens // self.block_tokens) - len(prefixes)
        prefixes += [
            xxh3_64_intdigest(struct.pack("<QQ", arrival.request, place), self._seed) for place in range(missing)
        ]
        return Row(arrival.time, arrival.input_tokens, arrival.output_tokens or 0, prefixes)


def recordings(paths: Sequence[Path], reading: Reading) -> list[RecordedSource]:
    """Files that are parts, put together to the recordings that they are parts of."""
    by_recording: dict[str, dict[int, Part]] = {}
    first: Part | None = None
    for path in paths:
        try:
            part = Part.of(path)
            if part is None:
                continue
            first = first or part
            if part.block_tokens != first.block_tokens:
                expected = f"block_tokens {first.block_tokens}, as in {first.path.name}"
                raise TraceError(path, 1, expected, str(part.block_tokens))
        except TraceError as error:
            reading.bad(error)
            continue
        by_recording.setdefault(part.recording, {}).setdefault(part.number, part)
    if not by_recording:
        raise TraceError(paths[0], None, "a recording", "none that can be read")
    return [RecordedSource([*parts.values()]) for parts in by_recording.values()]
