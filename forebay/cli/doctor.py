"""`forebay doctor`: judges the readings of a machine, and vLLM's settings."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from forebay.amounts import shown, typed
from forebay.cli import kinds, transfer
from forebay.cli.findings import Finding, Severity, as_json, as_text, worst
from forebay.cli.machine import Machine, read_machine
from forebay.cli.sizes import Memory
from forebay.cli.transfer import Given
from forebay.copier.memory import MACHINE
from forebay.errors import is_whole
from forebay.parsing import read_json
from forebay.plan.models import kv_bytes_per_token
from forebay.settings import DEFAULT_BYTES, NEWEST_VLLM, OLDEST_VLLM

_TOKENS_PER_BLOCK = 16  # vLLM's default
_LEAST_BLOCK_BYTES = 64 << 10
"""A block of a model with two layers, two heads of 128 and 32 tokens. Hardly any has smaller ones."""


class Asked(NamedTuple):
    per_rank_bytes: int
    ranks: int  # on this machine, of all its engines

    @property
    def num_bytes(self) -> int:
        return self.per_rank_bytes * self.ranks


def run(options: Namespace) -> int:
    machine = read_machine()
    memory = None if options.memory is None else Memory.parse(options.memory, machine.limits)
    given, found = None, []
    if options.config is not None:
        try:
            given = transfer.read(options.config)
        except transfer.UnreadableError as error:
            found.append(kinds.CONFIG_UNREADABLE.found(why_it_cannot_be_read=error))
    found = [*examine(machine, given, memory), *found]
    print(as_json(found) if options.json else as_text(found, colour=sys.stdout.isatty()))
    return {Severity.WARNING: 1, Severity.ERROR: 2}.get(worst(found), 0)


def examine(machine: Machine, given: Given | None = None, memory: Memory | None = None) -> list[Finding]:
    asked = _asked(given, memory)
    found = [
        *_installed(machine),
        *_gpu(machine, asked),
        *_memory(machine, asked),
        *_kernel(machine),
        *_numa(machine, asked),
        *_shared(machine),
        *_block(given, asked),
    ]
    return [*found, *transfer.check(given)] if given else found


def _asked(given: Given | None, memory: Memory | None) -> Asked:
    engine_ranks, engines = (given.ranks, given.engines) if given else (1, 1)
    settings = given.settings() if given else None
    if memory is not None:
        per_rank = memory.num_bytes if memory.per_rank else memory.num_bytes // engine_ranks
    elif settings is not None:
        per_rank = settings.per_rank(engine_ranks)
    else:
        per_rank = DEFAULT_BYTES // engine_ranks
    return Asked(per_rank, engine_ranks * engines)


def _installed(machine: Machine) -> Iterator[Finding]:
    version = ".".join(map(str, machine.python))
    yield (kinds.PYTHON if machine.python >= (3, 11) else kinds.PYTHON_OLD).found(version=version)
    yield _vllm(machine.vllm)
    torch = machine.torch
    if torch is None:
        yield kinds.TORCH_MISSING.found()
    elif torch.rocm:
        yield kinds.TORCH_ROCM.found(version=torch.version)
    elif not torch.cuda and machine.gpus.bus_ids:
        yield kinds.TORCH_CPU.found(version=torch.version)
    else:
        yield kinds.TORCH.found(version=torch.version, target=f"CUDA {torch.cuda}" if torch.cuda else "CPUs")


def _vllm(version: str | None) -> Finding:
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST_VLLM, NEWEST_VLLM))
    if version is None:
        return kinds.VLLM_MISSING.found(newest=newest)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else None
    if release is None or release > NEWEST_VLLM:
        return kinds.VLLM_UNTESTED.found(version=version or "without a number", oldest=oldest, newest=newest)
    kind = kinds.VLLM if release >= OLDEST_VLLM else kinds.VLLM_OLD
    return kind.found(version=version, oldest=oldest, newest=newest)


def _gpu(machine: Machine, asked: Asked) -> Iterator[Finding]:
    gpus = machine.gpus
    if not gpus.bus_ids:
        needed = machine.torch is not None and machine.torch.cuda is not None
        yield kinds.GPU_MISSING.found(reason=gpus.reason) if needed else kinds.GPU_NONE.found()
        return
    kind = kinds.GPU if gpus.batched_copies else kinds.DRIVER_OLD
    yield kind.found(count=len(gpus.bus_ids), version=gpus.cuda)
    kind = kinds.TRITON_MISSING if machine.triton_error else kinds.TRITON
    yield kind.found(reason=machine.triton_error)
    limit = machine.memlock_bytes
    if limit is None or limit >= asked.num_bytes:
        yield kinds.MEMLOCK.found(limit="no limit" if limit is None else shown(limit))
    else:
        yield kinds.MEMLOCK_LOW.found(limit=shown(limit), asked=shown(asked.num_bytes))


def _memory(machine: Machine, asked: Asked) -> Iterator[Finding]:
    if not machine.limits:
        yield kinds.MEMORY_UNKNOWN.found()
        return
    wanted = asked.num_bytes
    least = min(machine.limits, key=lambda limit: limit.total_bytes)
    tightest = min(machine.limits, key=lambda limit: limit.available_bytes - limit.reserve_bytes(wanted))
    reserve = tightest.reserve_bytes(wanted)
    fits = typed(max(0, tightest.available_bytes - tightest.reserve_bytes(tightest.total_bytes)))
    if wanted > least.total_bytes:
        yield kinds.MEMORY_TOO_LARGE.found(
            asked=shown(wanted), limit=least.name, total=shown(least.total_bytes), fits=fits
        )
    elif wanted + reserve > tightest.available_bytes:
        available = shown(max(0, tightest.available_bytes))
        yield kinds.MEMORY_SHORT.found(
            asked=shown(wanted), limit=tightest.name, available=available, reserve=shown(reserve), fits=fits
        )
    else:
        yield kinds.MEMORY.found(available=shown(tightest.available_bytes), asked=shown(wanted))
    whole = next((limit.total_bytes for limit in machine.limits if limit.name == MACHINE), 0)
    if least.total_bytes < whole:
        yield kinds.CONTAINER_LIMIT.found(limit=shown(least.total_bytes), machine=shown(whole))


def _kernel(machine: Machine) -> Iterator[Finding]:
    if machine.huge_pages == "never":
        yield kinds.HUGE_PAGES_OFF.found()
    elif machine.huge_pages:
        yield kinds.HUGE_PAGES.found(setting=machine.huge_pages)
    if machine.overcommit == 2:
        left = machine.commit_left_bytes
        yield kinds.OVERCOMMIT_STRICT.found(left="little" if left is None else shown(max(0, left)))


def _numa(machine: Machine, asked: Asked) -> Iterator[Finding]:
    if len(machine.numa_bytes) < 2:
        yield kinds.NUMA.found(how_many_nodes_and_which_have_gpus="one NUMA node")
        return
    nodes = len(machine.numa_bytes)
    if None in machine.gpu_nodes:
        yield kinds.NUMA_UNKNOWN.found(nodes=nodes)
        return
    used = Counter(node for node in machine.gpu_nodes if node is not None)
    of_gpus = ", ".join(map(str, sorted(used))) if used else "none"
    yield kinds.NUMA.found(how_many_nodes_and_which_have_gpus=f"{nodes} NUMA nodes, with GPUs: {of_gpus}")
    for node, gpus in sorted(used.items()):
        share, total = asked.num_bytes * gpus // used.total(), machine.numa_bytes.get(node, 0)
        if share > total:
            fits = typed(total * used.total() // gpus)
            yield kinds.NUMA_SMALL.found(node=node, total=shown(total), asked=shown(share), fits=fits)


def _shared(machine: Machine) -> Iterator[Finding]:
    for file in machine.shared:
        if not file.num_bytes:
            continue
        kind = kinds.SHM_IN_USE if file.in_use else kinds.SHM_LEFTOVER
        yield kind.found(name=file.name, size=shown(file.num_bytes))


def _block(given: Given | None, asked: Asked) -> Iterator[Finding]:
    """What fits no block. How large one is for sure only the engine knows, and it refuses what is too little."""
    block = (_block_bytes(given) if given else None) or _LEAST_BLOCK_BYTES
    if asked.per_rank_bytes < block:
        yield kinds.MEMORY_UNDER_BLOCK.found(asked=shown(asked.per_rank_bytes), block=shown(block))


def _block_bytes(given: Given) -> int | None:
    """On one rank, if the model is a plain one in a folder of this machine."""
    tokens = given.engine.get("block_size") or _TOKENS_PER_BLOCK
    try:
        model = read_json(Path(str(given.engine["model"])) / "config.json")
        each = kv_bytes_per_token(model, given.ranks)
    except (KeyError, OSError, ValueError, AttributeError):
        return None
    return each * tokens if each and is_whole(tokens) else None
