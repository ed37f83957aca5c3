"""The scheduler's half: translate, call OffloadManager, translate back.

vLLM takes the outcome of a load from its ranks, in the same result in which they report it to the manager, so
mostly both hear the same thing at the same time. Where the manager decides something else or earlier (a deadline,
a reset, an abort), it sends a Verdict with the next step, and every rank repeats it to the engine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.logger import init_logger
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from forebay.config import Mode, OffloadConfig
from forebay.engine import Progress
from forebay.groups import ChunkedLocal, Group, Recurrent, SlidingWindow, host_slots
from forebay.ids import BlockId, Rank, RequestId, TransferId
from forebay.manager import OffloadManager, Step
from forebay.recording import Recorder
from forebay.recording.recorder import DEFAULT_BYTES as DEFAULT_RECORDING_BYTES
from forebay.requests import NotYet
from forebay.transfers import Outcome, Report
from forebay.vllm import compat
from forebay.vllm.device import BlockPoolDevice, CpuBlockPool
from forebay.vllm.events import EventTranslator
from forebay.vllm.layout import EngineLayout, group_of
from forebay.vllm.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata, Verdict
from forebay.vllm.request import EngineRequest
from forebay.vllm.stats import AdapterView, ForebayStats, StatsTaker

logger = init_logger("vllm.forebay")

_IDLE_S = 0.0002
"""Next to nothing for who waits for a copy, and enough for another thread to begin."""


class SimpleCPUOffloadScheduler:
    """Decides what is stored and loaded. Called from the engine's scheduling thread only."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        cpu_capacity_bytes: int,
        lazy_offload: bool = False,
        *,
        scheduler_block_size: int | None = None,
        hash_block_size: int | None = None,
        settings: OffloadConfig | None = None,
        record_trace: str | None = None,
        record_trace_bytes: int = DEFAULT_RECORDING_BYTES,
    ) -> None:
        """`cpu_capacity_bytes` is for one rank. `settings` has what vLLM's own class does not; its capacity and
        mode are those given here. `record_trace` is the folder to record requests in."""
        if not isinstance(lazy_offload, bool):
            raise TypeError(
                f"lazy_offload: expected True or False, got {lazy_offload!r}; block sizes go by keyword"
            )
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self._layout = EngineLayout.of(vllm_config, kv_cache_config, scheduler_block_size, hash_block_size)
        self.block_size = self._layout.alignment_tokens
        self.hash_block_size = self._layout.kv.tokens_per_hash
        # A load brings the last state, but of a window only what lies behind the engine's own hit.
        groups = self._layout.kv.groups
        self._needs_what_the_engine_may_lack = (
            compat.LOCAL_HITS_DIVERGE
            and any(isinstance(group, Recurrent) for group in groups)
            and any(isinstance(group, SlidingWindow | ChunkedLocal) for group in groups)
        )
        mode = Mode.LAZY if lazy_offload else Mode.EAGER
        config = OffloadConfig(cpu_capacity_bytes) if settings is None else settings
        config = replace(config, capacity_bytes=cpu_capacity_bytes, mode=mode)
        self._config = config
        # Raises where vLLM's own class would round up to one block, and so take more memory than it was given.
        slots = host_slots(kv_cache_config.num_blocks, compat.device_bytes(kv_cache_config), cpu_capacity_bytes)
        self._ranks: int = vllm_config.parallel_config.world_size
        events = vllm_config.kv_events_config
        self._events_on = bool(events is not None and events.enable_kv_cache_events)
        self._gpu_block_pool: BlockPool | None = None
        self._ready: dict[int, int] = {}  # by rank that has said so: slots that can be used by now
        self._counts_on_ranks = compat.has_device_memory(vllm_config)
        self._slot_bytes = self._layout.kv.bytes_per_block * self._ranks  # until they tell
        self._recorder: Recorder | None = None
        if record_trace is not None:
            self._recorder = Recorder(record_trace, self.hash_block_size, max_bytes=record_trace_bytes)
            logger.info("forebay: requests are recorded in %s, as keys and times", record_trace)
        self._set_slots(slots)

    def _set_slots(self, slots: int) -> None:
        self.num_cpu_blocks = slots
        self.cpu_kv_cache_config = compat.scaled(self.kv_cache_config, slots)
        if self._gpu_block_pool is not None:
            self.bind_gpu_block_pool(self._gpu_block_pool)

    # --- before the first request -------------------------------------------------------------------

    @staticmethod
    def _derive_cpu_config(gpu_config: KVCacheConfig, cpu_capacity_bytes: int) -> KVCacheConfig:
        """The same groups for the host: as many blocks as its memory holds, at least one."""
        blocks = gpu_config.num_blocks * cpu_capacity_bytes // compat.device_bytes(gpu_config)
        return compat.scaled(gpu_config, max(1, blocks))

    @staticmethod
    def _estimate_lazy_target_blocks(
        kv_cache_config: KVCacheConfig, max_num_batched_tokens: int, cp_world_size: int = 1
    ) -> int:
        """How many blocks near eviction lazy mode keeps safe."""
        groups: list[Group] = []
        for _, each in compat.cacheable_groups(kv_cache_config):
            group = group_of(each.kv_cache_spec, cp_world_size)
            if group is not None:
                groups.append(group)
        return 2 * sum(group.lazy_target(max_num_batched_tokens) for group in groups)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._gpu_block_pool = gpu_block_pool
        self._device = BlockPoolDevice(gpu_block_pool, self._layout.group_ids, self._layout.kv.bytes_per_hash)
        self.manager = OffloadManager(
            self._layout.kv,
            self._config,
            self._device,
            ranks=self._ranks,
            slots=self.num_cpu_blocks,
            ready=self._num_ready(),
            max_batched_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
            max_requests=self.vllm_config.scheduler_config.max_num_seqs,
            engine_reserves=compat.RESERVES_FOR_LOADS,
            events=self._events_on,
            recorder=self._recorder,
        )
        self.cpu_block_pool = CpuBlockPool(self.manager.pool)
        self._translator = EventTranslator(self._layout, self.kv_cache_config)
        self._requests: dict[RequestId, EngineRequest] = {}
        self._loading: dict[RequestId, TransferId | None] = {}  # who waits for which load; None: for a verdict
        self._ranks_left: dict[TransferId, int] = {}  # of transfers that not every rank has reported
        self._failed_on_a_rank: set[TransferId] = set()  # of those: the ranks tell the engine themselves
        self._verdicts: list[Verdict] = []
        self._stats = StatsTaker()
        self._planned: Step | None = None
        self._reported = False

    def agree_on_slots(
        self, slots_of_ranks: Sequence[int], ready_of_ranks: Mapping[int, int] | None = None
    ) -> None:
        """Every rank has said how many slots its own layers leave room for, and how many of them can be used by
        now: the least is what all have."""
        slots = min(slots_of_ranks)
        ready_before, self._ready = self._num_ready(), dict(ready_of_ranks or {})
        if slots != self.num_cpu_blocks:
            logger.info("forebay: %d slots, as many as every rank has (%s)", slots, slots_of_ranks)
        if slots != self.num_cpu_blocks or self._num_ready() != ready_before:
            self._set_slots(slots)

    def learn_slot_bytes(self, bytes_of_ranks: Iterable[int]) -> None:
        """Every rank has said how many bytes of its own layers a slot holds."""
        self._slot_bytes = sum(bytes_of_ranks)

    def _num_ready(self) -> int:
        """Slots that every rank can use by now. If no rank has ever said anything: all, where slots are plain
        memory; on a GPU none, for another connector beside this one may have kept the ranks from being asked."""
        if self._counts_on_ranks and not self._ready:
            return 0
        return min([self.num_cpu_blocks, *self._ready.values()])

    def _hear_of_slots(self, ready_of_ranks: Mapping[int, int]) -> None:
        for rank, ready in ready_of_ranks.items():
            if rank in self._ready or self._counts_on_ranks:  # or all of its slots were counted on from the start
                self._ready[rank] = max(self._ready.get(rank, 0), ready)
        self.manager.grow(self._num_ready())

    # --- requests -----------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        known = self._known(request)
        known.device_tokens = num_computed_tokens
        # Offered nothing, the engine falls back to what all groups have.
        known.offered_nothing = self._needs_what_the_engine_may_lack and num_computed_tokens > 0
        answer = self.manager.match(known, num_computed_tokens)
        if isinstance(answer, NotYet):
            return None, False
        tokens = answer.tokens - answer.tokens % self.block_size
        return tokens, answer.needs_load and tokens > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        known = self._known(request)
        known.has_run = False
        table = self._table(blocks.get_block_ids())
        self._used(table)
        # A request that was loaded is admitted a second time, and then has what was loaded.
        device_tokens = request.num_computed_tokens or known.device_tokens
        must_end = compat.must_end(self.kv_cache_config, device_tokens)
        waits = self.manager.allocated(known, table, device_tokens, num_external_tokens, must_end=must_end)
        if waits and num_external_tokens:
            self._loading[known.id] = None
            if not compat.REPORTS_FAILED_REQUESTS:
                known.waits_for = table[0][device_tokens // self.block_size :]

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never delays the engine: what is still to be copied is pinned."""
        known = self._known(request)
        self.manager.finish(known.id, known.confirmed_tokens, self._table(block_ids) if any(block_ids) else None)
        del self._requests[known.id]
        if known.id in self._loading:
            # vLLM keeps the blocks of an aborted load until its ranks say that it has ended. It need not wait.
            self._give_verdict(known.id, failed=False)
        return False, None

    def _known(self, request: Request) -> EngineRequest:
        request_id = RequestId(request.request_id)
        known = self._requests.get(request_id)
        if known is None:
            known = self._requests[request_id] = EngineRequest(request, self.hash_block_size)
        elif known.preemptions != request.num_preemptions:
            # vLLM names preempted requests when the step is built; by then it may have admitted them again.
            known.preemptions = request.num_preemptions
            self.manager.preempt(request_id)
        return known

    def _table(self, block_ids: Sequence[list[int]]) -> list[list[BlockId]]:
        return [block_ids[number] for number in self._layout.group_ids]  # type: ignore[misc]

    def _used(self, table: Iterable[Iterable[BlockId]]) -> None:
        if self._config.mode is Mode.LAZY:
            for blocks in table:
                self._device.used(blocks)

    # --- steps --------------------------------------------------------------------------------------

    def prepare_store_specs(
        self, scheduler_output: SchedulerOutput
    ) -> tuple[list[int], list[int], list[str], list[dict[Any, Any]] | None]:
        """This step's stores: device blocks, slots, and whose they are. build_connector_meta() hands them out."""
        if self._planned is None:
            self._planned = self._plan(scheduler_output)
        planned = SimpleCPUOffloadMetadata(stores=self._planned.stores)
        return planned.store_gpu_blocks, planned.store_cpu_blocks, list(self._planned.stored_for), None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> SimpleCPUOffloadMetadata:
        if not self._reported:
            self._settle((), set())  # no rank had anything to say, but time has passed
        self._reported = False
        step, self._planned = self._planned or self._plan(scheduler_output), None
        if self._ranks_left and not (scheduler_output.total_num_scheduled_tokens or step.loads or step.stores):
            # The engine has nothing to do but ask again. Where the copier's thread is in the same process, that
            # would be thousands of times, each time with the interpreter that this thread needs to get on.
            time.sleep(_IDLE_S)
        for order, request_id in zip(step.loads, step.waiting, strict=True):
            self._loading[request_id] = order.id
        for order in (*step.loads, *step.stores):
            self._ranks_left[order.id] = self._ranks
        verdicts, self._verdicts = self._verdicts, []
        return SimpleCPUOffloadMetadata(
            step.loads,
            step.stores,
            step.waiting,
            verdicts,
            self.num_cpu_blocks,
            idle=not scheduler_output.total_num_scheduled_tokens,
            need_flush=bool(scheduler_output.preempted_req_ids),
        )

    def _plan(self, scheduler_output: SchedulerOutput) -> Step:
        for request_id in scheduler_output.preempted_req_ids or ():
            known = self._requests.get(request_id)
            if known is not None:
                self._known(known.request)
        return self.manager.step(self._progress(scheduler_output))

    def _progress(self, scheduler_output: SchedulerOutput) -> Iterator[Progress]:
        new = {each.req_id for each in scheduler_output.scheduled_new_reqs}
        for request_id, new_blocks, resumed in yield_req_data(scheduler_output):
            known = self._requests.get(request_id)
            if known is None:
                continue
            known.has_run = True
            added = None
            if new_blocks is not None and not resumed and request_id not in new:  # those told their whole table
                added = self._table(new_blocks)
                self._used(added)
            yield Progress(known.id, known.confirmed_tokens, added)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """The engine's loads have ended as the ranks said, unless the manager has another word: then the engine
        hears of it a step later, as a verdict."""
        reports: list[Report] = []
        finished: set[RequestId] = connector_output.finished_recving or set()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SimpleCPUOffloadWorkerMetadata):
            reports += self._told(meta)
            if meta.ready:
                self._hear_of_slots(meta.ready)
            if meta.meanwhile is not None:
                more = meta.meanwhile()
                reports += self._told(more.meta)
                finished.update(map(RequestId, more.finished))
                connector_output.finished_recving = finished or None  # where the engine looks next
        failed = getattr(connector_output, "failed_recving", None) or ()
        for request_id in finished:
            # Whoever drives this class without workers reports loads by request, for all ranks at once.
            transfer_id = self._loading.get(request_id)
            if transfer_id in self._ranks_left:
                outcome = Outcome.FAILED if request_id in failed else Outcome.DONE
                reports += self._reports(transfer_id, self._ranks_left[transfer_id], outcome)
        self._settle(reports, finished)
        self._reported = True

    def _told(self, meta: SimpleCPUOffloadWorkerMetadata) -> Iterator[Report]:
        for done in (meta.completed_store_events, meta.completed_load_events):
            for event, ranks in done.items():
                yield from self._reports(TransferId(event), ranks, Outcome.DONE)
        for event, ranks in meta.failed_events.items():
            yield from self._reports(TransferId(event), ranks, Outcome.FAILED)
        for event, ranks in meta.mismatched_events.items():
            yield from self._reports(TransferId(event), ranks, Outcome.MISMATCH)

    def _reports(self, transfer_id: TransferId, ranks: int, outcome: Outcome) -> Iterator[Report]:
        """So many ranks have reported a transfer. Which ones does not matter: each reports it once."""
        if outcome.failed:
            self._failed_on_a_rank.add(transfer_id)
        for _ in range(ranks):
            left = self._ranks_left.get(transfer_id, self._ranks)
            yield Report(transfer_id, Rank(self._ranks - left), outcome)
            if left > 1:
                self._ranks_left[transfer_id] = left - 1
            else:
                self._ranks_left.pop(transfer_id, None)

    def _settle(self, reports: Iterable[Report], finished: set[RequestId]) -> None:
        """Hear the reports. `finished` are the requests that the engine is about to hear of; one whose bytes have
        arrived but are not wanted any more is taken out of them."""
        outcomes = self.manager.report(reports)
        for request_id in outcomes.loaded:
            if request_id not in finished:
                self._give_verdict(request_id, failed=False)
        for request_id in outcomes.failed:
            transfer_id = self._loading.get(request_id)
            if request_id in finished and transfer_id not in self._failed_on_a_rank:
                finished.discard(request_id)
                self._loading[request_id] = None
            if request_id not in finished:
                self._give_verdict(request_id, failed=True)
        for request_id in finished:
            self._loading.pop(request_id, None)
        self._failed_on_a_rank &= self._ranks_left.keys()

    def _give_verdict(self, request_id: RequestId, *, failed: bool) -> None:
        transfer_id = self._loading.pop(request_id, None)
        known = self._requests.get(request_id)
        blocks = known.waits_for if failed and known is not None else []
        self._verdicts.append(Verdict(request_id, transfer_id, failed, blocks))

    # --- the rest -----------------------------------------------------------------------------------

    def has_pending_stores(self) -> bool:
        return self.manager.has_pending_stores()

    def has_pending_work(self) -> bool:
        """Whether the engine must go on stepping although it has no request."""
        return self.manager.has_pending_work() or bool(self._verdicts)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return list(self._translator.translate(self.manager.take_events()))

    def reset(self) -> bool:
        """Forget everything on the host, in one call, whatever is being copied. False where that cannot be had: a
        request waits for a load that this release cannot take back."""
        if self._loading and not compat.recovers(self.kv_cache_config):
            return False
        if self._events_on:
            self._translator.will_clear(self.manager.take_events(), self.manager.pool.index())
        self.manager.reset()
        return True

    def shutdown(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def get_stats(self) -> ForebayStats:
        return self._stats.take(self.manager, AdapterView(self._slot_bytes, len(self._loading), self._ranks))
