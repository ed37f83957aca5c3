"""`forebay plan`: how much host memory is worth giving, from a trace."""

from __future__ import annotations

import errno
import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from forebay.amounts import counted
from forebay.cli.output import UnwritableError, check_target, is_same, written
from forebay.config import parse_size
from forebay.errors import ConfigError
from forebay.plan.document import as_document
from forebay.plan.models import ModelKV, load_model
from forebay.plan.page import page
from forebay.plan.progress import Progress
from forebay.plan.run import USUAL_MODEL, Wanted, plan
from forebay.plan.text import as_text
from forebay.plan.traces import FileTrace, open_trace
from forebay.plan.traces.opening import SUFFIXES
from forebay.policies import policy_class

_TRACES = (".jsonl", ".ndjson", ".gz")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def run(options: Namespace) -> int:
    _check_targets(options)
    wanted = _wanted(options)
    trace = open_trace(
        options.trace,
        block_tokens=options.block_tokens,
        tokenizer=options.tokenizer,
        bytes_per_token=options.bytes_per_token,
        time_unit=options.time_unit,
        skip_bad_lines=options.skip_bad_lines,
    )
    progress = Progress(sys.stderr, "forebay plan")
    try:
        report = plan(trace, wanted, progress.show)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise UnwritableError(f"the temporary folder {gettempdir()} (see TMPDIR)", error) from None
    finally:
        progress.clear()
    _say_what_was_skipped(trace)
    document = json.dumps(as_document(report), indent=1)
    # Before anything is printed: `| head -1` ends a command that prints.
    if options.json not in (None, "-"):
        _write("--json", options.json, document)
    if options.html not in (None, "-"):
        _write("--html", options.html, page(report))
    if options.json == "-":
        print(document)
    else:
        print(page(report) if options.html == "-" else as_text(report))
    return 0


def _check_targets(options: Namespace) -> None:
    """That nothing is written over what is read, nor where it would be read next time."""
    if options.json == options.html == "-":
        raise ConfigError("--html", options.html, "a file: standard output has what --json gives")
    given = [("--json", options.json), ("--html", options.html)]
    given = [(option, name) for option, name in given if name not in (None, "-")]
    for option, name in given:
        check_target(option, name)
        if name.endswith(_TRACES):  # `plan --json trace.jsonl` would write over the trace
            raise ConfigError(option, name, "a file to be written, not named like a trace")
    targets = [(option, name, Path(name).resolve()) for option, name in given]
    for option, name, target in targets:
        if any(is_same(target, each) for each in _inputs(options)):
            raise ConfigError(option, name, "a file to be written, not one that is read")
        if target.name.endswith(SUFFIXES) and any(is_same(target.parent, Path(each)) for each in options.trace):
            raise ConfigError(option, name, f"a file elsewhere: in {target.parent} it would be part of the trace")
    if len(targets) == 2 and is_same(targets[0][2], targets[1][2]):
        raise ConfigError("--html", options.html, "another file than --json")


def _inputs(options: Namespace) -> Iterator[Path]:
    for path in map(Path, options.trace):
        yield path
        yield path.with_name(f"{path.name}.gz")  # is read if the other is not there
        with suppress(OSError):  # no folder, or none that can be read: open_trace() says so
            yield from (each for each in path.iterdir() if each.name.removesuffix(".gz").endswith(SUFFIXES))
    if options.tokenizer is not None:
        yield Path(options.tokenizer)
    if options.model is not None:
        yield from (Path(options.model), Path(options.model) / "config.json")


def _write(option: str, name: str, text: str) -> None:
    with written(option, name) as file:
        file.write(text + "\n")
    print(f"# {option[2:].upper()}: {name}", file=sys.stderr)


def _wanted(options: Namespace) -> Wanted:
    policies = _listed("--policy", options.policy)
    for policy in policies:
        policy_class(policy)  # raises if there is none
    speeds = (("--prefill-tokens-per-s", options.prefill_tokens_per_s), ("--bus-gb-per-s", options.bus_gb_per_s))
    for (option, value), (other, missing) in (speeds, speeds[::-1]):
        if value is not None and missing is None:
            raise ConfigError(option, value, f"both speeds or none: {other} too")
    return Wanted(
        model=_model(options),
        model_assumed=options.model is None and options.kv_bytes_per_token is None,
        device_bytes=None if options.device_memory is None else _size("--device-memory", options.device_memory),
        device_tokens=options.device_tokens,
        sizes=()
        if options.sizes is None
        else [_size("--sizes", each) for each in _listed("--sizes", options.sizes)],
        modes=("eager", "lazy") if options.mode == "both" else (options.mode,),
        policies=policies,
        target_share=options.target_hit_share,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        bus_bytes_per_s=None if options.bus_gb_per_s is None else options.bus_gb_per_s * 1e9,
        curve_only=options.curve_only,
        sample=options.sample or 1.0,
        processes=options.processes,
    )


def _model(options: Namespace) -> ModelKV:
    if options.model is not None and options.kv_bytes_per_token is not None:
        raise ConfigError("--kv-bytes-per-token", options.kv_bytes_per_token, "nothing beside --model")
    named = USUAL_MODEL if options.model is None and options.kv_bytes_per_token is None else options.model
    return load_model(
        named,
        tensor_parallel=options.tensor_parallel,
        cache_dtype=options.cache_dtype,
        kv_bytes_per_token=options.kv_bytes_per_token,
    )


def _listed(option: str, text: str) -> list[str]:
    found = [each.strip() for each in text.split(",")]
    if not all(found):
        raise ConfigError(option, text, "a list with commas between, and nothing empty")
    return list(dict.fromkeys(found))


def _size(option: str, text: str) -> int:
    size = parse_size(option, text)
    if size < 1:
        raise ConfigError(option, text, "at least one byte")
    return size


def _say_what_was_skipped(trace: FileTrace) -> None:
    if trace.skipped:
        first = ":" if trace.skipped == 1 else ", the first of them:"
        print(f"# skipped {counted(trace.skipped, 'bad line')}{first}", file=sys.stderr)
        for reason in trace.reasons:
            print(f"#   {reason}", file=sys.stderr)
