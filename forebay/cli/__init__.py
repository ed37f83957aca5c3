"""The command `forebay`. What a command needs is imported when it runs, so that help is there at once."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from forebay import __version__
from forebay.cli.arguments import between, whole
from forebay.cli.plan_options import GENERATE, PLAN, add_generate, add_plan
from forebay.errors import ConfigError, ForebayError

_USAGE_EXIT = 2

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
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int]
    if options.command == "config":
        from forebay.cli.config import run
    elif options.command == "top":
        from forebay.cli.top import run
    elif options.command == "doctor":
        from forebay.cli.doctor import run
    elif options.command == "plan":
        from forebay.cli.plan import run
    else:
        from forebay.cli.generate import run
    try:
        return run(options)
    except ForebayError as error:
        print(f"forebay {options.command}: {error}", file=sys.stderr)
        return _USAGE_EXIT if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"forebay {options.command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at exit
        return 0
