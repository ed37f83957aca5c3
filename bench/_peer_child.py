"""One engine of gpu_peers.py, in a process of its own: start, warm up, run the workloads, say what they took.

The engine is what `vllm serve` has inside: AsyncLLM here, scheduler and model in a process below this one.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from _bytes import came_back
from _calls import until_first_tokens
from _children import available_bytes, resident_bytes, write_record
from _turns import turns
from _workloads import WORKLOADS, Answer, Ask, Shape, Tokens, warm_up

BORN = time.perf_counter()


def asker(engine: Any) -> Ask:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ids = itertools.count()

    async def ask(prompt: Tokens, answer_tokens: int) -> Answer:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=answer_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        tokens: Tokens = []
        first = cached = None
        started = time.perf_counter()
        async for output in engine.generate({"prompt_token_ids": prompt}, params, f"request-{next(ids)}"):
            new = output.outputs[0].token_ids
            if first is None and new:
                first = time.perf_counter()
            tokens += new
            cached = output.num_cached_tokens
        ended = time.perf_counter()
        if first is None or len(tokens) != answer_tokens:
            raise RuntimeError(f"an answer of {len(tokens)} tokens instead of {answer_tokens}")
        return Answer(len(prompt), cached or 0, tokens, first - started, ended - started)

    return ask


def pinned_copy_gb_s() -> dict[str, float]:
    """What the bus gives to one large copy of pinned memory, each way."""
    import torch

    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    speeds = {}
    for name, target, source in (("host to device", device, host), ("device to host", host, device)):
        best = 0.0
        for _ in range(4):
            torch.cuda.synchronize()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            best = max(best, host.numel() / (time.perf_counter() - started) / 1e9)
        speeds[name] = best
    return speeds


async def serve(spec: dict[str, Any], record: dict[str, Any], record_file: Path) -> None:
    def stage(name: str) -> None:
        record["stage"] = name
        write_record(record_file, record)

    turn = turns(*spec["turns"]) if spec["turns"] else nullcontext
    available = available_bytes()
    stage("import")
    import torch
    import vllm
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    record["versions"] = {"vllm": vllm.__version__, "torch": torch.__version__}
    record["import_s"] = time.perf_counter() - BORN
    async with turn():
        stage("start")
        started = time.perf_counter()
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["engine_args"]))
        record["start_s"] = time.perf_counter() - started
        shape, ask = Shape(**spec["shape"]), asker(engine)
        record["workloads"] = {}
        if spec["workloads"]:
            stage("warm-up")
            record["warm_up"] = await warm_up(shape, ask)
    gc.collect()
    gc.freeze()
    if spec["calls"]:
        record["calls"] = {}
        await engine.collective_rpc("watch_calls")
    for name in spec["workloads"]:
        stage(name)
        await asyncio.sleep(0.5)  # copies of the workload before may still be on their way
        record["workloads"][name] = await WORKLOADS[name](shape, ask, turn)
        if spec["calls"]:
            [calls] = await engine.collective_rpc("take_calls")
            record["calls"][name] = until_first_tokens(calls, record["workloads"][name])
        gc.collect()
    record["resident_bytes"] = resident_bytes(os.getpid())
    record["available_drop_bytes"] = available - available_bytes()
    if spec["prove"]:
        stage("bytes")
        try:
            async with turn():
                record["came_back"] = await came_back(shape, ask, engine.collective_rpc)
        except Exception as error:  # noqa: BLE001 - what was measured before stands
            record["not_proven"] = repr(error)
    if spec["measure_copy"]:
        with suppress(RuntimeError, AssertionError):  # not worth a row
            record["pinned_copy_gb_s"] = pinned_copy_gb_s()
    record["complete"] = True
    stage("done")


def main() -> None:
    spec_file, record_file = map(Path, sys.argv[1:])
    asyncio.run(serve(json.loads(spec_file.read_text()), {}, record_file))
    sys.stdout.flush()
    os._exit(0)  # whatever an engine still has running


if __name__ == "__main__":
    main()
