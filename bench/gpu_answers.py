"""Greedy answers under pressure: are they the same with offload as without?

    python bench/gpu_answers.py --json answers.json
    python bench/gpu_answers.py --cuda-graphs --v1-runner
    python bench/gpu_answers.py --only eager-failing,lazy-flip  # copies that fail, or go wrong in silence
    python bench/gpu_answers.py --faults '{"fail_chance": 0.1}'
    python bench/gpu_answers.py --only eager,eager-producer     # a kv_role with which vLLM preempts less
    python bench/gpu_answers.py --control                       # would wrong bytes be noticed?
    python bench/gpu_answers.py --mode bfloat16 --only lmcache  # and what do peers answer?

A small device cache, many requests at a time, preemptions, requests given up midway: _traffic.py. Four engines,
each in a process of its own: twice without offload, in another order and with other chunks, to see what rounding
alone does; then eager and lazy. An answer is wrong where it differs at a clear choice: _compare.py. Ends with
status 1 if an answer is wrong or missing, if a copy that arrived was not what was sent, if an engine hangs or
fails, and if nothing was loaded or preempted, because then nothing was tried.

On a GPU, first with kernels that do not depend on the batch (VLLM_BATCH_INVARIANT) in bfloat16, where every
difference is wrong. If they do not run there, or do not keep what they promise, in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _about import about, has_cuda, print_about
from _children import end_on_signal, run_child
from _compare import Difference, clear_limit, differences, wrong
from _engines import ENGINES, GRAPHS, LLAMA_8B, Engine, forebay, graphs, write_model
from _traffic import SIZES, Sizes

CHILD = Path(__file__).with_name("_answers_child.py")
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
TOO_MANY = 0.05
"""If this part of all answers differs without any offload, the numbers are too rough to compare."""


@dataclass(frozen=True)
class Mode:
    """In what numbers the model computes, and from which gap on two tokens are not a close call."""

    name: str
    dtype: str
    floor: float
    environment: dict[str, str]


INVARIANT = Mode("batch-invariant", "bfloat16", 0.0, {"VLLM_BATCH_INVARIANT": "1"})
FLOAT32 = Mode("float32", "float32", 1e-3, {})
BFLOAT16 = Mode("bfloat16", "bfloat16", 0.05, {})
MODES = {mode.name: mode for mode in (INVARIANT, FLOAT32, BFLOAT16)}


@dataclass(frozen=True)
class Variant:
    name: str
    offload: bool = False
    lazy: bool = False
    role: str = "kv_both"
    order: int = 0
    chances: bool = False
    spoil: bool = False
    faults: dict[str, Any] | None = None
    """Forebay's inject_faults."""
    part: int = 1
    """It is asked only one of so many questions."""
    peer: Engine | None = None
    """Somebody else's offload. What it gets wrong is told, and is no failure of ours."""


