"""The core's events in vLLM's words, for vLLM's own publisher."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllm.v1.request import Request

from forebay.events import MEDIUM, Cleared, Event, Removed, Stored
from forebay.ids import Key
from forebay.vllm import compat
from forebay.vllm.layout import EngineLayout


class EventTranslator:
    def __init__(self, layout: EngineLayout, kv_cache_config: KVCacheConfig) -> None:
        self._layout = layout
        self._specs = [kv_cache_config.kv_cache_groups[number].kv_cache_spec for number in layout.group_ids]
        self._instead_of_cleared: list[KVCacheEvent] = []

    def will_clear(self, events: Iterable[Event], keys: Iterable[Key]) -> None:
        """The host pool is about to forget these keys, and what it has to say until now. vLLM's own "all cleared"
        names no medium: a router would believe that the device has lost everything too. So they are announced one
        by one, after those events: some may have left already, and only the events know of them."""
        self._instead_of_cleared = [*self.translate(events), *self._removed(list(keys))]

    def translate(self, events: Iterable[Event]) -> Iterator[KVCacheEvent]:
        for event in events:
            match event:
                case Stored():
                    yield self._stored(event)
                case Removed():
                    yield from self._removed(event.keys)
                case Cleared():
                    yield from self._instead_of_cleared
                    self._instead_of_cleared = []

    def _stored(self, event: Stored) -> KVCacheEvent:
        request = event.extra if isinstance(event.extra, Request) else None
        lora = request.lora_request if request is not None else None
        spec = self._specs[event.group]
        return compat.make_event(
            BlockStored,
            block_hashes=self._hashes(event.keys),
            parent_block_hash=None if event.parent is None else self._hashes([event.parent])[0],
            token_ids=list(event.token_ids),
            block_size=event.tokens_per_block,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            medium=event.medium,
            extra_keys=None if request is None or event.start is None else self._extra_keys(event, request),
            group_idx=self._layout.group_ids[event.group],
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            locality="LOCAL",
            session_id=getattr(request, "session_id", None),
        )

    def _extra_keys(self, event: Stored, request: Request) -> Any:
        span, position, found = event.tokens_per_block, 0, []
        for block in range(event.start or 0, (event.start or 0) + len(event.keys)):
            extra, position = generate_block_hash_extra_keys(request, block * span, (block + 1) * span, position)
            found.append(extra)
        return compat.event_extra_keys(found)

    def _removed(self, keys: Sequence[Key]) -> Iterator[KVCacheEvent]:
        by_group: dict[int, list[Key]] = {}
        for key in keys:
            by_group.setdefault(self._layout.kv.group_of(key), []).append(key)
        for group, of_group in by_group.items():
            yield compat.make_event(
                BlockRemoved,
                block_hashes=self._hashes(of_group),
                medium=MEDIUM,
                group_idx=self._layout.group_ids[group],
                locality="LOCAL",
            )

    def _hashes(self, keys: Iterable[Key]) -> list[Any]:
        length = self._layout.kv.bytes_per_hash
        return [maybe_convert_block_hash(key[:length]) for key in keys]
