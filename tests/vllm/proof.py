"""What every case ends with: bytes come back from the host and are the right ones, and wrong ones would show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tests.vllm.harness import HOST_BYTES, Engine, Tokens

EAGER: dict[str, Any] = {"cpu_bytes_to_use": HOST_BYTES}
LAZY: dict[str, Any] = {"cpu_bytes_to_use": HOST_BYTES, "lazy_offload": True}


def nothing_is_left(engine: Engine) -> None:
    """After the last request: no copy on its way, no block and no slot held by anybody. Every load was what had
    been stored, unless the test has seen to it."""
    engine.settle()
    manager, pool = engine.manager, engine.block_pool
    manager.check()
    assert not manager.has_pending_work()
    assert not manager.device_pins()
    assert not manager.pool.pinned
    assert manager.stats.checksum_mismatches == engine.mismatches
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def comes_back(engine: Engine, asked: list[Tokens], expected: list[Tokens], **generate: Any) -> None:
    """The device forgets the prompts; their tokens are right all the same, and had from the host. Then the poison
    control: with the first prompt's bytes on the host spoilt, on any one rank, its tokens change, and only its."""
    before = engine.manager.stats.loaded_blocks
    engine.forget_device()
    assert engine.generate(asked, **generate) == expected
    loaded = engine.manager.stats.loaded_blocks
    assert loaded > before
    for rank in range(engine.ranks):
        engine.forget_device()
        with engine.spoilt_host(asked[0], rank):
            spoilt = engine.generate(asked, **generate)
        assert spoilt[0] != expected[0], f"wrong bytes from the host of rank {rank} would not have been noticed"
        assert spoilt[1:] == expected[1:]
    nothing_is_left(engine)


@contextmanager
def counted_preemptions(engine: Engine) -> Iterator[list[str]]:
    """The requests that the scheduler preempts, each time it does."""
    preempted: list[str] = []
    preempt = engine.scheduler._preempt_request

    def count(request: Any, *args: Any, **kwargs: Any) -> None:
        preempted.append(request.request_id)
        preempt(request, *args, **kwargs)

    with mock.patch.object(engine.scheduler, "_preempt_request", count):
        yield preempted