NONE = Variant("none", chances=True)
OTHER = Variant("none, other batches", order=1)
EAGER = Variant("eager", offload=True)
LAZY = Variant("lazy", offload=True, lazy=True)
CONTROL = Variant("control: wrong bytes", spoil=True)
FAULTS: dict[str, dict[str, Any]] = {
    "failing": {"fail_chance": 0.1},
    **{spoil: {"fail_chance": 0.1, "spoil": spoil} for spoil in ("flip", "reuse", "early")},
}
OFFLOADS = {variant.name: variant for variant in (EAGER, LAZY)} | {
    f"{variant.name}-{fault}": replace(variant, name=f"{variant.name}-{fault}", faults=faults, part=3)
    for fault, faults in FAULTS.items()
    for variant in (EAGER, LAZY)
}
OFFLOADS |= {
    f"{variant.name}-producer": replace(variant, name=f"{variant.name}-producer", role="kv_producer")
    for variant in (EAGER, LAZY)
}
PEERS = {engine.name: Variant(engine.name, peer=engine) for engine in ENGINES.values() if engine.is_peer}
CHOICES = OFFLOADS | PEERS


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="written after every engine, without the answers"
    )
    parser.add_argument("--answers", type=int, help="of each engine that are compared")
    parser.add_argument("--only", default="eager,lazy", metavar="NAMES", help=f"of: {', '.join(CHOICES)}")
    parser.add_argument("--verify", choices=["all", "off", "default"], default="all", help="Forebay's setting")
    parser.add_argument("--faults", type=json.loads, metavar="JSON", help="Forebay's inject_faults")
    parser.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="other settings of Forebay")
    parser.add_argument("--control", action="store_true", help="one more engine, with wrong bytes and no offload")
    parser.add_argument("--mode", choices=["auto", *MODES], default="auto")
    parser.add_argument(
        "--cuda-graphs", nargs="?", choices=GRAPHS, const="decode", help="for decoding, or for all small steps"
    )
    parser.add_argument("--compile", action="store_true", help="all that vLLM does by default")
    runner = parser.add_mutually_exclusive_group()
    runner.add_argument("--v1-runner", action="store_const", const="0", dest="runner")
    runner.add_argument("--v2-runner", action="store_const", const="1", dest="runner")
    parser.add_argument("--async-scheduling", choices=["on", "off"], help="default: as vLLM decides")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if has_cuda() else "cpu")
    parser.add_argument("--sizes", choices=[*SIZES], help="default: large on a GPU, small on a CPU")
    parser.add_argument("--device-blocks", type=int)
    parser.add_argument("--host-bytes", type=float)
    parser.add_argument("--engine-timeout", type=float, default=150.0, metavar="S")
    parser.add_argument("--budget", type=float, default=570.0, metavar="S", help="for all engines")
    parser.add_argument("--patience", type=float, default=60.0, metavar="S", help="without any request ending")
    parser.add_argument("--commit", help="where there is no git")
    args = parser.parse_args(arguments)
    if unknown := set(args.only.split(",")) - set(CHOICES):
        parser.error(f"no such engine: {', '.join(sorted(unknown))}")
    if args.device == "cpu" and (args.cuda_graphs or args.compile):
        parser.error("a CPU has no CUDA graphs")
    args.sizes = SIZES[args.sizes or ("large" if args.device == "cuda" else "small")]
    args.answers = args.answers or args.sizes.answers
    if args.mode != "auto":
        args.modes = [MODES[args.mode]]
    else:
        args.modes = [INVARIANT, FLOAT32] if args.device == "cuda" else [FLOAT32]
    return args


