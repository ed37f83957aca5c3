"""A rank's half: orders come with the step's metadata, are carried out by a copier, and are reported.

vLLM takes from a rank, for each load of a request, that it has ended and whether it failed: once per load. Who
tells it, a report of the copier or a verdict of the scheduler, is settled here by whether the load is still open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from forebay.copier import Copier
from forebay.copier.checksum import Verify
from forebay.copier.cuda import cuda_copier
from forebay.copier.faults import InjectedFaults
from forebay.copier.regions import block_regions
from forebay.copier.staged import FEW_WAIT_S, StagedCopier
from forebay.copier.torch_copier import TorchCopier
from forebay.errors import ForebayError, LostLoadError
from forebay.groups import host_slots
from forebay.ids import BlockId, Rank, RequestId, TransferId
from forebay.transfers import CopyOrder, Outcome, Report
from forebay.vllm import compat
from forebay.vllm.metadata import (
    Meanwhile,
    RankSlots,
    SimpleCPUOffloadMetadata,
    SimpleCPUOffloadWorkerMetadata,
    Verdict,
    nothing_meanwhile,
)

logger = init_logger("vllm.forebay")

_TRIES = 5

_LAZY_WAIT_S = 0.005
"""In lazy mode the engine is about to need blocks that are stored."""


@dataclass(slots=True)
class _OpenLoad:
    order: CopyOrder
    request_id: RequestId | None  # None once the engine was told of it
    tries_left: int = _TRIES - 1


class NothingToCopy:
    """The copier of a rank without KV caches, such as a pipeline stage without attention: it has nothing to add to
    any transfer, and says so."""

    slots = ready = 0

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._reports: list[Report] = []

    def submit(self, order: CopyOrder) -> None:
        self._reports.append(Report(order.id, self._rank, Outcome.DONE))

    def poll(self) -> list[Report]:
        reports, self._reports = self._reports, []
        return reports

    def close(self) -> None:
        pass


class SimpleCPUOffloadWorker:
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig | None,
        cpu_capacity_bytes: int,
        *,
        faults: InjectedFaults | None = None,
        verify: Verify = Verify.ALL,
        lazy: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.cpu_capacity_bytes = cpu_capacity_bytes
        self.num_cpu_blocks = 0
        self._bytes_per_slot = 0
        self._faults = faults
        self._verify = verify
        self._lazy = lazy
        self._recovers = kv_cache_config is None or compat.recovers(kv_cache_config)
        self._rank = Rank(vllm_config.parallel_config.rank)
        self._copier: Copier = NothingToCopy(self._rank)
        self._staged: StagedCopier | None = None  # the same, if it has a thread beside the engine's
        self._goes_on = False  # it was told that the engine has started
        self._metadata: SimpleCPUOffloadMetadata | None = None
        self._loads: dict[TransferId, _OpenLoad] = {}
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._meta = SimpleCPUOffloadWorkerMetadata({})
        self._on_their_way = 0  # transfers that the copier has not reported
        self._alone = vllm_config.parallel_config.world_size == 1
        self._is_asked = False  # by the scheduler, directly: see ended_meanwhile()
        self._meanwhile = nothing_meanwhile()
        self._submits_early = False
        self._grows = False  # whether slots become ready bit by bit
        self._waits_for_drafter = vllm_config.speculative_config is not None
        self._ready_told: int | None = None  # None: not asked yet, so all slots are counted on

    # --- before the first step ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
        if self._has_caches:
            # What is on the host was promised under the layout it was stored from.
            raise ForebayError("forebay: expected KV caches to be registered once, got them a second time")
        if self.kv_cache_config is None or not kv_caches:
            logger.warning("forebay: this rank has no KV cache; nothing to offload")
            return
        self._build_copier(list(_tensors(kv_caches)))

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """One tensor with all layers of a block side by side, as asked for by `block_layout`."""
        self.register_kv_caches({"all layers": kv_cache})

    def _build_copier(self, tensors: list[torch.Tensor]) -> None:
        assert self.kv_cache_config is not None
        device = tensors[0].device
        if device.type not in ("cpu", "cuda"):
            raise ForebayError(f"forebay: expected KV caches on a CPU or a CUDA device, got {device}")
        blocks = self.kv_cache_config.num_blocks
        slots = host_slots(blocks, compat.device_bytes(self.kv_cache_config), self.cpu_capacity_bytes)
        regions = block_regions(tensors, blocks)
        copier: TorchCopier | StagedCopier
        if device.type == "cuda":
            copier = cuda_copier(
                regions,
                slots,
                rank=self._rank,
                faults=self._faults,
                verify=self._verify,
                few_wait_s=_LAZY_WAIT_S if self._lazy else FEW_WAIT_S,
                waits=True,
            )
            self._staged = copier
            self._grows = True
            # Its copies wait for the engine's stream by themselves. A recurrent state may be written by a step
            # after the one that gave its block a hash, so there everything waits for the end of the step.
            groups = self.kv_cache_config.kv_cache_groups
            self._submits_early = not any(compat.is_recurrent(group) for group in groups)
        else:
            copier = TorchCopier(regions, slots, rank=self._rank, faults=self._faults, verify=self._verify)
        self._copier, self.num_cpu_blocks, self._bytes_per_slot = copier, slots, copier.bytes_per_block
        logger.info(
            "forebay: rank %d has %d slots of %d bytes (%.2f GB)",
            self._rank,
            slots,
            copier.bytes_per_block,
            slots * copier.bytes_per_block / 1e9,
        )

    def handshake(self) -> RankSlots | None:
        """vLLM asks for this at its start, when it has warmed up and captured its graphs."""
        self._go_on()
        if self.kv_cache_config is None or not self._has_caches:
            return None
        self._ready_told = self._copier.ready
        return RankSlots(
            slots=self.num_cpu_blocks,
            num_blocks=self.kv_cache_config.num_blocks,
            ready=self._ready_told,
            rank=self._rank,
            bytes_per_slot=self._bytes_per_slot,
        )

    def _go_on(self) -> None:
        if self._staged is not None and not self._goes_on:
            self._goes_on = True
            self._staged.go_on()

    @property
    def _has_caches(self) -> bool:
        return not isinstance(self._copier, NothingToCopy)

    # --- every step ---------------------------------------------------------------------------------

    def bind_connector_metadata(self, metadata: SimpleCPUOffloadMetadata) -> None:
        if self._has_caches and metadata.slots > self.num_cpu_blocks:
            raise ForebayError(
                f"forebay: expected a scheduler that counts on at most {self.num_cpu_blocks} slots, as rank "
                f"{self._rank} has, got {metadata.slots}"
            )
        self._go_on()  # if nobody has asked for a handshake
        self._submit_what_is_left()
        self._metadata = metadata
        if self._staged is not None:
            self._staged.rest()
        if self._submits_early:
            self._submit(early=True)

    def clear_connector_metadata(self) -> None:
        self._submit_what_is_left()

    def _submit_what_is_left(self) -> None:
        """With speculation: what waits for the drafter, which may run after get_finished() and writes KV too. Some
        ranks are not told when it has ended; then it has when the next step begins."""
        if self._waits_for_drafter:
            self._submit(early=False)
        self._metadata = None

    def handle_preemptions(self, kv_connector_metadata: SimpleCPUOffloadMetadata) -> None:
        """Blocks that are being copied are pinned: nobody is given them before the copy has ended."""

    def start_load_kv(self) -> None:
        """Releases call this before or after the forward pass. See bind_connector_metadata() and get_finished(),
        which all call at the same place."""

    def wait_for_save(self) -> None:
        """Stores read blocks that no later step writes, and pins keep them: nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM calls this once a step, after the model's forward pass on every release. Only then does every block
        that has a hash have its content, and no step reads a reused block any more."""
        if not self._waits_for_drafter:
            self._submit(early=False)
        self._poll()
        if self._staged is not None:
            self._staged.resume()
        finished, self._finished = self._finished, set()
        return None, finished or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        _, finished = self.get_finished(finished_req_ids)
        failed, self._failed = self._failed, set()
        return compat.transfer_results(finished or set(), failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def build_connector_worker_meta(self) -> SimpleCPUOffloadWorkerMetadata | None:
        meta, self._meta = self._meta, SimpleCPUOffloadWorkerMetadata({})
        ready = self._copier.ready
        if self._ready_told != ready and (self._grows or self._ready_told is not None):
            self._ready_told = meta.ready[self._rank] = ready
        if self._alone and (self._on_their_way or self._meanwhile.meta.completed_load_events):
            meta.meanwhile = self.ended_meanwhile
        return meta if meta != self._meta or meta.meanwhile is not None else None

    def ended_meanwhile(self) -> Meanwhile:
        """Loads that have ended well and that nobody was told of. An engine that schedules ahead reads a step's
        output when the next step is under way, and what it says of transfers is up to two steps old: a request
        whose bytes are there would wait for two steps more. Called by the scheduler, if it is in this process,
        from the same thread, between steps or within one. Once it has asked it will do so again, so these loads
        are no longer told with an output.

        The rest is told with the next one: failures, because the engine looks for them before it lets the
        scheduler ask; and stores, in the order in which they ended."""
        self._is_asked = True
        self._poll()
        ended, self._meanwhile = self._meanwhile, nothing_meanwhile()
        if ended.finished and self._staged is not None:
            self._staged.rest()  # the device waits for the step that begins behind these loads
        return ended

    def shutdown(self) -> None:
        self._copier.close()

    def _submit(self, *, early: bool) -> None:
        """`early`: before the forward pass, for copiers that wait for the engine's stream themselves. What is
        loaded goes where this step reads and writes nothing. But it may compute what is moved or stored: vLLM lets
        a request begin behind blocks that another computes in the same step."""
        metadata = self._metadata
        if metadata is None:
            return
        left: list[tuple[CopyOrder, RequestId]] = []
        for order, request_id in zip(metadata.loads, metadata.waiting, strict=True):
            if early and order.move_to:
                left.append((order, request_id))
                continue
            self._loads[order.id] = _OpenLoad(order, request_id)
            self._on_their_way += 1
            self._copier.submit(order)
        if early:
            # What was submitted may have ended and been heard of before the rest of this is.
            loads, waiting = [order for order, _ in left], [request_id for _, request_id in left]
            self._metadata = replace(metadata, loads=loads, waiting=waiting)
            return
        self._metadata = None
        self._on_their_way += len(metadata.stores)
        for order in metadata.stores:
            self._copier.submit(order)
        if metadata.idle and self._staged is not None:
            self._staged.hurry()
        for verdict in metadata.verdicts:
            self._repeat(verdict)

    def _repeat(self, verdict: Verdict) -> None:
        blocks = verdict.blocks
        if verdict.transfer_id is not None:
            load = self._loads.get(verdict.transfer_id)
            if load is None or load.request_id is None:
                return  # the engine has heard of this load
            load.request_id = None
            blocks = blocks or load.order.blocks + load.order.move_to
        self._tell(verdict.request_id, verdict.failed, blocks)

    def _poll(self) -> None:
        for report in self._copier.poll():
            self._hear(report)

    def _hear(self, report: Report) -> None:
        transfer_id, _, outcome = report
        load = self._loads.get(transfer_id)
        failed = outcome.failed
        if load is not None and failed and self._tries_again(load):
            return
        self._on_their_way -= 1
        if outcome is Outcome.MISMATCH:
            self._meta.mismatched_events[transfer_id] = 1
        elif failed:
            self._meta.failed_events[transfer_id] = 1
        elif load is None:
            self._meta.completed_store_events[transfer_id] = 1
        else:
            meta, finished = self._meanwhile if self._is_asked else (self._meta, self._finished)
            meta.completed_load_events[transfer_id] = 1
            if load.request_id is not None:
                finished.add(load.request_id)
        if load is not None:
            del self._loads[transfer_id]
            if failed and load.request_id is not None:
                self._tell(load.request_id, failed, load.order.blocks + load.order.move_to)

    def _tries_again(self, load: _OpenLoad) -> bool:
        """Where the engine cannot take a failed load back, it is tried again; one that cannot be had even then
        stops the engine. Never a wrong answer."""
        if self._recovers or load.request_id is None or not load.tries_left:
            return False
        load.tries_left -= 1
        self._copier.submit(load.order)
        return True

    def _tell(self, request_id: RequestId, failed: bool, blocks: list[BlockId]) -> None:
        if failed and not self._recovers:
            raise LostLoadError(
                f"forebay: the load of request {request_id} failed {_TRIES} times or was given up, and this vLLM "
                "cannot compute instead for a model of several KV cache groups, or of another kind than full "
                "attention (0.30 and newer can)"
            )
        self._finished.add(request_id)
        if failed and compat.REPORTS_FAILED_REQUESTS:
            self._failed.add(request_id)
        elif failed:
            self._bad_blocks.update(blocks)


def _tensors(kv_caches: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Iterator[torch.Tensor]:
    for cache in kv_caches.values():
        if isinstance(cache, torch.Tensor):
            yield cache
        else:
            yield from cache
