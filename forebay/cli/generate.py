"""`forebay generate`: a trace that nobody recorded."""

from __future__ import annotations

import sys
from argparse import Namespace

from forebay.cli.output import check_target, written
from forebay.plan.generate import as_lines, generate

_LIKE = ("sessions_per_s", "turns", "pause_s", "prefixes", "prefix_tokens", "input_tokens", "output_tokens")


def run(options: Namespace) -> int:
    to_stdout = options.output in (None, "-")
    if not to_stdout:
        check_target("--output", options.output)
    changes = {name: value for name in _LIKE if (value := getattr(options, name)) is not None}
    requests = generate(
        options.kind, requests=options.requests, seed=options.seed, block_tokens=options.block_tokens, **changes
    )
    if to_stdout:
        sys.stdout.writelines(as_lines(requests))
    else:
        with written("--output", options.output) as file:
            file.writelines(as_lines(requests))
    return 0
