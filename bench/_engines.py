"""The engines that gpu_peers.py compares: vLLM without offload, with each peer and with Forebay."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _workloads import Shape

LLAMA_8B = {  # Llama-3.1-8B's shape; with dummy weights config.json is all there is of a model
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}

Settings = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    name: str
    label: str
    connector: Callable[[int], Settings] | None = None
    """kv_transfer_config for so many bytes of host memory."""
    environment: Callable[[int], dict[str, str]] = field(default=lambda host_bytes: {})
    module: str = "vllm"
    """What has to be installed for it."""

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None

    @property
    def is_forebay(self) -> bool:
        return self.module == "forebay"

    @property
    def is_peer(self) -> bool:
        return self.connector is not None and not self.is_forebay


def simple(*, lazy: bool) -> Callable[[int], Settings]:
    return lambda host_bytes: {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, "lazy_offload": lazy},
    }


def offloading(host_bytes: int) -> Settings:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes},
    }


def lmcache(host_bytes: int) -> Settings:
    return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


def lmcache_environment(host_bytes: int) -> dict[str, str]:
    return {
        "LMCACHE_LOCAL_CPU": "True",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": f"{host_bytes / 2**30:.3f}",
        "LMCACHE_CHUNK_SIZE": "256",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_LOG_LEVEL": "WARNING",
    }


def forebay(*, lazy: bool, extra: Settings | None = None, role: str = "kv_both") -> Callable[[int], Settings]:
    return lambda host_bytes: {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_module_path": "forebay.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": host_bytes, "lazy_offload": lazy} | (extra or {}),
    }


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("none", "no offload"),
        Engine("simple-eager", "Simple eager", simple(lazy=False)),
        Engine("simple-lazy", "Simple lazy", simple(lazy=True)),
        Engine("offloading", "Offloading", offloading),
        Engine("lmcache", "LMCache", lmcache, lmcache_environment, module="lmcache"),
        Engine("forebay-eager", "Forebay eager", forebay(lazy=False), module="forebay"),
        Engine("forebay-lazy", "Forebay lazy", forebay(lazy=True), module="forebay"),
    )
}


def with_settings(extra: Settings) -> list[Engine]:
    """Both modes of Forebay with other settings, as engines of their own."""
    says = " ".join(f"{key}={value}" for key, value in extra.items())
    return [
        Engine(
            f"forebay-{mode}+{says.replace(' ', ',')}",
            f"{mode} {says}",
            forebay(lazy=mode == "lazy", extra=extra),
            module="forebay",
        )
        for mode in ("eager", "lazy")
    ]


def engine_args(
    engine: Engine,
    shape: Shape,
    model: Path,
    *,
    cuda: bool,
    cuda_graphs: str | None,
    batched_tokens: int,
    beside: int = 1,
) -> Settings:
    """`beside`: how many engines share the device."""
    args: Settings = {
        "model": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16" if cuda else "float32",
        "enforce_eager": cuda_graphs is None,
        "enable_prefix_caching": True,
        "block_size": shape.block_tokens,
        "num_gpu_blocks_override": shape.device_blocks,
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": batched_tokens,
        "max_num_seqs": 128 if cuda else 8,
        "worker_extension_cls": "_calls.Calls",
    }
    if cuda:
        args["gpu_memory_utilization"] = min(0.6, 0.9 / beside)  # the cache is cut anyway
    if cuda_graphs is not None:
        args["compilation_config"] = graphs(cuda_graphs, shape.at_once)
    if engine.connector is not None:
        args["kv_transfer_config"] = engine.connector(shape.host_bytes)
    return args


GRAPHS = ("decode", "full")


def graphs(kind: str, at_once: int) -> Settings:
    """CUDA graphs for decoding so many requests at a time; if full, also for other steps of up to 512 tokens, as
    vLLM has them by default. Without compiling, which takes a minute."""
    sizes = [1, 2, 4, *range(8, at_once + 1, 8)]
    if kind == "full":
        sizes += [size for size in (16, 32, 64, 128, 256, 512) if size > sizes[-1]]
    mode = {"decode": "FULL_DECODE_ONLY", "full": "FULL"}[kind]
    return {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}


def write_model(folder: Path, config: Settings) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
