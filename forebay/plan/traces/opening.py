"""Which files a trace has, and which format: found out from names and first lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike, fspath, scandir
from pathlib import Path

from forebay.amounts import counted
from forebay.errors import ConfigError, TraceError, is_whole
from forebay.plan.traces.base import Format, Record
from forebay.plan.traces.files import FileTrace
from forebay.plan.traces.hashed import Hashed
from forebay.plan.traces.lines import BadLineError, Lines, gzipped_name, numbered_records, reason_of, shown
from forebay.plan.traces.reading import FileSource, Reading
from forebay.plan.traces.recorded import MARK, recordings
from forebay.plan.traces.texts import Texts, request_of
from forebay.plan.traces.tokens import BLOCK_TOKENS, BYTES_PER_TOKEN, tokens_by

SUFFIXES = (".jsonl", ".ndjson", ".json")
_SAMPLE_LINES = 256
_SAMPLE_BYTES = 16 << 20
_KNOWN = (
    "fields of a trace: timestamp with hash_ids, input_length and output_length, or with input and output, or "
    "with messages; or those of a recording"
)

Path_ = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Options:
    block_tokens: int | None
    time_unit: str | None
    tokenizer: Path_ | None
    bytes_per_token: float


def open_trace(
    paths: Path_ | Sequence[Path_],
    *,
    block_tokens: int | None = None,
    tokenizer: Path_ | None = None,
    bytes_per_token: float = BYTES_PER_TOKEN,
    time_unit: str | None = None,
    skip_bad_lines: bool = False,
) -> FileTrace:
    """A trace in one file, several, or folders of them. Its format is that of the first line.

    `block_tokens` is what an id in the trace stands for, and found out from the lengths if not given; for texts it
    is what ids are made for. `tokenizer` is a tokenizer.json; without one, texts have a token for each
    `bytes_per_token` bytes. `time_unit` is "s", "ms", "us" or "ns", and found out too.

    Raises TraceError, with file and line, if the format is none we know. Reading raises the same for every line
    that is not as expected, unless `skip_bad_lines`: then they are counted.
    """
    if block_tokens is not None and (not is_whole(block_tokens) or block_tokens < 1):
        raise ConfigError("block_tokens", block_tokens, "a whole number of at least 1")
    options = Options(block_tokens, time_unit, tokenizer, bytes_per_token)
    given = [paths] if isinstance(paths, str | PathLike) else list(paths)
    if not given:
        raise ConfigError("trace", given, "at least one file or folder")
    name = ", ".join(Path(each).name or fspath(each) for each in given)
    files = _files(given)
    sample = _sample(files, skip_bad_lines)
    if MARK in sample[0]:
        return _open_recordings(name, files, options, skip_bad_lines)
    format_ = _format_of(sample, options)
    sources = [FileSource(path, place, format_) for place, path in enumerate(files)]
    return FileTrace(
        name,
        format_.name,
        sources,
        block_tokens=format_.block_tokens,
        seconds=format_.seconds,
        notes=format_.notes,
        skip_bad_lines=skip_bad_lines,
    )


def _open_recordings(name: str, files: Sequence[Path], options: Options, skip_bad_lines: bool) -> FileTrace:
    found = recordings(files, Reading(skip_bad_lines))
    tokens = found[0].block_tokens
    if options.block_tokens not in (None, tokens):
        raise ConfigError("block_tokens", options.block_tokens, f"{tokens}, as {found[0].path.name} was recorded")
    notes = [f"keys stand for whole blocks of {counted(tokens, 'token')}"]
    if len(found) > 1:
        notes.append(f"{len(found)} recordings, merged by time: no prefix of one is a prefix of another")
    return FileTrace(
        name, "recording", found, block_tokens=tokens, seconds=1.0, notes=notes, skip_bad_lines=skip_bad_lines
    )


def _files(given: Sequence[Path_]) -> list[Path]:
    found: list[Path] = []
    for each in map(Path, given):
        try:
            found += _in_folder(each) if each.is_dir() else [each]
        except OSError as error:
            raise TraceError(each, None, "a folder that can be read", reason_of(error)) from None
    for path in found:
        if not path.is_file() and not gzipped_name(path).is_file():
            got = "something else" if path.exists() else "nothing there"
            raise TraceError(path, None, "a file or a folder", got)
    return list(dict.fromkeys(found))


def _in_folder(folder: Path) -> list[Path]:
    """A file that is there both plain and gzipped is read once: gzipped, which was finished last."""
    with scandir(folder) as entries:
        # Not path.is_file(): one that was gzipped between the two would be missing both ways.
        names = {entry.name for entry in entries if entry.is_file() and _is_trace(entry.name)}
    if not names:
        named = ", ".join(f"*{suffix}" for suffix in SUFFIXES)
        raise TraceError(folder, None, f"a folder with files named {named}, or so with .gz", "none")
    return [folder / name for name in sorted(names) if f"{name}.gz" not in names]


def _is_trace(name: str) -> bool:
    return name.removesuffix(".gz").endswith(SUFFIXES) and not name.startswith(".")


def _sample(files: Sequence[Path], skip_bad_lines: bool) -> list[Record]:
    """The first lines of the first file that has any, from the first that is known on."""
    first_bad: TraceError | None = None
    for path in files:
        sample: list[Record] = []
        with Lines(path) as lines:
            for number, record in numbered_records(lines):
                if not isinstance(record, BadLineError) and (sample or _is_known(record)):
                    sample.append(record)
                elif not sample:
                    bad = record if isinstance(record, BadLineError) else BadLineError(_KNOWN, shown(record))
                    first_bad = first_bad or bad.at(path, number)
                    if not skip_bad_lines and not lines.torn:  # or its writer was killed at once
                        raise first_bad
                if number >= _SAMPLE_LINES or lines.bytes_read > _SAMPLE_BYTES:
                    break
        if sample:
            return sample
    raise first_bad or TraceError(files[0], None, "at least one request", "an empty file")


def _is_known(record: Record) -> bool:
    return MARK in record or "hash_ids" in record or request_of(record) is not None


def _format_of(sample: Sequence[Record], options: Options) -> Format:
    if "hash_ids" in sample[0]:
        return Hashed(sample, options.block_tokens, options.time_unit)
    block_tokens = options.block_tokens or BLOCK_TOKENS
    tokens = tokens_by(options.tokenizer, block_tokens, options.bytes_per_token)
    name = "text trace" if isinstance(sample[0].get("input"), str) else "request log"
    return Texts(sample, name, tokens, block_tokens, options.time_unit)
