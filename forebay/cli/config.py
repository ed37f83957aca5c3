"""`forebay config`: the JSON for `--kv-transfer-config`, or what is wrong with one."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forebay.amounts import counted, shown
from forebay.cli import kinds, transfer
from forebay.cli.findings import Severity, as_text, worst
from forebay.cli.sizes import Memory
from forebay.copier.memory import Limit, memory_limits
from forebay.errors import ConfigError
from forebay.parsing import read_json
from forebay.plan.models import kv_bytes_per_token
from forebay.settings import CONNECTOR, DEFAULT_BYTES, MODULE_PATH, WHERE, ConnectorSettings


def run(options: Namespace) -> int:
    return show(options) if options.check is None else check(options.check)


def check(name: str) -> int:
    try:
        found = transfer.check(transfer.read(name))
    except transfer.UnreadableError as error:
        found = [kinds.CONFIG_UNREADABLE.found(why_it_cannot_be_read=error)]
    print(as_text(found, colour=sys.stdout.isatty()))
    return 1 if worst(found) is Severity.ERROR else 0


def show(options: Namespace) -> int:
    limits = memory_limits()
    memory = None if options.memory is None else Memory.parse(options.memory, limits)
    extra: dict[str, Any] = {}
    if memory is not None:
        extra[memory.key] = memory.setting
    else:
        extra["cpu_bytes_to_use"] = DEFAULT_BYTES
    if options.mode is not None:
        extra["lazy_offload"] = options.mode == "lazy"
    if options.policy is not None:
        extra["eviction_policy"] = options.policy
    if options.verify is not None:
        extra["verify"] = options.verify
    settings = ConnectorSettings.parse(extra)  # raises on what an engine would refuse
    for line in [*_explain(settings, limits, options)]:  # all of them, or only what is wrong
        print(f"# {line}", file=sys.stderr)
    whole = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": MODULE_PATH,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        WHERE: extra,
    }
    print(json.dumps(whole))
    return 0


def _explain(settings: ConnectorSettings, limits: list[Limit], options: Namespace) -> Iterator[str]:
    ranks = options.ranks or 1
    per_rank = settings.per_rank(ranks)
    if per_rank < 1:
        given = options.memory or f"{DEFAULT_BYTES} bytes, as by default"
        raise ConfigError("--memory", given, f"at least a byte for each of {ranks} ranks")
    if options.memory is None:
        yield f"{shown(DEFAULT_BYTES)} for all ranks of an engine together, as by default (see --memory)"
    elif settings.bytes_per_rank is None:
        yield f"{shown(settings.total_bytes)} for all ranks of an engine together"
    else:
        yield f"{shown(per_rank)} for each rank"
    if options.ranks:
        exactly = f"{per_rank} byte{'' if per_rank == 1 else 's'}"  # without commas: a script may want it
        on = "1 rank" if ranks == 1 else f"each of {ranks} ranks"
        yield f"{shown(per_rank)} ({exactly}) on {on}, {shown(per_rank * ranks)} in all"
    if limits:
        least = min(limits, key=lambda limit: limit.total_bytes)
        if per_rank * ranks > least.total_bytes:
            yield f"more than there is: {least.name} has {shown(least.total_bytes)}; see forebay doctor"
    if options.model is not None:
        yield _tokens(_read_model(options.model), per_rank, ranks)


def _tokens(model: Mapping[str, Any], per_rank: int, ranks: int) -> str:
    try:
        size = kv_bytes_per_token(model, ranks)
    except ConfigError as error:
        return f"tokens: not counted, --ranks: expected {error.allowed}, got {ranks}"
    if size is None:
        name = model.get("model_type", "this model")
        return f"tokens: not counted, {name} is not a plain transformer, or its config.json does not say enough"
    tokens, each = counted(per_rank // size, "token"), counted(size, "byte")
    return f"about {tokens}: {each} each on a rank, with a KV cache of 16 bits"


def _read_model(folder: str) -> Mapping[str, Any]:
    file = Path(folder) / "config.json"
    try:
        model = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError("--model", folder, f"a folder with a config.json ({error})") from error
    if not isinstance(model, Mapping):
        raise ConfigError("--model", folder, "a folder whose config.json is a JSON object")
    return model
