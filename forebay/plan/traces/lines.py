"""Lines of a file, plain or gzipped by name, and JSON objects from lines. Nothing is held but the line at hand."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn, Self, cast

from forebay.errors import TraceError

MAX_LINE_BYTES = 64 << 20
"""A longer line is not a request. Without a bound, one file without line ends would fill the memory."""

_GZIP = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_SHOWN = 60
_SKIP_BYTES = 1 << 20


class BadLineError(Exception):
    """What is wrong with a line, before anybody says in which file."""

    def __init__(self, expected: str, got: str) -> None:
        super().__init__(f"expected {expected}, got {got}")
        self.expected = expected
        self.got = got

    def at(self, path: Path, line: int | None) -> TraceError:
        return TraceError(path, line, self.expected, self.got)


class Lines:
    """Reads a file once. Line numbers begin at 1; blank lines are passed over, but counted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.number = 0
        """Of the line that was read last."""
        self.torn = False
        """Whether that line has no end: the file stops in the middle of it, or simply without one."""
        self._file, is_gzipped = _opened(path)
        self._text: BinaryIO = self._file
        if is_gzipped:
            self._text = cast(BinaryIO, gzip.GzipFile(fileobj=self._file))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._text.close()
        self._file.close()

    @property
    def bytes_read(self) -> int:
        """Of the file as it lies on the disk."""
        return self._file.tell()

    def next(self) -> bytes | None:
        """The next line that is not blank, or None at the end. Raises BadLineError for one that is too long, and
        BrokenFileError if nothing more can be read."""
        while True:
            line = self._read(MAX_LINE_BYTES + 1)
            if not line:
                return None
            self.number += 1
            if self.number == 1:
                line = line.removeprefix(_BOM)
            self.torn = not line.endswith(b"\n")
            if len(line) > MAX_LINE_BYTES and self.torn:
                while (rest := self._read(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                    pass
                raise BadLineError(f"a line of at most {MAX_LINE_BYTES:,} bytes", "a longer one")
            if line := line.strip():
                return line

    def _read(self, size: int) -> bytes:
        try:
            return self._text.readline(size)
        except EOFError:
            self._fail("the rest of the compressed data", "its end: the file is truncated")
        except (gzip.BadGzipFile, zlib.error) as error:
            self._fail("gzip data, as the name says", str(error))
        except OSError as error:
            self._fail("a file that can be read", reason_of(error))

    def _fail(self, expected: str, got: str) -> NoReturn:
        self.number += 1
        raise BrokenFileError(expected, got) from None


def _opened(path: Path) -> tuple[BinaryIO, bool]:
    """The file, and whether it is gzipped: perhaps only since it was found, for engines go on recording."""
    try:
        try:
            return path.open("rb"), path.suffix == ".gz"
        except FileNotFoundError:
            if path.suffix == ".gz" or not (gzipped := gzipped_name(path)).exists():
                raise
            return gzipped.open("rb"), True
    except FileNotFoundError:
        # It was there when files were listed.
        got = "nothing any more; engines that still record delete old files: copy the folder, or try again"
        raise TraceError(path, None, "a file that can be read", got) from None
    except OSError as error:
        raise TraceError(path, None, "a file that can be read", reason_of(error)) from None


def gzipped_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.gz")


class BrokenFileError(BadLineError):
    """Nothing more can be read of this file."""


def parse(line: bytes) -> dict[str, Any]:
    """The JSON object in a line."""
    try:
        record = json.loads(line.decode(), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        if line.startswith(_GZIP):
            raise BadLineError("text, or a name that ends in .gz", "gzipped data") from None
        raise BadLineError("UTF-8 text", f"byte {line[error.start]:#04x} at column {error.start + 1}") from None
    except (ValueError, RecursionError):
        raise BadLineError("one JSON object", shown(line.decode(errors="replace"))) from None
    if not isinstance(record, dict):
        raise BadLineError("one JSON object", shown(record))
    return record


def numbered_records(lines: Lines) -> Iterator[tuple[int, dict[str, Any] | BadLineError]]:
    """Every line as a record, or as what is wrong with it."""
    while True:
        try:
            line = lines.next()
            if line is None:
                return
            yield lines.number, parse(line)
        except BadLineError as bad:
            yield lines.number, bad
            if isinstance(bad, BrokenFileError):
                return


def shown(value: object) -> str:
    """A value of a trace in a message: short, and on one line."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, list(value)[:8])) or 'nothing in it'}"
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def reason_of(error: OSError) -> str:
    return error.strerror or str(error)
