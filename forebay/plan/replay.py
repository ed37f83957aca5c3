"""A whole trace through the real manager, over a device pool of a given size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from forebay.config import Mode, OffloadConfig
from forebay.errors import ConfigError, is_whole
from forebay.groups import KVLayout
from forebay.manager import OffloadManager
from forebay.plan.device import PlannedDevice
from forebay.plan.hashes import HASH_BYTES, EngineHashes
from forebay.plan.moments import Moments
from forebay.plan.request import Trace, TraceRequest
from forebay.plan.results import Moment, Replay, Speed
from forebay.plan.serial import PlannedRequest, SerialEngine, Served, StepClock
from forebay.plan.speed import Queue, Speeds

NO_HOST = "off"
"""The mode of a replay without host memory."""

_EVERY_REQUESTS = 64  # that progress is told


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine and its host memory."""

    layout: KVLayout
    """Of one rank. Its hashes are of blocks that divide those of the trace, or the other way round."""
    device_blocks: int
    """As the engine counts them, with the one that stands for "nothing here"."""
    slots: int
    """Of the host; 0 is no host memory at all."""
    mode: Mode = Mode.EAGER
    policy: str = "lru"
    max_batched_tokens: int = 8192
    report_steps: int = 1
    """How many steps after the one that orders them copies are reported: 1, if they are faster than a step."""
    speeds: Speeds | None = None
    predicts: bool = False
    """Whether the manager keeps its ghost, as it does in an engine."""

    def __post_init__(self) -> None:
        for setting, least in (("device_blocks", 2), ("slots", 0), ("max_batched_tokens", 1), ("report_steps", 0)):
            value = getattr(self, setting)
            if not is_whole(value) or value < least:
                raise ConfigError(setting, value, f"a whole number of at least {least}")

    def engine(self) -> tuple[SerialEngine, OffloadManager | None]:
        layout = replace(self.layout, bytes_per_hash=HASH_BYTES)
        device, clock = PlannedDevice(self.device_blocks), StepClock()
        manager = None
        if self.slots:
            manager = OffloadManager(
                layout,
                OffloadConfig(self.slots * layout.bytes_per_block, self.mode, self.policy),
                device,
                slots=self.slots,
                max_batched_tokens=self.max_batched_tokens,
                clock=clock,
                predicts=self.predicts,
            )
        engine = SerialEngine(
            layout,
            device,
            manager,
            clock,
            max_batched_tokens=self.max_batched_tokens,
            report_steps=self.report_steps,
            walks=bool(self.slots) and self.mode is Mode.LAZY,
        )
        return engine, manager


class Replaying:
    """One setup, request by request."""

    def __init__(self, block_tokens: int, setup: Setup) -> None:
        self.setup = setup
        self._hashes = EngineHashes(block_tokens, setup.layout.tokens_per_hash)
        self._engine, self.manager = setup.engine()
        self.queue = Queue(setup.speeds) if setup.speeds is not None else None
        self._moments = Moments()
        self.requests = self.refused = self.input_tokens = self.device_tokens = self.host_tokens = 0
        self._last_s = 0.0

    def serve(self, request: TraceRequest) -> Served | None:
        """None if it does not fit on the device: an engine would refuse it. Without a prompt there is nothing to
        find."""
        self.requests += 1
        if not request.input_tokens:
            return Served(0, 0)
        planned = PlannedRequest(
            str(self.requests),
            request.input_tokens,
            request.output_tokens,
            self._hashes.of_prompt(request),
            partial(self._hashes.of_output, self.requests),
        )
        if not self._engine.fits(planned):
            self.refused += 1
            return None
        evictions, loaded = self._evictions(), self._bytes_loaded()
        served = self._engine.serve(planned)
        self.input_tokens += request.input_tokens
        self.device_tokens += served.device_tokens
        self.host_tokens += served.host_tokens
        occupied = self.manager.pool.cached if self.manager is not None else 0
        self._moments.add(
            Moment(
                request.time_s, request.input_tokens, *served, occupied, evictions=self._evictions() - evictions
            )
        )
        if self.queue is not None:
            computed = request.input_tokens - sum(served)
            self.queue.add(request.time_s, computed, self._bytes_loaded() - loaded)
        self._last_s = request.time_s
        return served

    def _evictions(self) -> int:
        return self.manager.pool.evictions if self.manager is not None else 0

    def _bytes_loaded(self) -> int:
        return self.manager.stats.loaded_bytes if self.manager is not None else 0

    def _bytes_stored(self) -> int:
        return self.manager.stats.stored_bytes if self.manager is not None else 0

    def result(self, without: Replaying | None = None) -> Replay:
        """What came of it; `without` is the same without host memory."""
        setup, speeds = self.setup, self.setup.speeds
        speed = None
        if speeds and self.queue and without and without.queue:
            busy_s = max(self._bytes_loaded(), self._bytes_stored()) / speeds.bus_bytes_per_s
            speed = Speed(
                self.queue.ttft_s(0.5),
                self.queue.ttft_s(0.99),
                without.queue.ttft_s(0.5),
                without.queue.ttft_s(0.99),
                busy_s / self._last_s if self._last_s else 0.0,
            )
        return Replay(
            mode=setup.mode.value if setup.slots else NO_HOST,
            policy=setup.policy,
            device_blocks=setup.device_blocks,
            slots=setup.slots,
            host_bytes=setup.slots * setup.layout.bytes_per_block,
            requests=self.requests,
            input_tokens=self.input_tokens,
            device_tokens=self.device_tokens,
            host_tokens=self.host_tokens,
            bytes_loaded=self._bytes_loaded(),
            bytes_stored=self._bytes_stored(),
            evictions=self._evictions(),
            occupied_slots=self.manager.pool.cached if self.manager is not None else 0,
            moments=self._moments.all(),
            speed=speed,
            refused=self.refused,
        )


def replay(trace: Trace, setup: Setup, progress: Callable[[int, int], None] | None = None) -> Replay:
    """Serve the trace, one request after another; the next begins when all copies of the one before have ended.
    `progress` is told requests and bytes, now and then. With speeds, the same device is replayed beside it without
    host memory, to compare with."""
    running = Replaying(trace.block_tokens, setup)
    without = Replaying(trace.block_tokens, replace(setup, slots=0)) if setup.speeds is not None else None
    for request in trace:
        running.serve(request)
        if without is not None:
            without.serve(request)
        if progress is not None and running.requests % _EVERY_REQUESTS == 0:
            progress(running.requests, trace.bytes_read)
    if progress is not None:
        progress(running.requests, trace.bytes_read)
    return running.result(without)
