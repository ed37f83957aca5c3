"""Files that a command writes: whole or not at all, and one line about what cannot be written."""

from __future__ import annotations

import gzip
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from forebay.errors import ConfigError, ForebayError


class UnwritableError(ForebayError):
    """A disk that is full, or another reason that only comes up while writing."""

    def __init__(self, what: str, error: OSError) -> None:
        super().__init__(f"{what}: cannot be written: {error.strerror or error}")


def check_target(option: str, name: str | None) -> None:
    """Before anything expensive: whether a file can be written there. Raises ConfigError."""
    if name is None:
        return
    target, wanted = Path(name), "a file that can be written"
    try:
        wrong = target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK)
    except OSError as error:  # a name that is too long, or a folder nobody may look into
        raise ConfigError(option, name, f"{wanted} ({error.strerror})") from None
    if wrong:
        raise ConfigError(option, name, wanted)


def is_same(one: Path, other: Path) -> bool:
    """Whether two names are one file, or will be."""
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def written(option: str, name: str) -> Iterator[TextIO]:
    """A file that has its name once it is whole; until then, and if it never is, what was there stays.
    Packed if the name ends in .gz. Raises UnwritableError."""
    try:
        with _raw(Path(name)) as raw:
            if not name.endswith(".gz"):
                with io.TextIOWrapper(raw, "utf-8", "backslashreplace") as file:
                    yield file
                return
            # Without the time and its own name, so that equal traces are equal files.
            with (
                gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
                io.TextIOWrapper(packed, "utf-8") as file,
            ):
                yield file
    except OSError as error:
        raise UnwritableError(f"{option} {name}", error) from None


@contextmanager
def _raw(target: Path) -> Iterator[BinaryIO]:
    target = target.resolve()  # a link stays one
    if (target.exists() and not target.is_file()) or not os.access(target.parent, os.W_OK):
        with target.open("wb") as file:  # a device, a pipe, or a folder that takes no new files
            yield file
        return
    part = target.with_name(f".forebay-{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        if target.exists():
            shutil.copymode(target, part)
        part.replace(target)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
