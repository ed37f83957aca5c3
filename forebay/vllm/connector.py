"""The class that vLLM loads: every hook, passed to the half it belongs to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from forebay.errors import LayoutError
from forebay.vllm import compat
from forebay.vllm.config import ConnectorConfig
from forebay.vllm.metadata import RankSlots, SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from forebay.vllm.scheduler import SimpleCPUOffloadScheduler
from forebay.vllm.stats import ForebayStats
from forebay.vllm.worker import SimpleCPUOffloadWorker

logger = init_logger("vllm.forebay")


class SimpleCPUOffloadConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps KV blocks in host memory and brings them back."""

    _cache_hit_source = compat.host_hit_source()

    @property
    def requires_kv_delivery(self) -> bool:
        """It is a cache: what was not stored is computed again."""
        return False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = ConnectorConfig.parse(self._kv_transfer_config.kv_connector_extra_config or {})
        ranks = vllm_config.parallel_config.world_size
        self._block_layout = config.block_layout
        self.scheduler_manager: SimpleCPUOffloadScheduler | None = None
        self.worker_handler: SimpleCPUOffloadWorker | None = None
        compat.warn_if_untested()
        compat.log_as_vllm_does()
        if not vllm_config.cache_config.enable_prefix_caching:
            logger.warning_once("forebay: prefix caching is off, and without it there is nothing to offload")
            return
        config.check_capacity(kv_cache_config, ranks)
        settings = config.for_ranks(ranks)
        if role == KVConnectorRole.WORKER:
            self.worker_handler = SimpleCPUOffloadWorker(
                vllm_config,
                kv_cache_config,
                settings.capacity_bytes,
                faults=config.faults,
                verify=config.verify,
                lazy=config.is_lazy,
            )
            return
        self.scheduler_manager = SimpleCPUOffloadScheduler(
            vllm_config,
            kv_cache_config,
            settings.capacity_bytes,
            config.is_lazy,
            settings=settings,
            record_trace=config.record_trace,
            record_trace_bytes=config.record_trace_bytes,
        )
        logger.info("forebay: %s", config.summary(self.scheduler_manager.num_cpu_blocks, ranks))
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                "forebay: kv_load_failure_policy is %r: a request whose load fails ends with an error; "
                "with 'recompute' it computes instead",
                self._kv_transfer_config.kv_load_failure_policy,
            )

    # --- worker -------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.worker_handler is not None:
            self.worker_handler.register_kv_caches(kv_caches)

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """How releases up to 0.28 ask."""
        return self._block_layout

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """How releases from 0.29 on ask."""
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        return compat.BLOCK_LAYOUT if ConnectorConfig.parse(extra).block_layout else None

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[Any]) -> None:
        if self.worker_handler is not None:
            self.worker_handler.register_cross_layers_kv_cache(kv_cache)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self.worker_handler is None else self.worker_handler.handshake()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self.worker_handler is not None:
            self.worker_handler.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        if self.worker_handler is not None:
            self.worker_handler.clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self.worker_handler is not None:
            self.worker_handler.handle_preemptions(kv_connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self.worker_handler is not None:
            self.worker_handler.start_load_kv()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Requests that wait for a load are not in the batch."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Whole blocks are stored, all layers together."""

    def wait_for_save(self) -> None:
        if self.worker_handler is not None:
            self.worker_handler.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.worker_handler is None:
            return None, None
        return self.worker_handler.get_finished(finished_req_ids)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self.worker_handler is None:
            return super().get_transfer_results(finished_req_ids)
        return self.worker_handler.get_transfer_results(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.worker_handler is None else self.worker_handler.get_block_ids_with_load_errors()

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        return None if self.worker_handler is None else self.worker_handler.build_connector_worker_meta()

    # --- scheduler ----------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.bind_gpu_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        ranks = [said for said in metadata.values() if isinstance(said, RankSlots)]
        if self.scheduler_manager is None or not ranks:
            return
        blocks = self.scheduler_manager.kv_cache_config.num_blocks
        for said in ranks:
            if said.num_blocks != blocks:
                raise LayoutError("device blocks of a rank", said.num_blocks, f"{blocks}, as the scheduler has")
        ready = {said.rank: said.ready for said in ranks}
        self.scheduler_manager.learn_slot_bytes(said.bytes_per_slot for said in ranks)
        self.scheduler_manager.agree_on_slots([said.slots for said in ranks], ready)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.scheduler_manager is None:
            return 0, False
        return self.scheduler_manager.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.scheduler_manager is None:
            return SimpleCPUOffloadMetadata()
        return self.scheduler_manager.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_manager is None:
            return False, None
        return self.scheduler_manager.request_finished(request, block_ids)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.scheduler_manager is None:
            return False, None
        return self.scheduler_manager.request_finished_all_groups(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_manager is not None and self.scheduler_manager.has_pending_work()

    def take_events(self) -> Iterable[KVCacheEvent]:
        return () if self.scheduler_manager is None else self.scheduler_manager.take_events()

    def reset_cache(self) -> bool | None:
        return None if self.scheduler_manager is None else self.scheduler_manager.reset()

    # --- both ---------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return None if self.scheduler_manager is None else self.scheduler_manager.get_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        # A copy: vLLM gives the same dictionary to every logger, and what each builds is added to.
        return ForebayStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Called where the /metrics page is made, which is another process than the engine's."""
        if not compat.HAS_CONNECTOR_METRICS:
            return None
        from forebay.vllm.prometheus import ForebayPromMetrics

        return ForebayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Nothing is done layer by layer."""
        return False

    def shutdown(self) -> None:
        if self.scheduler_manager is not None:
            self.scheduler_manager.shutdown()
        if self.worker_handler is not None:
            self.worker_handler.shutdown()