class Bench:
    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.sizes: Sizes = args.sizes
        self.model = write_model(folder / "model", LLAMA_8B | self.sizes.model)
        self.started = time.monotonic()
        self.mode: Mode = args.modes[0]
        self.rows: list[dict[str, Any]] = []
        self.limit = 0.0
        self.cut = False
        self.record: dict[str, Any] = {"about": about(args.commit), "tried": []}

    # --- running ------------------------------------------------------------------------------------

    def run(self) -> None:
        for mode in self.args.modes:
            self.mode, self.rows = mode, []
            if self.references():
                break
            self.record["tried"].append({"mode": mode.name, "rows": [summary(row) for row in self.rows]})
        wanted = [CHOICES[name] for name in self.args.only.split(",")]
        for variant in [*wanted, *[CONTROL] * self.args.control]:
            if not self.rows[0]["problem"]:
                self.one(variant)

    def references(self) -> bool:
        """Both runs without offload; whether they are alike enough for this mode, or there is no other."""
        last = self.mode is self.args.modes[-1]
        if self.one(NONE)["problem"] or self.one(OTHER)["problem"]:
            return last
        found, compared = self.compare(self.rows[1])
        self.limit = clear_limit(found, self.mode.floor)
        if not last and len(found) > TOO_MANY * compared:
            self.say(f"{self.mode.name}: {len(found)} of {compared} answers differ without offload; another mode")
            return False
        return True

    def one(self, variant: Variant) -> dict[str, Any]:
        args = self.args
        offload = None
        wider = 2 if self.mode.dtype == "float32" and args.device == "cuda" else 1
        host_bytes = int(args.host_bytes or wider * self.sizes.host_bytes)
        if variant.offload:
            faults = variant.faults or args.faults
            extra = args.extra | ({} if faults is None else {"inject_faults": faults})
            offload = forebay(lazy=variant.lazy, extra=extra, role=variant.role)(host_bytes)
        spec = {
            "engine_args": self.engine_args(variant, host_bytes),
            "offload": offload,
            "verify": None if args.verify == "default" else args.verify,
            "sizes": self.sizes.name,
            "answers": args.answers // variant.part,
            "order": variant.order,
            "at_once": self.sizes.at_once,
            "chances": variant.chances,
            "spoil": variant.spoil,
            "block_tokens": self.sizes.block_tokens,
            "device_blocks": self.device_blocks,
            "patience_s": args.patience,
        }
        environment = ENVIRONMENT | self.mode.environment | ({} if args.device == "cuda" else ON_CPU)
        if args.runner is not None:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = args.runner
        if variant.peer is not None:
            environment |= variant.peer.environment(host_bytes)
        end = run_child(
            CHILD,
            spec,
            self.folder / f"{self.mode.name}-{len(self.rows)}",
            limit_s=min(args.engine_timeout, max(1.0, args.budget - (time.monotonic() - self.started))),
            environment=environment,
            on_stage=lambda stage, seconds: self.say(f"{variant.name}: {stage} after {seconds:.1f} s"),
        )
        row = {"variant": variant.name, "offload": variant.offload, "peer": variant.peer is not None} | end.record
        row["faults"] = (variant.faults or args.faults) if variant.offload else None
        row |= {"problem": end.problem, "wall_s": end.wall_s, "tail": end.tail, "spec": spec}
        self.rows.append(row)
        if end.problem:
            self.say(f"{variant.name}: {end.problem}")
        self.write()
        return row

    @property
    def device_blocks(self) -> int:
        return self.args.device_blocks or self.sizes.device_blocks

    def engine_args(self, variant: Variant, host_bytes: int) -> dict[str, Any]:
        sizes = self.sizes
        args = {
            "model": str(self.model),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.mode.dtype,
            "enforce_eager": not (self.args.cuda_graphs or self.args.compile),
            "enable_prefix_caching": True,
            "block_size": sizes.block_tokens,
            "num_gpu_blocks_override": self.device_blocks,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": sizes.at_once,
            "max_num_batched_tokens": sizes.batched_tokens * 3 // 4 if variant.order else sizes.batched_tokens,
        }
        if self.args.device == "cuda":
            args["gpu_memory_utilization"] = 0.4
        if self.args.cuda_graphs and not self.args.compile:
            args["compilation_config"] = graphs(self.args.cuda_graphs, sizes.at_once)
        if self.args.async_scheduling:
            args["async_scheduling"] = self.args.async_scheduling == "on"
        if variant.peer is not None and variant.peer.connector is not None:
            args["kv_transfer_config"] = variant.peer.connector(host_bytes)
        return args

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def write(self) -> None:
        if self.args.json:
            record = self.record | {"mode": self.mode.name, "rows": [summary(row) for row in self.rows]}
            self.args.json.write_text(json.dumps(record, indent=1) + "\n")

    # --- judging ------------------------------------------------------------------------------------

    def compare(self, row: dict[str, Any]) -> tuple[list[Difference], int]:
        reference, answers = self.rows[0].get("answers", {}), row.get("answers", {})
        return differences(reference, answers), len(set(reference) & set(answers))

    def report(self) -> list[str]:
        """Print everything; what is wrong."""
        if not self.rows:
            return ["nothing was run"]
        print()
        print_about(self.record["about"] | self.rows[0].get("versions", {}))
        print_about({name: str(value) for name, value in self.rows[0].get("engine", {}).items()})
        print_about({"numbers": f"{self.mode.name}; a choice is clear above {self.limit:.2g} in log-probability"})
        bad: list[str] = []
        for row in self.rows:
            found, compared = self.compare(row)
            clear = wrong(found, self.limit)
            row["compared"], row["differ"], row["wrong"] = compared, len(found), len(clear)
            row["differences"] = [vars(each) for each in found[:50]]
            spoilt = set(row.get("spoilt", []))
            if spoilt:
                row["noticed"] = len({each.name for each in found} & spoilt)
            if not row["peer"]:
                bad += judge(row, answers=row["spec"]["answers"])
        print("\n" + "\n".join(table(self.rows)))
        for row in self.rows:
            for each in row["differences"][:5]:
                print(f"{row['variant']}: {each['name']}, token {each['position']}, by {each['gap']:.3g}")
        print("\n" + ("\n".join(bad) if bad else "nothing is wrong"))
        self.record["bad"] = bad
        self.write()
        return bad


