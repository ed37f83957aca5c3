"""`forebay top`: servers that run Forebay, read from their /metrics: on a screen, as lines, or once."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import Namespace

from forebay.cli.top import plain
from forebay.cli.top.canvas import Look, Style
from forebay.cli.top.live import watch
from forebay.cli.top.scrape import Address

_LEAST_COLUMNS = 60
_USUAL = (120, 24)
_WITHOUT_EIGHTHS = ("linux", "vt100", "vt220")
"""Terminals whose fonts do not have what charts are made of."""


def run(options: Namespace) -> int:
    addresses = list(dict.fromkeys(map(Address.parse, options.url)))
    terminal = os.environ.get("TERM", "")
    unicode = "utf" in (sys.stdout.encoding or "").lower() and terminal not in _WITHOUT_EIGHTHS
    is_screen = sys.stdout.isatty() and terminal not in ("", "dumb")
    style = Style.NONE if not is_screen else Style.MONO if os.environ.get("NO_COLOR") else Style.COLOUR
    look = Look(style, unicode)
    if is_screen and not (options.once or options.json):
        keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        sys.stdout.flush()
        return watch(addresses, options.interval, sys.stdout.fileno(), keys, look)
    columns = max(_LEAST_COLUMNS, shutil.get_terminal_size(_USUAL).columns)
    if options.once or options.json:
        return plain.once(addresses, options.interval, look, columns, as_json=options.json)
    try:
        return plain.lines(addresses, options.interval, look, columns)
    except KeyboardInterrupt:  # that is how it ends
        return 128 + signal.SIGINT
