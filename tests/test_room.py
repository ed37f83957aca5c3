"""Who comes back to a full device gets to run, however slow loads are, in whatever order the engine asks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forebay import Direction, FullAttention, KVLayout, Mode, OffloadConfig, SlidingWindow
from forebay.testing import Faults, TinyRequest
from tests.builders import FULL, prompt
from tests.one_queue import OneQueueEngine

LAYOUTS = {
    "full": FULL,
    "full + window": KVLayout((FullAttention(4), SlidingWindow(4, window_tokens=8)), 4, 16),
}
STORED = 96  # tokens of each of the prompts that are on the host


def _engine(
    *,
    layout: str = "full",
    num_blocks: int = 41,
    wait_deadline_s: float = 0.05,
    careful: bool = True,
    newest_first: bool = False,
    mode: Mode = Mode.EAGER,
    families: int = 3,
) -> OneQueueEngine:
    """The host has some prompts that the device has lost."""
    engine = OneQueueEngine(
        LAYOUTS[layout],
        OffloadConfig(16 * 512, mode, wait_deadline_s=wait_deadline_s, load_deadline_s=5.0),
        num_blocks=num_blocks * len(LAYOUTS[layout].groups),
        max_batched_tokens=16,
        careful=careful,
        newest_first=newest_first,
    )
    for family in range(families):
        engine.submit(prompt(STORED, family))
        engine.run()
    engine.device.reset()
    return engine


COMING = st.tuples(
    st.integers(0, 2),  # whose prompt
    st.sampled_from([2, 4, 8, 12, 18, 24]),  # how many blocks of it
    st.integers(1, 12),  # new tokens
    st.sampled_from([True] * 5 + [False]),  # may load
    st.sampled_from([0, 0, 1, 8]),  # steps until the next one comes
)


@settings(max_examples=150)
@given(
    coming=st.lists(COMING, min_size=3, max_size=8),
    faults=st.builds(
        Faults,
        only=st.just(Direction.LOAD),
        hold=st.booleans(),
        delay_polls=st.sampled_from([0, 3, 20]),
        fail_chance=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        drop_chance=st.sampled_from([0.0, 0.0, 0.5]),
    ),
    layout=st.sampled_from(sorted(LAYOUTS)),
    num_blocks=st.integers(30, 48),
    wait_deadline_s=st.sampled_from([0.0, 0.05, 0.2]),
    careful=st.booleans(),
    newest_first=st.booleans(),
    mode=st.sampled_from(Mode),
    steps=st.integers(0, 30),
)
def test_nobody_waits_for_ever(
    coming: list[tuple[int, int, int, bool, int]],
    faults: Faults,
    layout: str,
    num_blocks: int,
    wait_deadline_s: float,
    careful: bool,
    newest_first: bool,
    mode: Mode,
    steps: int,
) -> None:
    engine = _engine(
        layout=layout,
        num_blocks=num_blocks,
        wait_deadline_s=wait_deadline_s,
        careful=careful,
        newest_first=newest_first,
        mode=mode,
    )
    [copier] = engine.copiers
    copier.faults = faults
    for family, blocks, own, may_load, pause in coming:
        engine.submit([*prompt(4 * blocks, family), *prompt(own, 7)], 3, may_load=may_load)
        for _ in range(pause):
            engine.step()
    for _ in range(steps):
        engine.step()
    copier.faults = Faults()
    for _ in range(1_000):  # twice the deadline of a load
        if not engine.num_unfinished:
            break
        engine.step()
    engine.deliver_lost_reports()  # until then their blocks cannot be used
    engine.run(1_000)


def _slow(engine: OneQueueEngine) -> Faults:
    """No load ends any more, until `hold` is taken off again."""
    [copier] = engine.copiers
    copier.faults = Faults(hold=True, only=Direction.LOAD)
    return copier.faults


def _comes(engine: OneQueueEngine, family: int, blocks: int, own: int = 5, **settings: bool) -> TinyRequest:
    return engine.submit([*prompt(4 * blocks, family), *prompt(own, 7)], 3, **settings)


def _step(engine: OneQueueEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _loads_behind_one_without_room() -> tuple[OneQueueEngine, Faults, TinyRequest]:
    """The second waits for what the first loads, so it is passed over, and the third gets the room. Once it has
    waited long enough, the engine finds no room for it, and must not stop there: the third stands behind it."""
    engine = _engine()
    faults = _slow(engine)
    _comes(engine, family=1, blocks=4)
    second = _comes(engine, family=1, blocks=24)
    third = _comes(engine, family=0, blocks=18)
    _step(engine, 10)
    assert second.id in engine.stopped_at
    assert third.id in engine.loading
    return engine, faults, third


def test_one_that_waited_too_long_does_not_keep_loaded_ones_from_running() -> None:
    engine, faults, _ = _loads_behind_one_without_room()
    faults.hold = False
    engine.run(100)


def test_a_failed_load_gets_its_turn_to_free_its_blocks() -> None:
    """A load that fails leaves its blocks to its request until the engine comes to it."""
    engine, faults, third = _loads_behind_one_without_room()
    faults.hold, faults.fail_chance = False, 1.0
    engine.run(100)
    assert third.id in engine.let_down


@pytest.mark.parametrize("may_load", [True, False])
def test_one_of_a_higher_priority_does_not_keep_a_loaded_one_from_running(may_load: bool) -> None:
    engine = _engine(newest_first=True)
    faults = _slow(engine)
    low = _comes(engine, family=0, blocks=24)
    _step(engine, 1)
    assert low.id in engine.loading
    high = _comes(engine, family=1, blocks=24, may_load=may_load)
    _step(engine, 10)
    assert high.id in engine.stopped_at
    faults.hold = False
    engine.run(100)


def test_one_that_is_preempted_over_and_over_lets_a_loaded_one_run() -> None:
    """It gets all the room there is, needs more, gives it up and begins anew, always before the other's turn."""
    engine = _engine(newest_first=True, careful=False)
    faults = _slow(engine)
    low = _comes(engine, family=0, blocks=24)
    _step(engine, 1)
    assert low.id in engine.loading
    engine.submit(prompt(100, 9), 3, may_load=False)
    _step(engine, 10)
    assert engine.preemptions
    faults.hold = False
    engine.run(100)


def test_one_that_is_passed_over_does_not_wait_for_ever_new_loads() -> None:
    engine = _engine(families=10)
    faults = _slow(engine)
    _comes(engine, family=1, blocks=4)
    second = _comes(engine, family=1, blocks=24)
    _comes(engine, family=0, blocks=12)
    _step(engine, 10)
    assert second.id in engine.stopped_at
    faults.hold, faults.delay_polls = False, 4
    for number in range(20):
        _comes(engine, family=2 + number % 8, blocks=8)
        _step(engine, 3)
    assert second.id in engine.finished
    engine.run()
