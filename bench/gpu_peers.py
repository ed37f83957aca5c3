"""Forebay beside its peers on one machine: no offload, vLLM's own connectors, LMCache where it is installed.

    python bench/gpu_peers.py --json peers.json
    python bench/gpu_peers.py --json peers.json --resume        # go on where a run was cut
    python bench/gpu_peers.py --only none,forebay-eager --workloads documents,chat
    python bench/gpu_peers.py --forebay-extra '{"verify": "off"}'
    python bench/gpu_peers.py --cuda-graphs full                # for all small steps, not only for decoding
    python bench/gpu_peers.py --calls --only none,forebay-lazy  # where the time until the first tokens goes
    python bench/gpu_peers.py --in-turns --only none,forebay-lazy --host-bytes 40e9    # where a percent counts

Every engine runs in a process of its own, with the same prompts: documents, chat, miss and fits of _workloads.py.
One that fails or is late is a column that says so, as is one that brings back other bytes than were computed, with
which nobody is compared (_bytes.py). `--json` is written after every engine, and no engine begins
that may not end within `--budget`. The engine started first is thrown away: what it fills (compiled kernels, the
file cache) would be counted as the start of one engine only.

On a GPU the model has Llama-3.1-8B's shape with dummy weights, the device cache is cut to 4,096 blocks of 16
tokens. On a CPU everything is tiny, which tries the bench and says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from _about import about, has_cuda, print_about
from _calls import lines
from _children import available_bytes, end_on_signal, run_child, wait_until_available
from _engines import ENGINES, GRAPHS, LLAMA_8B, SMALL, Engine, engine_args, with_settings, write_model
from _table import Column, columns, table, verdicts
from _turns import Turnstile
from _workloads import SHAPES, WORKLOADS, Shape, as_dict

CHILD = Path(__file__).with_name("_peer_child.py")
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "PYTHONHASHSEED": "0",
}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every engine")
    parser.add_argument("--resume", action="store_true", help="keep what --json FILE already has of good runs")
    parser.add_argument("--only", metavar="NAMES", help=f"of: {', '.join(ENGINES)}")
    parser.add_argument("--order", metavar="NAMES", help="these first, in this order")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), metavar="NAMES")
    parser.add_argument("--repeat", type=int, default=1, help="so many rounds through all engines")
    parser.add_argument("--forebay-extra", action="append", default=[], type=json.loads, metavar="JSON")
    parser.add_argument("--shape", choices=[*SHAPES], help="default: full on a GPU, tiny on a CPU")
    parser.add_argument("--quick", action="store_const", const="quick", dest="shape", help="--shape quick")
    parser.add_argument("--model", type=Path, metavar="DIR", help="another config.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_cuda() else "cpu")
    parser.add_argument("--device-blocks", type=int)
    parser.add_argument("--host-bytes", type=float)
    parser.add_argument("--batched-tokens", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument(
        "--cuda-graphs", nargs="?", choices=GRAPHS, const="decode", help="for decoding, or for all small steps"
    )
    parser.add_argument("--calls", action="store_true", help="time calls in the engine, which takes time itself")
    parser.add_argument(
        "--in-turns", action="store_true", help="all engines have started, and take turns at every phase"
    )
    parser.add_argument("--engine-timeout", type=float, default=150.0, metavar="S")
    parser.add_argument(
        "--budget", type=float, default=570.0, metavar="S", help="no engine begins that cannot end"
    )
    parser.add_argument("--no-cold-start", action="store_true", help="do not start an engine for nothing first")
    parser.add_argument("--commit", help="where there is no git")
    args = parser.parse_args(arguments)
    args.workloads = [name for name in args.workloads.split(",") if name]
    if unknown := set(args.workloads) - set(WORKLOADS):
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    args.shape = args.shape or ("full" if args.device == "cuda" else "tiny")
    if args.resume and not args.json:
        parser.error("--resume needs --json")
    if args.in_turns and (args.resume or args.repeat > 1):
        parser.error("--in-turns takes every engine once, from its start: neither --resume nor --repeat")
    try:
        args.engines = chosen(args.only, args.order, args.forebay_extra)
    except KeyError as error:
        parser.error(f"no such engine: {error.args[0]}")
    if args.in_turns and (missing := [each.name for each in args.engines if not each.is_installed]):
        parser.error(f"--in-turns needs all engines, and these are not installed: {', '.join(missing)}")
    return args


def chosen(only: str | None, order: str | None, extras: list[dict[str, Any]]) -> list[Engine]:
    known = ENGINES | {engine.name: engine for extra in extras for engine in with_settings(extra)}
    names = list(known) if only is None else [name for name in only.split(",") if name]
    first = [name for name in (order or "").split(",") if name]
    return [known[name] for name in dict.fromkeys([*first, *names]) if name in names or name not in known]


def shape_of(args: argparse.Namespace) -> Shape:
    shape = SHAPES[args.shape]
    if args.device_blocks:
        shape = replace(shape, device_blocks=args.device_blocks)
    if args.host_bytes:
        shape = replace(shape, host_bytes=int(args.host_bytes))
    return shape


def kind(engine: Engine) -> str:
    return "forebay" if engine.is_forebay else "peer" if engine.is_peer else "none"


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.shape = shape_of(args)
        self.cuda = args.device == "cuda"
        self.folder = folder
        self.model = args.model or write_model(folder / "model", LLAMA_8B if self.cuda else SMALL)
        self.started = time.monotonic()
        self.longest = 0.0
        self.record: dict[str, Any] = {"about": about(args.commit), "shape": as_dict(self.shape), "rows": []}
        if args.resume and args.json.exists():
            before = json.loads(args.json.read_text())
            if before["shape"] != self.record["shape"]:
                raise SystemExit(f"{args.json} was measured with another shape: not resumed")
            self.record["earlier"] = [*before.get("earlier", []), before["about"]]
            self.record["rows"] = [row for row in before["rows"] if row["problem"] is None]

    def run(self) -> None:
        rows = self.record["rows"]
        if self.args.in_turns:
            self.run_in_turns()
            return
        if not self.args.no_cold_start and not any(row["kind"] == "cold" for row in rows):
            self.one(ENGINES["none"], "cold", workloads=[])
        for lap in range(self.args.repeat):
            for engine in self.args.engines:
                done = sum(row["engine"] == engine.name and row["kind"] != "cold" for row in rows)
                if done <= lap:
                    self.one(engine, kind(engine), workloads=self.args.workloads)

    def run_in_turns(self) -> None:
        engines = self.args.engines
        address = self.folder / "turns"
        rows = [self.row(engine, kind(engine)) for engine in engines]
        names = [engine.name for engine in engines]
        with closing(Turnstile(address, names)) as turnstile, ThreadPoolExecutor(len(engines)) as pool:

            def one(engine: Engine, row: dict[str, Any]) -> None:
                self.measure(engine, row, self.args.workloads, self.args.budget, (str(address), engine.name))
                turnstile.ended(engine.name)

            list(pool.map(one, engines, rows))
        self.write()

    def row(self, engine: Engine, of_kind: str) -> dict[str, Any]:
        row = {"engine": engine.name, "label": engine.label, "kind": of_kind, "problem": None}
        self.record["rows"].append(row)
        return row

    def one(self, engine: Engine, of_kind: str, workloads: list[str]) -> None:
        row = self.row(engine, of_kind)
        left = self.args.budget - (time.monotonic() - self.started)
        if not engine.is_installed:
            row["problem"] = f"{engine.module} is not installed"
        elif left < min(self.args.engine_timeout, 1.1 * self.longest):
            row["problem"] = f"not run: {max(left, 0):.0f} s were left"
        else:
            row["problem"] = "cut short"  # unless it gets to its end
            available = available_bytes()
            self.measure(engine, row, workloads, min(self.args.engine_timeout, left))
            wait_until_available(int(0.98 * available))
        if row["problem"]:
            self.say(f"{engine.label}: {row['problem']}")
        self.write()

    def write(self) -> None:
        if self.args.json:
            part = self.args.json.with_suffix(".part")
            part.write_text(json.dumps(self.record, indent=1) + "\n")
            part.replace(self.args.json)

    def measure(
        self,
        engine: Engine,
        row: dict[str, Any],
        workloads: list[str],
        limit_s: float,
        turns: tuple[str, str] | None = None,
    ) -> None:
        args = engine_args(
            engine,
            self.shape,
            self.model,
            cuda=self.cuda,
            cuda_graphs=self.args.cuda_graphs,
            batched_tokens=self.args.batched_tokens,
            beside=len(self.args.engines) if turns else 1,
        )
        spec = {
            "engine_args": args,
            "shape": as_dict(self.shape),
            "workloads": workloads,
            "turns": turns,
            "calls": self.args.calls and row["kind"] != "cold",
            "prove": bool(workloads) and engine.connector is not None,
            "measure_copy": self.cuda and row["kind"] == "none",
        }
        environment = ENVIRONMENT | ({} if self.cuda else ON_CPU)
        end = run_child(
            CHILD,
            spec,
            self.folder / f"{engine.name}-{self.record['rows'].index(row)}",
            limit_s=limit_s,
            environment=environment | engine.environment(self.shape.host_bytes),
            on_stage=lambda stage, s: self.say(f"{engine.label} ({row['kind']}): {stage} after {s:.1f} s"),
        )
        row |= end.record | {"problem": end.problem, "wall_s": end.wall_s, "tail": end.tail, "engine_args": args}
        self.longest = max(self.longest, end.wall_s)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def report(self) -> bool:
        """Print everything; whether all targets were reached."""
        versions = next((row["versions"] for row in self.record["rows"] if "versions" in row), {})
        print()
        print_about(self.record["about"] | versions)
        print_about({"shape": ", ".join(f"{key}={value}" for key, value in self.record["shape"].items())})
        for row in self.record["rows"]:
            if row["kind"] == "cold" and "start_s" in row:
                print_about({"cold start": f"{row['start_s']:.1f} s, not counted"})
            for way, speed in row.get("pinned_copy_gb_s", {}).items():
                print_about({"pinned copy": f"{way} {speed:.1f} GB/s"})
        every = columns(self.record["rows"])
        print("\n" + "\n".join(table(every)))
        for line in lines(self.record["rows"]):
            print(line)
        found = [(ours, self.judge(ours, every)) for ours in every if ours.kind == "forebay"]
        self.record["verdicts"] = {ours.name: [vars(each) for each in judged] for ours, judged in found}
        for ours, judged in found:
            print(f"\n{ours.label}")
            print("\n".join(map(str, judged)))
        return all(each.holds is not False for _, judged in found for each in judged)

    def judge(self, ours: Column, every: list[Column]) -> list[Any]:
        return verdicts(ours, every, full=self.shape.name == "full", host_bytes=self.shape.host_bytes)


def main() -> None:
    args = parse()
    end_on_signal()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        bench = Bench(args, Path(folder))
        print_about(bench.record["about"])
        try:
            bench.run()
        except (KeyboardInterrupt, SystemExit) as error:
            print(f"cut short: {type(error).__name__}", file=sys.stderr)
        bench.report()
        if args.json:
            args.json.write_text(json.dumps(bench.record, indent=1) + "\n")


if __name__ == "__main__":
    main()
