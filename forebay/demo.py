"""A chat that does not fit on the device, served three times: without offload, eager, lazy.

    python -m forebay.demo [--sessions 24] [--turns 4] [--seed 0]

The engine is the small one of `forebay.testing`. It has no model, but its blocks are real bytes, compared at every
read; the manager is the real one. No GPU is involved, and nothing here measures time.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Callable
from functools import cached_property
from random import Random
from typing import NamedTuple, NoReturn

from forebay import FullAttention, KVLayout, Mode, OffloadConfig, RequestId
from forebay.testing import TinyEngine, TinyRequest

BLOCK = 16  # all of these in tokens
SYSTEM, FIRST, NEXT, ANSWER = 64, 192, 80, 16  # shared system prompt, first turn, each later turn, each answer
LAYOUT = KVLayout((FullAttention(BLOCK),), tokens_per_hash=BLOCK, bytes_per_block=64)
# Without offload: the same engine and manager, but no request lets anything be kept on the host.
RUNS = {"none": (Mode.EAGER, False), "eager": (Mode.EAGER, True), "lazy": (Mode.LAZY, True)}


class Workload(NamedTuple):
    sessions: int
    turns: int
    seed: int

    def sizes(self) -> tuple[int, int, int]:
        """Requests at a time, device blocks, host slots: the device holds a quarter of the chats, the host all."""
        blocks = -(-(SYSTEM + FIRST + (self.turns - 1) * NEXT + self.turns * ANSWER) // BLOCK)
        return self.sessions // 4, self.sessions // 4 * blocks, self.sessions * blocks


class ReadingEngine(TinyEngine):
    """Keeps a digest of the KV of every prompt, as it was last read to generate a token."""

    @cached_property
    def kv_read(self) -> dict[RequestId, bytes]:
        return {}

    def verify(self, request: TinyRequest) -> None:
        super().verify(request)  # raises if a byte is wrong
        if request.computed >= request.prompt_tokens:
            blocks = request.table[0][: request.prompt_tokens // BLOCK]
            read = b"".join(self.copiers[0].device.read(block) for block in blocks)
            self.kv_read[request.id] = hashlib.blake2b(read).digest()


def progress(text: str, *, milestone: bool = False) -> None:
    """One line that changes in place on a terminal; elsewhere milestones only, a line each."""
    if sys.stdout.isatty():
        print(f"\r\033[K{text}", end="", flush=True)
    elif milestone:
        print(text, flush=True)


def serve(name: str, workload: Workload) -> tuple[ReadingEngine, list[TinyRequest]]:
    mode, may_store = RUNS[name]
    rng = Random(workload.seed)
    at_a_time, blocks, slots = workload.sizes()
    config = OffloadConfig(capacity_bytes=slots * LAYOUT.bytes_per_block, mode=mode)
    # One block more: the null block.
    engine = ReadingEngine(LAYOUT, config, num_blocks=blocks + 1, max_running=at_a_time, max_batched_tokens=256)
    requests: list[TinyRequest] = []
    chats = [rng.choices(range(50_000), k=SYSTEM)] * workload.sessions
    # Every session takes its turn before any takes the next: the worst order for a cache.
    for turn in range(workload.turns):
        chats = [chat + rng.choices(range(50_000), k=NEXT if turn else FIRST) for chat in chats]
        asked = [engine.submit(chat, ANSWER, may_store=may_store) for chat in chats]
        while engine.num_unfinished or engine.manager.has_pending_work():
            engine.step()
            engine.check()
            progress(f"{name}: turn {turn + 1} of {workload.turns}, requests left: {engine.num_unfinished}")
        progress(f"{name}: turn {turn + 1} of {workload.turns} done", milestone=True)
        chats = [request.tokens for request in asked]
        requests += asked
    return engine, requests


def column(engine: ReadingEngine, requests: list[TinyRequest]) -> list[str]:
    stats = engine.manager.stats
    cached = sum(r.cached_tokens for r in requests) / sum(r.prompt_tokens for r in requests)
    prefill = engine.computed_tokens - len(requests) * (ANSWER - 1)  # the rest is decode, the same for all
    evicted = len(engine.device.evicted), engine.manager.pool.evictions
    counts = [f"{count:,}" for count in (prefill, stats.loaded_blocks * BLOCK, stats.stored_blocks, *evicted)]
    return [*counts[:2], f"{cached:.1%}", *counts[2:]]


def run(workload: Workload) -> int:
    (sessions, turns, seed), (at_a_time, blocks, slots) = workload, workload.sizes()
    print(f"A simulation: {sessions} chats of {turns} turns, {at_a_time} at a time, seed {seed}.")
    print(f"Device pool: {blocks} blocks of {BLOCK} tokens. Host pool: {slots} slots.")
    print("The manager is real and so are the bytes; the engine only plays one. No GPU, no timing.\n")
    runs = [serve(name, workload) for name in RUNS]
    print("\r\033[K" if sys.stdout.isatty() else "")
    answers = [[(r.tokens, engine.kv_read[r.id]) for r in requests] for engine, requests in runs]
    total = len(answers[0])
    equal = sum(none == eager == lazy for none, eager, lazy in zip(*answers, strict=True))
    columns = [[name, *column(*each), f"{equal / total:.0%}"] for name, each in zip(RUNS, runs, strict=True)]
    labels = ["offload", "prefill tokens computed", "tokens loaded from host", "share of prompt tokens cached"]
    labels += ["blocks stored on host", "evictions, device pool", "evictions, host pool", "answers equal"]
    for label, *values in zip(labels, *columns, strict=True):
        print(f"{label:<30}" + "".join(f"{value:>12}" for value in values))
    print(f"\nAnswers: of {total} requests, the tokens and the KV bytes that were read to generate them.")
    print("none: nothing may be stored, so only the device's own prefix cache helps. Checked after every step.")
    return 0 if equal == total else 1


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"forebay.demo: {message} (--help lists what there is)\n")


def whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def main() -> int:
    parser = Parser(prog="python -m forebay.demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", type=whole(4, 200), default=24, help="chats (default: %(default)s)")
    parser.add_argument("--turns", type=whole(1, 20), default=4, help="turns of each (default: %(default)s)")
    parser.add_argument(
        "--seed", type=whole(0, 2**32 - 1), default=0, help="of the workload (default: %(default)s)"
    )
    try:
        return run(Workload(**vars(parser.parse_args())))
    except KeyboardInterrupt:
        print(("\n" if sys.stdout.isatty() else "") + "forebay.demo: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
