"""Bytes of KV that a model keeps: by a local `config.json`, by name, or as given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import ceil, gcd
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError, is_whole
from forebay.groups import ChunkedLocal, FullAttention, Group, KVLayout, Recurrent, SlidingWindow
from forebay.parsing import read_json
from forebay.plan.known_models import KNOWN_MODELS
from forebay.plan.layers import (
    CACHE_DTYPES,
    Kind,
    Layer,
    Ranks,
    UnclearModelError,
    UnevenError,
    is_known,
    layers_of,
    text_config,
)

_MANY_MORE = 1.5  # from there on, kinds with more layers are split into groups of the size of the smallest


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are kept alike, all together, on one rank."""

    kind: Kind
    layers: int
    bytes_per_token: int
    window_tokens: int | None
    """How far back a window or a chunk goes: of a running request nothing before that is kept."""
    state_bytes: int
    """What a state takes, however long the prompt."""

    def bytes_of(self, tokens: int) -> int:
        """What the device keeps of a prompt of so many tokens, in whole tokens."""
        kept = tokens if self.window_tokens is None else min(tokens, self.window_tokens)
        return kept * self.bytes_per_token + (self.state_bytes if tokens else 0)


@dataclass(frozen=True, slots=True)
class ModelKV:
    name: str
    groups: Sequence[LayerGroup]
    tensor_parallel: int = 1
    cache_dtype: str = "auto"
    notes: Sequence[str] = field(default=())
    """What was assumed, in words."""

    @property
    def bytes_per_token(self) -> int:
        """On one rank, of all layers that keep tokens. The host knows no windows: every block that is computed is
        stored, and a prompt takes this much for each of its tokens."""
        return sum(group.bytes_per_token for group in self.groups)

    @property
    def total_bytes_per_token(self) -> int:
        """On all ranks. Heads that several ranks have count on each of them."""
        return self.bytes_per_token * self.tensor_parallel

    def host_bytes_per_token(self, block_tokens: int) -> float:
        """On one rank, with blocks as vLLM forms them: with the layers that fill up its groups, and with a state
        for each block where there are states."""
        layout = self.layout(block_tokens)
        return sum(layout.bytes_per_block / group.tokens_per_block for group in layout.groups)

    def bytes_per_block(self, tokens: int) -> int:
        """Of so many tokens, on one rank."""
        return self.bytes_per_token * tokens

    def total_bytes_per_block(self, tokens: int) -> int:
        return self.total_bytes_per_token * tokens

    def device_bytes(self, tokens: int) -> int:
        """What one rank keeps of a running prompt of so many tokens: windows end, states do not grow."""
        return sum(group.bytes_of(tokens) for group in self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps all tokens."""
        return {group.kind for group in self.groups} == {Kind.FULL}

    def layout(self, block_tokens: int) -> KVLayout:
        """The groups as vLLM forms them, and the bytes of a block: the same in every group, so that blocks can
        serve any of them. A state has a block too; blocks of tokens are made as large as that."""
        if not is_whole(block_tokens) or block_tokens < 1:
            raise ConfigError("block_tokens", block_tokens, "a whole number of at least 1")
        if len({group.kind for group in self.groups}) == 1 and len({g.window_tokens for g in self.groups}) == 1:
            kept = self.groups[0]
            size = sum(g.bytes_per_token * block_tokens + g.state_bytes for g in self.groups)
            return KVLayout((_group(kept, block_tokens),), block_tokens, size)
        per_token = [group.bytes_per_token // group.layers for group in self.groups if group.bytes_per_token]
        state = max(group.state_bytes // group.layers for group in self.groups)
        if per_token:
            block_tokens *= max(1, ceil(ceil(state / max(per_token)) / block_tokens))
        page = max(state, max(per_token, default=0) * block_tokens)
        sizes = [group.layers for group in self.groups]
        together = max(sizes) if max(sizes) < _MANY_MORE * min(sizes) else min(sizes)
        groups: list[Group] = []
        for group in self.groups:
            # Layers with smaller tokens have more of them in a block, if that comes out even.
            own = group.bytes_per_token // group.layers * block_tokens
            more = page // own if own and page % own == 0 else 1
            groups += [_group(group, block_tokens * more)] * ceil(group.layers / together)
        return KVLayout(tuple(groups), gcd(*(each.tokens_per_block for each in groups)), page * together)


def load_model(
    model: str | PathLike[str] | None = None,
    *,
    tensor_parallel: int = 1,
    cache_dtype: str = "auto",
    kv_bytes_per_token: int | None = None,
) -> ModelKV:
    """A folder with a `config.json`, that file, or a name such as "llama-3.1-8b"; or only `kv_bytes_per_token`, of
    all ranks together. Raises ConfigError."""
    if not is_whole(tensor_parallel) or tensor_parallel < 1:
        raise ConfigError("tensor_parallel", tensor_parallel, "a whole number of at least 1")
    if kv_bytes_per_token is not None:
        return _given(fspath(model or "given"), tensor_parallel, kv_bytes_per_token)
    if model is None:
        raise ConfigError("model", model, "a config.json, a name, or kv_bytes_per_token")
    path = Path(model)
    try:
        is_there = path.exists()
    except OSError as error:  # a name that is too long, or a folder nobody may look into
        wanted = f"a config.json that can be read, or a name ({error.strerror})"
        raise ConfigError("model", fspath(model), wanted) from None
    if is_there:
        return model_of(_read(path), fspath(model), tensor_parallel=tensor_parallel, cache_dtype=cache_dtype)
    found = KNOWN_MODELS.get(_plain_name(fspath(model)))
    if found is None:
        raise ConfigError(
            "model", fspath(model), f"a folder with a config.json, or a name{_nearest(fspath(model))}"
        )
    return model_of(found, _plain_name(fspath(model)), tensor_parallel=tensor_parallel, cache_dtype=cache_dtype)


def model_of(
    config: Mapping[str, Any], name: str, *, tensor_parallel: int = 1, cache_dtype: str = "auto"
) -> ModelKV:
    """Of what a config.json says."""
    if cache_dtype not in CACHE_DTYPES:
        raise ConfigError("cache_dtype", cache_dtype, f"one of {', '.join(CACHE_DTYPES)}")
    config = text_config(config)
    full = CACHE_DTYPES["auto" if CACHE_DTYPES[cache_dtype] < CACHE_DTYPES["auto"] else cache_dtype]
    try:
        layers = Counter(layers_of(config, Ranks(tensor_parallel, CACHE_DTYPES[cache_dtype], full)))
    except UnclearModelError as error:
        wanted = f"a config.json from which the KV cache can be counted ({error}), or kv_bytes_per_token"
        raise ConfigError("model", name, wanted) from None
    except UnevenError as error:
        raise ConfigError("tensor_parallel", tensor_parallel, str(error)) from None
    notes = []
    if not is_known(config):
        notes.append(f"{config.get('model_type', 'this model')} is not known: taken for what its fields say")
    groups = tuple(_layer_group(layer, count) for layer, count in layers.items())
    return ModelKV(name, groups, tensor_parallel, cache_dtype, tuple(notes))


def kv_bytes_per_token(model: Mapping[str, Any], ranks: int = 1) -> int | None:
    """On each of so many tensor parallel ranks, by a model's `config.json`. None if it is not a plain transformer,
    or does not say enough. Raises ConfigError if it cannot be spread over so many."""
    try:
        found = model_of(model, "model", tensor_parallel=ranks)
    except ConfigError as error:
        if error.setting == "tensor_parallel":
            raise
        return None
    return found.bytes_per_token if found.is_plain and not found.notes else None


def _given(name: str, tensor_parallel: int, bytes_per_token: int) -> ModelKV:
    if not is_whole(bytes_per_token) or bytes_per_token < 1:
        raise ConfigError("kv_bytes_per_token", bytes_per_token, "a whole number of at least 1")
    each = ceil(bytes_per_token / tensor_parallel)
    group = LayerGroup(Kind.FULL, 1, each, None, 0)
    return ModelKV(name, (group,), tensor_parallel, notes=("bytes of a token as given, kept by all layers",))


def _layer_group(layer: Layer, count: int) -> LayerGroup:
    return LayerGroup(
        layer.kind, count, layer.bytes_per_token * count, layer.reach_tokens, layer.state_bytes * count
    )


def _group(group: LayerGroup, block_tokens: int) -> Group:
    match group.kind:
        case Kind.FULL:
            return FullAttention(block_tokens)
        case Kind.STATE:
            return Recurrent(block_tokens)
    assert group.window_tokens is not None
    if group.kind is Kind.WINDOW:
        return SlidingWindow(block_tokens, window_tokens=group.window_tokens)
    return ChunkedLocal(block_tokens, chunk_tokens=group.window_tokens)


def _read(path: Path) -> Mapping[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError("model", fspath(path), f"a config.json that can be read ({error})") from None
    if not isinstance(config, Mapping):
        raise ConfigError("model", fspath(path), "a config.json that is a JSON object")
    return config


def _plain_name(name: str) -> str:
    """As in the table: `meta-llama/Llama-3.1-8B-Instruct` is `llama-3.1-8b`."""
    name = name.rsplit("/", 1)[-1].lower().removeprefix("meta-").replace("-instruct", "")
    for ending in ("-it", "-chat", "-base"):
        name = name.removesuffix(ending)
    return name


def _nearest(name: str) -> str:
    near = get_close_matches(_plain_name(name), KNOWN_MODELS, n=3, cutoff=0.5)
    return f" such as {', '.join(near or list(KNOWN_MODELS)[:3])}"
