"""One run, in a process of its own: a vLLM in this process, asked one question at a time.

    python -m demo.engine SPEC FD

One at a time, because what else is in a batch may change the last bits of floats, and with them a token. What it
has to say goes to the file descriptor, a line of JSON each (see children.py). What vLLM says goes to stdout.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo.model import SIZES, Size, is_made, model_folder
from demo.results import Answer
from demo.workload import ANSWER, BLOCK, Workload, warm_up_prompt

Say = Callable[[dict[str, Any]], None]

# Read when vLLM and torch are imported. One thread computes, and leaves a core for copies where there are
# two. With two threads on two busy cores a token took 10 to 270 ms; whether it was only the load was not tried.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
_PR_SET_PDEATHSIG = 1


class Engine:
    """What Forebay gets is what a user writes as --kv-transfer-config, with the mode as the only difference."""

    def __init__(self, mode: str, model: Path, size: Size, workload: Workload) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        args: dict[str, Any] = {
            "model": str(model),
            "dtype": "float32",
            "block_size": BLOCK,
            "num_gpu_blocks_override": workload.device_blocks,
            "max_model_len": workload.max_model_len,
            "max_num_batched_tokens": max(2048, workload.max_model_len),
            "max_num_seqs": 1,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        if mode != "none":
            args["kv_transfer_config"] = {
                "kv_connector": "SimpleCPUOffloadConnector",
                "kv_connector_module_path": "forebay.vllm",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": workload.host_blocks * BLOCK * size.kv_bytes_per_token,
                    "lazy_offload": mode == "lazy",
                },
            }
        self._engine = LLMEngine.from_engine_args(EngineArgs(**args))
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._asked = 0

    def ask(self, prompt: str) -> tuple[Any, float]:
        """What vLLM answers, always the likeliest token, and the seconds to the first. Then waits for copies."""
        from vllm import SamplingParams

        self._asked += 1
        params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
        output, ttft_s = None, None
        started = time.perf_counter()
        self._engine.add_request(f"request-{self._asked}", {"prompt": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if ttft_s is None and output.outputs[0].token_ids:
                    ttft_s = time.perf_counter() - started
        while self._scheduler.has_requests():
            self._engine.step()
        if output is None or ttft_s is None or len(output.outputs[0].token_ids) != ANSWER:
            raise RuntimeError(f"vLLM did not answer request {self._asked} with {ANSWER} tokens")
        return output, ttft_s

    @property
    def loaded_tokens(self) -> int:
        """That have arrived from the host so far."""
        if (connector := self._scheduler.connector) is None:
            return 0
        return int(connector.scheduler_manager.manager.stats.loaded_blocks) * BLOCK


def serve(mode: str, size: Size, workload: Workload, folder: Path, say: Say) -> None:
    say({"stage": "starting"})
    if not is_made(folder / f"model-{size.name}", size):
        say({"stage": "making the model"})
    model = model_folder(folder, size)
    say({"stage": "loading vLLM"})
    import torch
    import vllm

    engine = Engine(mode, model, size, workload)
    say({"stage": "warming up"})
    engine.ask(warm_up_prompt(workload))
    texts: list[list[str]] = [[] for _ in range(workload.sessions)]
    loaded_before, started = engine.loaded_tokens, time.perf_counter()
    for turn in range(workload.turns):
        for session in range(workload.sessions):
            say({"turn": turn, "session": session})
            prompt = workload.prompt(session, texts[session])
            output, ttft_s = engine.ask(prompt)
            said = output.outputs[0]
            if len(output.prompt_token_ids) != len(prompt) or len(said.text) != ANSWER:
                raise RuntimeError("a token is not a letter: the tokenizer is not the demo's")
            texts[session].append(said.text)
            tokens = tuple(int(token) for token in said.token_ids)
            cached = output.num_cached_tokens or 0
            say({"answer": asdict(Answer(session, turn, len(prompt), cached, ttft_s, tokens, said.text))})
    total_s = time.perf_counter() - started
    versions = {"vLLM": vllm.__version__, "torch": torch.__version__}
    say(
        {"done": {"total_s": total_s, "loaded_tokens": engine.loaded_tokens - loaded_before, "versions": versions}}
    )


def main() -> None:
    spec, channel = json.loads(sys.argv[1]), int(sys.argv[2])
    # Should the parent be killed where it cannot clean up, this process goes too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        os._exit(1)

    def say(message: dict[str, Any]) -> None:
        os.write(channel, f"{json.dumps(message)}\n".encode())

    try:
        serve(spec["mode"], SIZES[spec["size"]], Workload(**spec["workload"]), Path(spec["folder"]), say)
    except Exception as error:
        say({"problem": f"{type(error).__name__}: {error}"})
        raise
    sys.stdout.flush()
    os._exit(0)  # nothing is left to be said or saved; tearing an engine down takes seconds


if __name__ == "__main__":
    main()
