"""A trace as numbers in a temporary file: read and checked once, then read again by every replay in no time.

Eight bytes a block, whatever the format of the trace was. Nothing of it is held in memory.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

from forebay.plan.report import Totals
from forebay.plan.request import Trace, TraceRequest

_HEAD = struct.Struct("<dqqI")
_ID = (1 << 64) - 1
_BUFFER = 1 << 20


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Spool:
    """A trace that was read whole. Small to send to another process: only a name and a few numbers."""

    def __init__(self, path: Path, name: str, block_tokens: int, num_bytes: int) -> None:
        self.path, self.name, self.block_tokens = path, name, block_tokens
        self.num_bytes: int | None = num_bytes
        self.bytes_read = 0

    def __iter__(self) -> Iterator[TraceRequest]:
        self.bytes_read = 0
        with self.path.open("rb", _BUFFER) as file:
            while head := file.read(_HEAD.size):
                time_s, input_tokens, output_tokens, blocks = _HEAD.unpack(head)
                prefixes = array("Q")
                prefixes.fromfile(file, blocks)
                self.bytes_read += _HEAD.size + 8 * blocks
                yield TraceRequest(time_s, input_tokens, output_tokens, prefixes)


class Spooling:
    """A trace that is read for the first time. At its end there is a spool of it, and what it holds is known."""

    def __init__(self, trace: Trace, path: Path) -> None:
        self._trace, self._path = trace, path
        self.name, self.block_tokens = trace.name, trace.block_tokens
        self._spool: Spool | None = None
        self._requests = self._input_tokens = self._output_tokens = self._longest_tokens = 0
        self._duration_s = 0.0

    @property
    def num_bytes(self) -> int | None:
        return self._trace.num_bytes

    @property
    def bytes_read(self) -> int:
        return self._trace.bytes_read

    def __iter__(self) -> Iterator[TraceRequest]:
        requests = inputs = outputs = longest = 0
        last_s = 0.0
        with open(self._path, "wb", _BUFFER, opener=_private) as file:
            for request in self._trace:
                ids = array("Q", [each & _ID for each in request.prefixes])
                file.write(_HEAD.pack(request.time_s, request.input_tokens, request.output_tokens, len(ids)))
                ids.tofile(file)
                requests += 1
                inputs += request.input_tokens
                outputs += request.output_tokens
                longest = max(longest, request.input_tokens + request.output_tokens)
                last_s = request.time_s
                yield request
            num_bytes = file.tell()
        self._requests, self._input_tokens, self._output_tokens = requests, inputs, outputs
        self._longest_tokens, self._duration_s = longest, last_s
        self._spool = Spool(self._path, self.name, self.block_tokens, num_bytes)

    @property
    def spool(self) -> Spool:
        if self._spool is None:
            raise ValueError("the trace has not been read to its end")
        return self._spool

    @property
    def totals(self) -> Totals:
        return Totals(
            self.name,
            self.block_tokens,
            self._requests,
            self._input_tokens,
            self._output_tokens,
            self._longest_tokens,
            self._duration_s,
            getattr(self._trace, "skipped", 0),
            getattr(self._trace, "notes", ()),
            getattr(self._trace, "dropped", 0),
        )
