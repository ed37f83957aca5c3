"""Which files a trace has, and which format: found out from names and first lines."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from forebay.errors import ConfigError, TraceError, is_whole
from forebay.plan.traces.base import Format, Record
from forebay.plan.traces.files import FileTrace, Source
from forebay.plan.traces.hashed import Hashed
from forebay.plan.traces.lines import BadLineError, Lines, numbered_records, shown

SUFFIXES = (".jsonl", ".ndjson", ".json")
_SAMPLE_LINES = 256
_SAMPLE_BYTES = 16 << 20
_FORMATS = "timestamp, input_length, output_length and hash_ids"

Paths = str | PathLike[str] | Sequence[str | PathLike[str]]


def open_trace(
    paths: Paths,
    *,
    block_tokens: int | None = None,
    time_unit: str | None = None,
    skip_bad_lines: bool = False,
) -> FileTrace:
    """A trace in one file, several, or folders of them. Its format is that of the first line. Raises TraceError with
    the file and the line if that is none we know, and when it is read for any line that is not as expected, unless
    `skip_bad_lines`."""
    if block_tokens is not None and (not is_whole(block_tokens) or block_tokens < 1):
        raise ConfigError("block_tokens", block_tokens, "a whole number of at least 1")
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not given:
        raise ConfigError("paths", given, "at least one file or folder")
    sources = [Source(path, place) for place, path in enumerate(_files(given))]
    format_ = _format_of(sources, block_tokens, time_unit, skip_bad_lines)
    name = ", ".join(Path(each).name or fspath(each) for each in given)
    return FileTrace(name, sources, format_, skip_bad_lines=skip_bad_lines)


def _files(given: Sequence[str | PathLike[str]]) -> list[Path]:
    found: list[Path] = []
    for each in map(Path, given):
        if each.is_dir():
            inside = sorted(path for path in each.iterdir() if path.is_file() and _is_trace(path))
            if not inside:
                raise TraceError(each, None, f"a folder with files named {_named()}", "none")
            found += inside
        elif each.is_file():
            found.append(each)
        else:
            got = "something else" if each.exists() else "nothing there"
            raise TraceError(each, None, "a file or a folder", got)
    return list(dict.fromkeys(found))


def _is_trace(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(SUFFIXES) and not path.name.startswith(".")


def _named() -> str:
    return ", ".join(f"*{suffix}" for suffix in SUFFIXES) + " or one of these with .gz"


def _format_of(
    sources: Sequence[Source], block_tokens: int | None, time_unit: str | None, skip_bad_lines: bool
) -> Format:
    """By the first lines of the first file that has any."""
    for source in sources:
        sample: list[Record] = []
        with Lines(source.path) as lines:
            for number, record in numbered_records(lines):
                if not isinstance(record, BadLineError):
                    sample.append(record)
                elif not skip_bad_lines and not sample:
                    raise record.at(source.path, number)
                if not skip_bad_lines and len(sample) == 1 and not _is_hashed(sample[0]):
                    raise TraceError(source.path, number, _FORMATS, shown(sample[0]))
                if number >= _SAMPLE_LINES or lines.bytes_read > _SAMPLE_BYTES:
                    break
        sample = [record for record in sample if _is_hashed(record)]
        if sample:
            return Hashed(sample, block_tokens, time_unit)
        if number_of_lines := lines.number:
            raise TraceError(source.path, number_of_lines, _FORMATS, "nothing like it so far")
    raise TraceError(sources[0].path, None, "at least one request", "an empty file")


def _is_hashed(record: Record) -> bool:
    return "hash_ids" in record