def summary(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "answers"}


def mismatches(row: dict[str, Any]) -> int | None:
    """Of Forebay's counters; None where nothing is proven."""
    found = [value for name, value in row.get("counters", {}).items() if "mismatch" in name]
    return sum(found) if row.get("verifies") and found else None


def judge(row: dict[str, Any], *, answers: int) -> list[str]:
    name, faults, bad = row["variant"], row["faults"], []
    if row["problem"]:
        return [f"{name}: {row['problem']}"]
    if row.get("spoilt"):
        if row["noticed"] < 0.9 * len(row["spoilt"]):
            bad.append(f"{name}: only {row['noticed']} of {len(row['spoilt'])} were noticed")
        return bad
    if row["wrong"]:
        bad.append(f"{name}: {row['wrong']} answers are wrong")
    if row["compared"] < answers:
        bad.append(f"{name}: {answers - row['compared']} answers are missing")
    bad += [f"{name}: {each}" for each in row["odd"]]
    if not row["preemptions"]:
        bad.append(f"{name}: nothing was preempted, so this was no pressure")
    if row["offload"]:
        counters = row["counters"]
        if mismatches(row) and not faults:
            bad.append(f"{name}: {mismatches(row)} mismatches")
        if not counters.get("loaded_blocks"):
            bad.append(f"{name}: nothing was loaded, so nothing was tried")
        if counters.get("held"):
            bad.append(f"{name}: {counters['held']} pins or transfers are left")
        if faults and not counters.get("load_failures"):
            bad.append(f"{name}: no load failed although faults were injected")
        if faults and faults.get("spoil") and not mismatches(row):
            bad.append(f"{name}: bytes went wrong and nobody noticed")
    return bad


def table(rows: list[dict[str, Any]]) -> list[str]:
    def cells(row: dict[str, Any]) -> list[str]:
        if row["problem"]:
            return [row["variant"], row["problem"]]
        counters = row["counters"]
        proven = mismatches(row)
        asked = row["prompt_tokens"]
        from_host = f"{counters['hit_tokens'] / asked:.3f}" if counters else "-"
        return [
            row["variant"],
            f"{row['compared']:,}",
            f"{row['differ']:,}",
            f"{row['wrong']:,}" if not row.get("spoilt") else f"{row['noticed']} of {len(row['spoilt'])} noticed",
            f"{row['aborted']:,}",
            f"{row['preemptions']:,}",
            f"{row['cached_tokens'] / asked:.3f}",
            from_host,
            *[f"{counters[key]:,}" if counters else "-" for key in COUNTERS],
            "not proven" if row["offload"] and proven is None else "-" if proven is None else f"{proven:,}",
            f"{row['seconds']:.1f}",
            f"{row['start_s']:.1f}",
        ]

    heads = ["", "answers", "differ", "wrong", "aborted", "preempted", "cached", "from host"]
    heads += ["loaded", "stored", "failed loads", "failed stores", "recomputed", "mismatches", "seconds", "start"]
    lines = [heads, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines if len(line) == len(heads)) for i in range(len(heads))]
    widths[0] = max(len(line[0]) for line in lines)
    return ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in lines]


COUNTERS = ("loaded_blocks", "stored_blocks", "load_failures", "store_failures", "recomputes")


def main() -> None:
    args = parse()
    end_on_signal()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        bench = Bench(args, Path(folder))
        print_about(bench.record["about"])
        try:
            bench.run()
        except (KeyboardInterrupt, SystemExit) as error:
            bench.say(f"cut short: {type(error).__name__}")
            bench.cut = True
        sys.exit(1 if bench.report() or bench.cut else 0)


if __name__ == "__main__":
    main()
