"""`forebay generate`: a trace that nobody recorded."""

from __future__ import annotations

import gzip
import io
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from forebay.cli.arguments import check_target
from forebay.plan.generate import as_lines, generate

_LIKE = ("sessions_per_s", "turns", "pause_s", "prefixes", "prefix_tokens", "input_tokens", "output_tokens")


def run(options: Namespace) -> int:
    check_target("--output", options.output)
    changes = {name: value for name in _LIKE if (value := getattr(options, name)) is not None}
    requests = generate(
        options.kind, requests=options.requests, seed=options.seed, block_tokens=options.block_tokens, **changes
    )
    with _opened(options.output) as file:
        file.writelines(as_lines(requests))
    return 0


@contextmanager
def _opened(name: str | None) -> Iterator[TextIO]:
    if name is None:
        yield sys.stdout
    elif name.endswith(".gz"):
        # Without the time and its own name, so that equal traces are equal files.
        with (
            open(name, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
            io.TextIOWrapper(packed) as file,
        ):
            yield file
    else:
        with open(name, "w") as file:
            yield file
