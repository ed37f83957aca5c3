"""What `forebay plan` and `forebay generate` are asked for, on the command line."""

from __future__ import annotations

import argparse

from forebay.cli.arguments import between, positive, share, whole

PLAN = """\
Says how much host memory is worth giving, from a trace of requests.

  forebay plan trace.jsonl --model Llama-3.1-8B --device-memory 40GB --html plan.html

A trace is a file, several, or a folder: one JSON object a line, with timestamp and hash_ids, input and output,
or messages; or what a running engine has recorded. Names that end in .gz are unpacked.
Exit code: 0, 1 if the trace cannot be read, 2 if the command line is wrong."""

GENERATE = """\
Makes a trace, for forebay plan: chats that go on, agents whose prompts grow step by step, or questions that
share a few long prefixes. Equal options give equal traces.

  forebay generate chat > chat.jsonl && forebay plan chat.jsonl"""


def add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", nargs="+", help="a file or a folder")

    trace = parser.add_argument_group("the trace")
    trace.add_argument(
        "--block-tokens", metavar="N", type=whole(1), help="tokens of a block (default: as in the trace)"
    )
    trace.add_argument("--time-unit", choices=("s", "ms", "us", "ns"), help="of timestamps (default: found out)")
    trace.add_argument(
        "--tokenizer", metavar="FILE", help="a tokenizer.json, for traces of texts (default: 4 bytes a token)"
    )
    trace.add_argument(
        "--bytes-per-token", metavar="N", type=positive, default=4.0, help="without a tokenizer (default: 4)"
    )
    trace.add_argument("--skip-bad-lines", action="store_true", help="count them and go on")

    engine = parser.add_argument_group("the engine")
    engine.add_argument("--model", metavar="NAME|DIR", help="a built-in name, or a folder with a config.json")
    engine.add_argument(
        "--kv-bytes-per-token", metavar="N", type=whole(1), help="of all ranks together, instead of --model"
    )
    engine.add_argument("--tensor-parallel", metavar="N", type=whole(1), default=1, help="ranks (default: 1)")
    engine.add_argument(
        "--cache-dtype", metavar="TYPE", default="auto", help="of the KV cache, such as fp8 (default: 16 bits)"
    )
    device = engine.add_mutually_exclusive_group()
    device.add_argument(
        "--device-memory", metavar="SIZE", help="for KV, of all ranks together (default: 40GB a rank)"
    )
    device.add_argument(
        "--device-tokens", metavar="N", type=whole(1), help="the same in tokens, as vLLM's log has it"
    )
    engine.add_argument(
        "--prefill-tokens-per-s", metavar="N", type=positive, help="with --bus-gb-per-s: predict TTFT"
    )
    engine.add_argument("--bus-gb-per-s", metavar="N", type=positive, help="between host and device, each way")

    what = parser.add_argument_group("what is tried")
    what.add_argument("--sizes", metavar="LIST", help="host memory, as 16GB,32GB (default: eight around the knee)")
    what.add_argument("--mode", choices=("eager", "lazy", "both"), default="eager", help="(default: eager)")
    what.add_argument(
        "--policy", metavar="LIST", default="lru", help="lru, s3fifo, arc, module:Class (default: lru)"
    )
    what.add_argument(
        "--target-hit-share",
        metavar="SHARE",
        type=share,
        help="of blocks, as 30%% (default: 90%% of what is possible)",
    )
    what.add_argument("--curve-only", action="store_true", help="no replays: quicker, and rougher")
    what.add_argument(
        "--sample",
        metavar="SHARE",
        type=share,
        help="of blocks that the curve looks at (default: all, of long traces a million)",
    )
    what.add_argument("--processes", metavar="N", type=whole(1), help="for replays (default: one for each core)")

    out = parser.add_argument_group("what comes out")
    out.add_argument(
        "--json", metavar="FILE", nargs="?", const="-", help="for scripts; without FILE, instead of the table"
    )
    out.add_argument(
        "--html", metavar="FILE", help="one page with charts, that opens offline; - is standard output"
    )


def add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=("chat", "agent", "shared"), help="chat, agent or shared")
    parser.add_argument("--requests", metavar="N", type=whole(1), default=10_000, help="(default: 10000)")
    parser.add_argument(
        "--seed", metavar="N", type=whole(0), default=0, help="another one, other traffic (default: 0)"
    )
    parser.add_argument("--block-tokens", metavar="N", type=whole(1), default=16, help="of an id (default: 16)")
    parser.add_argument("--output", metavar="FILE", help="packed if it ends in .gz (default: -, standard output)")
    like = parser.add_argument_group("what it is like (default: as usual for its kind)")
    like.add_argument("--sessions-per-s", metavar="N", type=positive, help="new chats, tasks or questions")
    like.add_argument("--turns", metavar="N", type=whole(1), help="requests of a session, about")
    like.add_argument(
        "--pause-s",
        metavar="N",
        type=between(0, 1e9, "seconds"),
        help="from an answer to the next request of a session",
    )
    like.add_argument("--prefixes", metavar="N", type=whole(1), help="system prompts or documents that are shared")
    like.add_argument("--prefix-tokens", metavar="N", type=whole(1), help="of each of them, about")
    like.add_argument("--input-tokens", metavar="N", type=whole(1), help="that a turn adds, about")
    like.add_argument("--output-tokens", metavar="N", type=whole(1), help="of an answer, about")
