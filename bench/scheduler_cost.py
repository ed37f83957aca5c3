"""What does one block cost the scheduler's thread, from its store to the end of its load?

One prompt of so many blocks (one full-attention group, 16 tokens per block, 32-byte prefix hashes) is stored,
found again by a second request with equal hashes, and loaded. No byte moves: copies are reported done at once.
What is timed is what an engine waits for, in nanoseconds per block:

    admit        the first request gets its blocks, without a hit (on a line of its own, not one of the five)
    plan store   all its blocks are confirmed: plan the copies to the host
    commit       the copies are reported done
    match        a new request asks what the host has
    plan load    it gets blocks and accepts the offer; the order for the copies is handed out
    finish load  the copies are reported done
    ends         both requests end (on a line of its own)
    when full    another prompt as long is stored: plan store, with the first one evicted (on a line of its own)

and in microseconds for each call: the match, asked again and again while the request waits.

    python bench/scheduler_cost.py [--rival vllm | no-ghost] [--blocks 1000 6250 …] [--repeats 7] [--json FILE]

`--rival vllm` makes the same calls of two classes: vLLM's own `SimpleCPUOffloadScheduler` and Forebay's of that
name, both over vLLM's own device pool. `--rival no-ghost` is a Forebay that predicts nothing, and says what the
live ghost costs: here a manager serves many prompts, and what counts is everything, with the ends. Rounds of both
sides alternate; each has fresh managers, and the first of each side is not counted. The collector is off while the
clock runs. Numbers are medians. At the end: what a host pool of a million slots takes.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import platform
import random
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from forebay import FullAttention, KVLayout, OffloadConfig, OffloadManager, Outcome, Progress, Rank, Report
from forebay.ids import BlockId, Key, RequestId, make_key
from forebay.policies import LRU
from forebay.pool import HostPool

SEED = 20240607
TOKENS_PER_BLOCK = 16
PROMPTS = 32  # of a stream
SPARE = 64  # slots and device blocks beyond those of the prompt
BYTES_PER_BLOCK = 65536
OPERATIONS = ("plan store", "commit", "match", "plan load", "finish load")
ROWS = (*OPERATIONS, "total of five", "admit", "total with admit", "ends", "total with ends", "when full")
MILLION = 1_000_000
AGAIN = 200


def prefix_hashes(count: int) -> list[bytes]:
    """The same hashes each time, in new objects, as two requests with one prompt have them."""
    text = random.Random(SEED).randbytes(32 * count)
    return [text[i : i + 32] for i in range(0, len(text), 32)]


@dataclass
class Prompt:
    """A request under the names that Forebay reads and under those that vLLM reads."""

    id: RequestId
    hashes: list[bytes]
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    may_load: bool = True
    may_store: bool = True
    event_extra: object = None

    def __post_init__(self) -> None:
        self.request_id, self.block_hashes = self.id, self.hashes
        self.num_tokens = len(self.hashes) * TOKENS_PER_BLOCK + 1  # one more: the last token is always computed

    def token_ids(self, start: int, stop: int) -> Sequence[int]:
        return range(start, stop)


class Laps(dict[str, float]):
    """Nanoseconds by operation, with the collector off while the clock runs."""

    def start(self) -> None:
        gc.disable()
        self._started = time.perf_counter_ns()

    def stop(self, operation: str) -> None:
        self[operation] = self.get(operation, 0) + time.perf_counter_ns() - self._started
        gc.enable()

    def ask_again(self, ask: Callable[[], object]) -> None:
        """Engines ask for a waiting request in every step: nanoseconds of a question that was asked before."""
        self.start()
        for _ in range(AGAIN):
            ask()
        self.stop("again")
        self.again_ns = self.pop("again") / AGAIN


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise SystemExit(f"wrong result, so the times mean nothing: {what}")


class ListDevice:
    """Reference counts and keys in two lists: about the least that a `forebay.engine.DevicePool` can do, and the
    engine's side of it. The pool of forebay.testing proves every call: it would be half of what is measured."""

    null_block = BlockId(0)

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._free = list(map(BlockId, range(num_blocks - 1, 0, -1)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pin(self, blocks: Sequence[BlockId]) -> None:
        refs = self._refs
        for block in blocks:
            refs[block] += 1

    def unpin(self, blocks: Sequence[BlockId], *, in_place: bool = False) -> int:
        refs = self._refs
        for block in blocks:
            refs[block] -= 1
            if not refs[block]:
                self._free.append(block)
        return 0  # it has no order

    def keys_of(self, blocks: Sequence[BlockId]) -> list[Key | None]:
        return list(map(self._keys.__getitem__, blocks))

    def find_run(self, keys: Sequence[Key], start: int, stop: int) -> list[BlockId]:
        return []  # nothing is asked for that only the device has

    def next_evictions(self, count: int) -> tuple[list[BlockId], list[Key | None]]:
        raise NotImplementedError("only lazy stores need it; the bench stores eagerly")

    def take(self, count: int) -> list[BlockId]:
        taken = [self._free.pop() for _ in range(count)]
        self.pin(taken)
        return taken

    def table(self, handles: list[BlockId]) -> Sequence[list[BlockId]]:
        return (handles,)

    def cache(self, handles: list[BlockId], prompt: Prompt) -> None:
        for block, prefix in zip(handles, prompt.hashes, strict=True):
            self._keys[block] = make_key(prefix, 0)

    def forget(self, handles: list[BlockId]) -> None:
        for block in handles:
            self._keys[block] = None
        self.unpin(handles[::-1])


def make_manager(slots: int, device: Any, predicts: bool = True) -> OffloadManager:
    layout = KVLayout((FullAttention(TOKENS_PER_BLOCK),), TOKENS_PER_BLOCK, BYTES_PER_BLOCK)
    return OffloadManager(layout, OffloadConfig(slots * BYTES_PER_BLOCK), device, slots=slots, predicts=predicts)


def forebay_round(blocks: int, device: Any) -> Laps:
    laps = Laps()
    manager = make_manager(blocks + SPARE, device)
    serve_twice(manager, device, "once", prefix_hashes(blocks), prefix_hashes(blocks), laps)
    manager.check()
    other = Prompt(RequestId("other"), prefix_hashes(2 * blocks)[blocks:])
    handles = device.take(blocks)
    device.cache(handles, other)
    manager.allocated(other, device.table(handles), 0, 0)
    laps.start()
    stores = manager.step([Progress(other.id, blocks * TOKENS_PER_BLOCK)]).stores
    laps.stop("when full")
    expect([order.num_copies for order in stores] == [blocks], "nothing was evicted")
    return laps


def forebay_stream(blocks: int, predicts: bool) -> Laps:
    """A manager that goes on: one prompt after the other, each served twice, while another request runs. What is
    put off and done for several of them at once is in it, in the calls in which it is done."""
    device = ListDevice(2 * blocks + SPARE)
    manager = make_manager(PROMPTS * blocks + SPARE, device, predicts)
    hashes = prefix_hashes(blocks * PROMPTS)
    manager.allocated(Prompt(RequestId("runs on"), hashes[:1]), device.table(device.take(1)), 0, 0)
    sums = Laps()
    for number in range(PROMPTS):
        some = hashes[number * blocks : (number + 1) * blocks]
        serve_twice(manager, device, str(number), some, [bytes(memoryview(each)) for each in some], sums)
    manager.check()  # not before: it goes through the ghost's books too, and what comes next finds cold caches
    laps = Laps({operation: ns / PROMPTS for operation, ns in sums.items()})
    laps.again_ns = sums.again_ns
    return laps


def serve_twice(
    manager: OffloadManager, device: Any, name: str, hashes: list[bytes], again: list[bytes], laps: Laps
) -> None:
    """One prompt, stored by a first request and loaded by a second."""
    blocks = len(hashes)
    first, second = Prompt(RequestId(f"{name}, first"), hashes), Prompt(RequestId(f"{name}, second"), again)
    tokens = blocks * TOKENS_PER_BLOCK
    pins = manager.device_pins()
    handles = device.take(blocks)
    device.cache(handles, first)
    laps.start()
    manager.allocated(first, device.table(handles), 0, 0)
    laps.stop("admit")
    laps.start()
    stores = manager.step([Progress(first.id, tokens)]).stores
    laps.stop("plan store")
    done = [Report(order.id, Rank(0), Outcome.DONE) for order in stores]
    laps.start()
    manager.report(done)
    laps.stop("commit")
    laps.start()
    manager.finish(first.id, tokens)
    laps.stop("ends")
    device.forget(handles)
    laps.start()
    answer = manager.match(second, 0)
    laps.stop("match")
    expect(answer == (tokens, True), f"the match is {answer}, not {tokens} tokens")
    laps.ask_again(lambda: manager.match(second, 0))
    handles = device.take(blocks)
    laps.start()
    waits = manager.allocated(second, device.table(handles), 0, tokens)
    loads = manager.step().loads
    laps.stop("plan load")
    done = [Report(order.id, Rank(0), Outcome.DONE) for order in loads]
    laps.start()
    outcomes = manager.report(done)
    laps.stop("finish load")
    expect(waits and outcomes == ([second.id], []), f"the load ended as {outcomes}")
    expect([order.num_copies for order in stores + loads] == [blocks, blocks], "copies are missing")
    expect(loads[0].slots == stores[0].slots, "the load does not read what the store wrote")
    expect(loads[0].blocks == device.table(handles)[0], "the load does not write the blocks of the request")
    laps.start()
    manager.finish(second.id, tokens)
    laps.stop("ends")
    device.forget(handles)
    expect(manager.device_pins() == pins and not manager.has_pending_work(), "something is still held")


Side = Callable[[int], Laps]


Samples = dict[str, dict[str, list[float]]]


def measure(sides: dict[str, Side], blocks: int, repeats: int) -> tuple[Samples, dict[str, float]]:
    """Nanoseconds per block, by side and operation, one for each counted round; and by side, of asking again."""
    samples: Samples = {name: {} for name in sides}
    again: dict[str, list[float]] = {name: [] for name in sides}
    for counted in (False, *[True] * repeats):
        for name, side in sides.items():
            gc.collect()
            laps = side(blocks)
            again[name] += [laps.again_ns] * counted
            for operation, ns in laps.items():
                samples[name].setdefault(operation, []).extend([ns / blocks] * counted)
    return samples, {name: statistics.median(values) for name, values in again.items()}


def with_totals(samples: dict[str, list[float]]) -> dict[str, float]:
    row = {operation: statistics.median(values) for operation, values in samples.items()}
    row["total of five"] = sum(row[operation] for operation in OPERATIONS)
    row["total with admit"] = row["total of five"] + row["admit"]
    if "ends" in row:
        row["total with ends"] = row["total with admit"] + row["ends"]
    return row


def more(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> tuple[float, float, float]:
    """How much more all operations of a round take than those of the round beside it: the median, and between
    what it lies with rounds drawn from these at random, again and again."""
    mine, others = (list(map(sum, zip(*side.values(), strict=True))) for side in (ours, theirs))
    ratios = [here / there - 1 for here, there in zip(mine, others, strict=True)]
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return statistics.median(ratios), medians[25], medians[974]


def print_table(title: str, columns: dict[int, dict[str, float]], form: str) -> None:
    print(f"\n{title:<26}" + "".join(f"{size:>12,}" for size in columns))
    for row in (row for row in ROWS if all(row in column for column in columns.values())):
        print(f"  {row:<24}" + "".join(f"{column[row]:>12{form}}" for column in columns.values()))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def pool_cost() -> dict[str, float]:
    """Seconds and megabytes of a pool of a million slots: empty, and full of chains of 6,250 keys of 32 bytes. The
    keys count: nobody else keeps them once their request has ended."""
    chain = 6250
    prefix_hashes(chain)  # loads what only the bench needs
    before, started = resident_bytes(), time.perf_counter()
    pool = HostPool(MILLION, LRU(MILLION))
    empty_s, empty = time.perf_counter() - started, resident_bytes() - before
    rng, started = random.Random(SEED), time.perf_counter()
    for _ in range(MILLION // chain):
        keys = [Key(rng.randbytes(32)) for _ in range(chain)]
        pool.commit(keys, pool.reserve(keys, chained=True))
    full_s, full = time.perf_counter() - started, resident_bytes() - before
    expect(pool.cached == MILLION and not pool.pinned, "the pool is not full")
    return {"empty_s": empty_s, "empty_mb": empty / 1e6, "full_s": full_s, "full_mb": full / 1e6}


def header(with_vllm: bool) -> dict[str, str]:
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu[0].partition(':')[2].strip() if cpu else platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "vllm": importlib.import_module("vllm").__version__ if with_vllm else "not used",
        "commit": commit or "unknown",
        "command": shlex.join(["python", *sys.argv]),
        "device pool": "vLLM's BlockPool, for both sides" if with_vllm else "two lists, in this file",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rival", choices=["vllm", "no-ghost"])
    parser.add_argument("--blocks", type=int, nargs="+", default=[1000, 6250, 25000, 100000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--pool-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.repeats < 1 or min(args.blocks) < 1:
        parser.error("--repeats and --blocks take numbers of at least 1")
    if args.pool_only:
        print(json.dumps(pool_cost()))
        return
    with_vllm = args.rival == "vllm" and importlib.util.find_spec("vllm") is not None
    if args.rival == "vllm" and not with_vllm:
        args.rival = None
        print("vllm is not installed: the rival is skipped, Forebay runs alone")
    sides: dict[str, Side] = {"forebay": lambda blocks: forebay_round(blocks, ListDevice(blocks + SPARE))}
    if args.rival == "no-ghost":
        sides = {
            "forebay": lambda blocks: forebay_stream(blocks, predicts=True),
            "no-ghost": lambda blocks: forebay_stream(blocks, predicts=False),
        }
    if with_vllm:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        import _rival_vllm

        sides = {"forebay": _rival_vllm.forebay_round, "vllm": _rival_vllm.vllm_round}
    about, sizes = header(with_vllm), sorted(args.blocks)
    for name, value in about.items():
        print(f"{name:<12} {value}")

    measured = {size: measure(sides, size, args.repeats) for size in sizes}
    samples = {size: by_side for size, (by_side, _) in measured.items()}
    again = {name: {size: measured[size][1][name] for size in sizes} for name in sides}
    tables = {name: {size: with_totals(samples[size][name]) for size in sizes} for name in sides}
    ours = tables["forebay"]
    for name, columns in tables.items():
        print_table(f"{name}, ns per block", columns, ",.0f")
    if args.rival:
        theirs = tables[args.rival]
        ratio = {size: {row: theirs[size][row] / ours[size][row] for row in theirs[size]} for size in sizes}
        print_table(f"{args.rival} / forebay", ratio, ".3f" if args.rival == "no-ghost" else ".2f")
        if args.rival == "no-ghost":
            print(f"\n{'the ghost, of everything':<26}" + "".join(f"{size:>12,}" for size in sizes))
            shares = [more(samples[size]["forebay"], samples[size]["no-ghost"]) for size in sizes]
            for line, name in enumerate(("median of rounds", "at least, 95 % sure", "at most, 95 % sure")):
                print(f"  {name:<24}" + "".join(f"{share[line]:>+12.2%}" for share in shares))
    print(f"\n{'asking again, us a call':<26}" + "".join(f"{size:>12,}" for size in sizes))
    for name, by_size in again.items():
        print(f"  {name:<24}" + "".join(f"{ns / 1000:>12,.1f}" for ns in by_size.values()))
    growth = ours[sizes[-1]]["total of five"] / ours[sizes[0]]["total of five"]
    print(f"\nforebay, total of five per block at {sizes[-1]:,} / at {sizes[0]:,} blocks: {growth:.2f}")

    child = [sys.executable, str(Path(__file__)), "--pool-only"]
    pool = json.loads(subprocess.run(child, capture_output=True, text=True, check=True).stdout)
    print(f"\nHostPool({MILLION:,}, LRU), resident memory of a fresh process")
    print(f"  empty  {pool['empty_s']:.6f} s  {pool['empty_mb']:.1f} MB   (target: below 1 s and 250 MB)")
    print(f"  full   {pool['full_s']:.2f} s  {pool['full_mb']:.1f} MB   (keys made and counted too; no target)")
    if args.json:
        record = {
            "header": about,
            "medians": tables,
            "samples": samples,
            "again_ns": again,
            "growth": growth,
            "pool": pool,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
