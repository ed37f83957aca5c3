"""What vLLM is given, as `--kv-transfer-config` or as a file of all its settings, and what is wrong with it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cli import kinds
from forebay.cli.findings import Finding
from forebay.errors import ConfigError, ForebayError, UnknownKeyError, is_whole
from forebay.parsing import parse_json, read_all
from forebay.settings import CONNECTOR, KNOWN, MODULE_PATH, WHERE, ConnectorSettings

# Of all releases that Forebay was written for.
TRANSFER_KEYS = (
    *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy", WHERE),
    *("engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port"),
    "enable_permute_local_kv",
)
# vLLM asks a producer for loads, too, and holds back fewer blocks.
ROLES = ("kv_both", "kv_producer")
# Some of vLLM's own settings, so that they may stand beside the connector's.
_ENGINE_KEYS = (
    *("model", "block_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("enable_prefix_caching", "no_enable_prefix_caching"),
)
_RIGHT = {
    **dict.fromkeys(("cpu_bytes_to_use", "cpu_bytes_to_use_per_rank"), "64GB"),
    **dict.fromkeys(("lazy_offload", "block_layout"), False),
    "kv_offload_backend": "cpu",
    "eviction_policy": "lru",
    "load_deadline_s": 30.0,
    "wait_deadline_s": 2.0,
    "store_deadline_s": 60.0,
    "min_load_tokens": 0,
    "verify": "all",
    "record_trace": "/var/lib/forebay",
    "record_trace_bytes": "1GB",
    "inject_faults": {},
}


class UnreadableError(ForebayError):
    """Not a file, not JSON, or not an object."""


class Given(NamedTuple):
    transfer: Mapping[str, Any] | None
    engine: Mapping[str, Any]

    @property
    def extra(self) -> Any:
        extra = (self.transfer or {}).get(WHERE)
        return {} if extra is None else extra

    @property
    def ranks(self) -> int:
        """Of one engine."""
        return self._number("tensor_parallel_size") * self._number("pipeline_parallel_size")

    @property
    def engines(self) -> int:
        return self._number("data_parallel_size")

    @property
    def prefix_caching(self) -> bool:
        off = self.engine.get("no_enable_prefix_caching", False)
        return off is not True and self.engine.get("enable_prefix_caching") is not False

    def settings(self) -> ConnectorSettings | None:
        """Those of the connector, if they are right."""
        if self.transfer is None or not isinstance(self.extra, Mapping):
            return None
        try:
            return ConnectorSettings.parse(self.extra)
        except ConfigError:
            return None

    def _number(self, key: str) -> int:
        number = self.engine.get(key, 1)
        return number if is_whole(number) and number > 0 else 1


def read(name: str) -> Given:
    """From a file, or from standard input if its name is `-`. Raises UnreadableError."""
    shown = "standard input" if name == "-" else name
    try:
        if name == "-":
            text = read_all(sys.stdin)
        else:
            with Path(name).open() as file:
                text = read_all(file)
    except (OSError, ValueError) as error:
        raise UnreadableError(f"{shown}: expected a file that can be read, got {error}") from error
    return split(_loads(text, shown), shown)


def split(document: object, shown: str) -> Given:
    if not isinstance(document, Mapping):
        raise UnreadableError(f"{shown}: expected a JSON object, got {json.dumps(document)[:40]}")
    # As in vLLM's files of settings, where they are written like options.
    everything = {_plain(key): value for key, value in document.items()}
    if "kv_transfer_config" in everything:
        transfer = everything.pop("kv_transfer_config")
        if isinstance(transfer, str):
            transfer = _loads(transfer, "kv_transfer_config")
        if not isinstance(transfer, Mapping):
            raise UnreadableError(f"kv_transfer_config: expected a JSON object, got {transfer!r}")
        return Given(transfer, everything)
    engine = {key: everything.pop(key) for key in _ENGINE_KEYS if key in everything}
    if engine and not any(key.startswith("kv_") for key in everything):
        return Given(None, {**engine, **everything})
    return Given({key: value for key, value in document.items() if _plain(key) not in engine}, engine)


def _plain(key: str) -> str:
    return key.lstrip("-").replace("-", "_")


def check(given: Given) -> list[Finding]:
    """All that is wrong, not only the first. Says so if nothing is."""
    found = [*_check_transfer(given), *_check_extra(given.extra)]
    if not given.prefix_caching:
        found.append(kinds.PREFIX_CACHING_OFF.found())
    return found or [kinds.CONFIG.found()]


def _check_transfer(given: Given) -> Iterator[Finding]:
    transfer = given.transfer
    if transfer is None:
        yield kinds.CONNECTOR_NONE.found()
        return
    unknown = [
        UnknownKeyError(key, TRANSFER_KEYS, "kv_transfer_config") for key in transfer if key not in TRANSFER_KEYS
    ]
    for error in unknown:
        yield _unknown(error, transfer[str(error.value)])
    meant = {error.nearest for error in unknown} - transfer.keys()  # misspelt, and said already
    connector = transfer.get("kv_connector")
    if connector != CONNECTOR and "kv_connector" not in meant:
        yield kinds.CONNECTOR_OTHER.found(expected=CONNECTOR, got=_shown(connector))
    path = transfer.get("kv_connector_module_path")
    if path != MODULE_PATH and "kv_connector_module_path" not in meant:
        yield kinds.MODULE_PATH.found(expected=MODULE_PATH, got=_shown(path))
    if (role := transfer.get("kv_role")) not in ROLES and "kv_role" not in meant:
        kind = kinds.ROLE_ONE_SIDED if role == "kv_consumer" else kinds.ROLE_WRONG
        yield kind.found(got=_shown(role))
    policy = transfer.get("kv_load_failure_policy")
    if policy not in ("recompute", "fail", None):
        line = ConfigError("kv_load_failure_policy", policy, "'recompute' or 'fail'")
        yield _wrong(line, _pair("kv_load_failure_policy", "recompute"))
    elif policy != "recompute" and "kv_load_failure_policy" not in meant:
        yield kinds.FAILURE_POLICY.found(got=_shown(policy))


def _check_extra(extra: Any) -> Iterator[Finding]:
    if not isinstance(extra, Mapping):
        error = ConfigError(WHERE, extra, "a JSON object")
        yield _wrong(error, _pair(WHERE, {"cpu_bytes_to_use": "64GB"}))
        return
    # One at a time: the engine names the first that is wrong, and here all are wanted.
    for key, value in extra.items():
        if key not in KNOWN:
            yield _unknown(UnknownKeyError(key, KNOWN, WHERE), value)
            continue
        try:
            ConnectorSettings.parse({key: value})
        except ConfigError as error:
            yield _wrong(error, _pair(key, _RIGHT[key]))
    if extra.get("inject_faults") is not None:
        yield kinds.FAULTS_INJECTED.found()


def _unknown(error: UnknownKeyError, value: object) -> Finding:
    right = f"remove {json.dumps(error.value)}" if error.nearest is None else _pair(error.nearest, value)
    return kinds.UNKNOWN_KEY.found(the_key_and_the_nearest_right_one=error, the_right_key=right)


def _wrong(error: ConfigError, right: str) -> Finding:
    return kinds.WRONG_VALUE.found(what_was_expected_and_what_came=error, a_right_value=right)


def _pair(key: str, value: object) -> str:
    return f"{json.dumps(key)}: {json.dumps(value)}"


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)


def _loads(text: str, shown: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableError(f"{shown}: expected JSON, got text that is none: {error}") from error
