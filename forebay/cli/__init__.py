"""The command `forebay`. What a command needs is imported when it runs, so that help is there at once."""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FrameType
from typing import NoReturn, TextIO

from forebay import __version__
from forebay.cli.arguments import between, whole
from forebay.cli.plan_options import GENERATE, PLAN, add_generate, add_plan
from forebay.errors import ConfigError, ForebayError

_USAGE_EXIT = 2
_OPTIONS = {"eviction_policy": "policy"}
_POSITIONAL = ("trace", "kind", "url", "command")

_CONFIG = """\
Prints the JSON for vLLM's --kv-transfer-config, in one line. What it means goes to standard error.

  vllm serve MODEL --kv-transfer-config "$(forebay config --memory 64GB)"

With --check, says what is wrong with one. Exit code: 0, or 1 if an engine would refuse it or not offload."""

_DOCTOR = """\
Says what on this machine, in the vLLM installed or in its settings stands in Forebay's way, and what to type.

Exit code: 0 if all is well, 1 with warnings, 2 with errors."""

_TOP = """\
Shows what Forebay does in one or more vLLM servers, from their /metrics, until q or Ctrl-C.

  forebay top http://localhost:8000

Where there is no screen to draw on, prints a line for every answer."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_EXIT, f"{self.prog}: {message} (--help lists what there is)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="forebay", description="Keeps the KV cache of LLM prompts in host memory.")
    parser.add_argument("--version", action="version", version=f"forebay {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, short: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, help=short, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
        )

    config = command("config", "print or check the JSON for --kv-transfer-config", _CONFIG)
    memory = "host memory: 64GB, 50%% of this machine or container, or for each rank: 16GB/rank"
    config.add_argument("--memory", metavar="SIZE", help=f"{memory} (default: 8GiB)")
    config.add_argument("--mode", choices=("eager", "lazy"), help="when blocks are stored (default: eager)")
    config.add_argument("--policy", metavar="NAME", help="lru, s3fifo, arc or module:Class (default: lru)")
    config.add_argument("--verify", choices=("all", "sampled", "off"), help="which loads (default: all)")
    config.add_argument("--ranks", metavar="N", type=whole(1), help="also say what each of N ranks gets")
    config.add_argument("--model", metavar="DIR", help="also say how many tokens of this model fit")
    config.add_argument("--check", metavar="FILE", help="say what is wrong with this file; - is standard input")

    doctor = command("doctor", "say what stands in the way, and what to type", _DOCTOR)
    doctor.add_argument("--memory", metavar="SIZE", help=f"{memory} (default: what --config says, or 8GiB)")
    doctor.add_argument(
        "--config", metavar="FILE", help="also check vLLM's settings, as JSON; - is standard input"
    )
    doctor.add_argument("--json", action="store_true", help="for scripts")

    top = command("top", "watch servers that run Forebay", _TOP)
    top.add_argument("url", metavar="URL", nargs="+", help="a server, such as http://localhost:8000")
    top.add_argument(
        "--interval",
        metavar="SECONDS",
        type=between(0.2, 3600, "seconds"),
        default=2.0,
        help="between two scrapes (default: 2)",
    )
    top.add_argument("--once", action="store_true", help="print what two scrapes say, and end")
    top.add_argument("--json", action="store_true", help="the same for scripts")

    add_plan(command("plan", "say how much host memory is worth giving, from a trace", PLAN))
    add_generate(command("generate", "make a trace of chats, agents or shared prefixes", GENERATE))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    _open_what_is_closed()
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that a terminal cannot show is no reason to end
    name, options = "forebay", argparse.Namespace()
    try:
        try:
            _parser().parse_args(arguments, options)
            name = f"forebay {options.command}"
            run = _command(options.command)
            with nullcontext() if options.command == "top" else _ending_in_order():  # top sees to that itself
                code = run(options)
        except SystemExit as end:  # of argparse: help, or a wrong command line
            code = end.code if isinstance(end.code, int) else 0
        sys.stdout.flush()  # here, where it can be said that it fails
        return code
    except ConfigError as error:
        return _fail(name, _with_option(error, options), _USAGE_EXIT)
    except ForebayError as error:
        return _fail(name, str(error), 1)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", 128 + signal.SIGINT)
    except _Ended as ended:
        return _fail(name, "ended", 128 + ended.signal)
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        return 0
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(name, f"{where}{error.strerror or error}", 1)
    finally:
        for stream in (sys.stdout, sys.stderr):
            _let_go(stream)


def _command(name: str) -> Callable[[argparse.Namespace], int]:
    run: Callable[[argparse.Namespace], int]
    if name == "config":
        from forebay.cli.config import run
    elif name == "top":
        from forebay.cli.top import run
    elif name == "doctor":
        from forebay.cli.doctor import run
    elif name == "plan":
        from forebay.cli.plan import run
    else:
        from forebay.cli.generate import run
    return run


class _Ended(BaseException):
    def __init__(self, signal_: int) -> None:
        self.signal = signal_


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """Being ended is an exception, like Control-C: files that are half written and folders for a while go away."""

    def end(signal_: int, frame: FrameType | None) -> NoReturn:
        raise _Ended(signal_)

    if threading.current_thread() is not threading.main_thread():
        yield  # only that one may say so
        return
    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
    for each in heard:  # not those that `nohup` has turned off
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)


def _with_option(error: ConfigError, options: argparse.Namespace) -> str:
    """Settings by the names that they have on the command line."""
    line, setting = str(error), error.setting
    typed = {name: f"--{name.replace('_', '-')}" for name in vars(options) if name not in _POSITIONAL}
    option = typed.get(_OPTIONS.get(setting, setting))
    if option is not None and line.startswith(f"{setting}: "):
        line = f"{option}{line.removeprefix(setting)}"
    # Names without one are words like others, and those in a path are not settings.
    allowed = re.sub(r"(?<![\w/'])\w+_\w+(?![\w/'])", lambda name: typed.get(name[0], name[0]), error.allowed)
    return line.replace(error.allowed, allowed, 1)


def _fail(name: str, line: str, code: int) -> int:
    with suppress(OSError):  # who does not read it has the exit code
        print(f"{name}: {line}", file=sys.stderr)
    return code


def _open_what_is_closed() -> None:
    """After `>&-` there is no stream at all, and the next file opened would take its place."""
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _let_go(stream: TextIO) -> None:
    """What cannot be written any more is dropped, or Python complains about it at exit."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
