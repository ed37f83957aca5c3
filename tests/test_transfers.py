from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import InvariantError, TransitionError
from forebay.ids import BlockId, Key, Rank, RequestId, Slot, TransferId, make_key
from forebay.transfers import (
    NEXT,
    Brings,
    CopyOrder,
    Direction,
    Late,
    Ledger,
    Outcome,
    Report,
    State,
    Transfer,
)
from tests.pool_builders import keys

# The picture at the top of transfers.py, arrow by arrow.
ARROWS = {
    (State.PLANNED, State.SUBMITTED),
    (State.PLANNED, State.DROPPED),
    (State.SUBMITTED, State.DONE),
    (State.SUBMITTED, State.FAILED),
    (State.SUBMITTED, State.ABANDONED),
    (State.ABANDONED, State.DROPPED),
}
TERMINAL = {State.DONE, State.FAILED, State.DROPPED}

every_move = pytest.mark.parametrize(("old", "new"), list(product(State, State)), ids=lambda state: state.name)


def _order(number: int, direction: Direction = Direction.STORE, copies: int = 2) -> CopyOrder:
    return CopyOrder(
        TransferId(number),
        direction,
        [BlockId(100 + i) for i in range(copies)],
        [Slot(i) for i in range(copies)],
        [],
        [],
        keys(*range(1, copies + 1)),
    )


def _transfer(state: State, *waiting_on: int) -> Transfer:
    return Transfer(_order(7), set(map(Rank, waiting_on)), state=state)


def _plan(
    ledger: Ledger,
    direction: Direction = Direction.STORE,
    request: str | None = None,
) -> Transfer:
    order = _order(ledger.next_id(), direction)
    return ledger.plan(order, RequestId(request) if request is not None else None)


def _submitted(ledger: Ledger, direction: Direction = Direction.STORE, now: float = 0.0) -> Transfer:
    transfer = _plan(ledger, direction)
    ledger.submit(transfer, now)
    return transfer


def _say(ledger: Ledger, transfer: Transfer, rank: int, outcome: Outcome = Outcome.DONE) -> Transfer | Late | None:
    answer = ledger.report(Report(transfer.id, Rank(rank), outcome))
    ledger.check()
    return answer


# --- the state machine ------------------------------------------------------------------------------------


@every_move
def test_only_the_moves_of_the_picture_are_possible(old: State, new: State) -> None:
    transfer = _transfer(old)
    if (old, new) in ARROWS:
        transfer.move_to(new)
        assert transfer.state is new
    else:
        with pytest.raises(TransitionError, match=f"transfer 7: {old.name} cannot become {new.name}"):
            transfer.move_to(new)
        assert transfer.state is old


@pytest.mark.parametrize(("old", "new"), sorted(ARROWS, key=str), ids=lambda state: state.name)
def test_nothing_ends_while_a_rank_that_was_told_has_not_reported(old: State, new: State) -> None:
    transfer = _transfer(old, 0, 2)
    if new in TERMINAL and old is not State.PLANNED:
        with pytest.raises(InvariantError, match=rf"{new.name} while ranks \[0, 2\]"):
            transfer.move_to(new)
        assert transfer.state is old
    else:
        transfer.move_to(new)  # of a planned transfer no rank was told
        assert transfer.state is new


@pytest.mark.parametrize("state", State, ids=lambda state: state.name)
def test_what_is_live_and_what_is_wanted(state: State) -> None:
    transfer = _transfer(state)
    assert transfer.is_live is (state not in TERMINAL)
    assert transfer.wanted is (state in {State.PLANNED, State.SUBMITTED})


def test_every_state_has_its_moves_written_down() -> None:
    assert {(old, new) for old, news in NEXT.items() for new in news} == ARROWS
    assert set(NEXT) == set(State)


def test_order_counts_copies_and_moves() -> None:
    order = _order(1)._replace(move_from=[BlockId(5)], move_to=[BlockId(6)])
    assert order.num_copies == 3
    assert Transfer(order, set()).direction is Direction.STORE


def test_detached_order_shares_no_list() -> None:
    order = _order(1, Direction.LOAD)._replace(move_from=[BlockId(5)], move_to=[BlockId(6)])
    detached = order.detached()
    assert detached == order
    assert len(detached.keys) == 2
    for column, copied in zip(order[2:], detached[2:], strict=True):
        assert column is not copied


@pytest.mark.parametrize(
    "copied", [[], [b"a"], [b"ab", b"cd"], [b"a", b"bc", b"d"], [b""], [b"a", b"", b"", b"bc"], keys(*range(300))]
)
def test_an_order_is_the_same_in_another_process(copied: list[Key]) -> None:
    order = _order(7, Direction.LOAD, len(copied))._replace(
        move_from=[BlockId(5)], move_to=[BlockId(6)], keys=copied
    )
    assert pickle.loads(pickle.dumps(order)) == order


def test_store_pins_the_blocks_it_reads() -> None:
    for orphaned in (False, True):
        transfer = Transfer(_order(1), set(), orphaned=orphaned)
        assert transfer.pinned_blocks == [100, 101]


def test_load_pins_what_it_reads_and_once_its_request_has_left_also_what_it_writes() -> None:
    order = _order(1, Direction.LOAD)._replace(
        move_from=[BlockId(5), BlockId(6)], move_to=[BlockId(7), BlockId(8)]
    )
    transfer = Transfer(order, set())
    assert transfer.pinned_blocks == [5, 6], "the others belong to the request that waits"
    transfer.orphaned = True
    assert sorted(transfer.pinned_blocks) == [5, 6, 7, 8, 100, 101]


# --- what loads bring -------------------------------------------------------------------------------------


def _chain(tokens: Sequence[int]) -> list[Key]:
    """Keys of a prompt: each names all tokens up to it."""
    return [make_key(sha256(bytes(tokens[: i + 1])).digest(), 0) for i in range(len(tokens))]


_LEFT = _chain([1, 2, 3, 4, 5, 6])
_RIGHT = _chain([1, 2, 3, 9, 5, 6])  # parts from the other before block 3; the tokens agree again after it


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (Brings(_LEFT, 0, 6), Brings(_RIGHT, 0, 6), True),
        (Brings(_LEFT, 0, 1), Brings(_RIGHT, 0, 6), True),
        (Brings(_LEFT, 2, 6), Brings(_RIGHT, 0, 6), True),  # block 2 is the last they share
        (Brings(_LEFT, 2, 6), Brings(_RIGHT, 0, 3), True),
        (Brings(_LEFT, 2, 6), Brings(_RIGHT, 0, 2), False),
        (Brings(_LEFT, 3, 6), Brings(_RIGHT, 0, 6), False),
        (Brings(_LEFT, 4, 5), Brings(_RIGHT, 4, 5), False),
        (Brings(_LEFT, 3, 6), Brings(_LEFT, 0, 6), True),
        (Brings(_LEFT, 0, 3), Brings(_LEFT, 3, 6), False),
        (Brings(_LEFT, 0, 4), Brings(_LEFT, 3, 6), True),
        (Brings(_LEFT, 2, 2), Brings(_LEFT, 0, 6), False),
        (Brings(_LEFT, 6, 6), Brings(_LEFT, 0, 6), False),
        (Brings(_LEFT, 0, 6), Brings(_LEFT[:3], 0, 3), True),
        (Brings(_LEFT, 4, 6), Brings(_LEFT[:3], 0, 3), False),
        (Brings([], 0, 0), Brings([], 0, 0), False),
    ],
)
def test_loads_overlap_where_a_block_is_in_both(one: Brings, other: Brings, overlap: bool) -> None:
    assert one.overlaps(other) is overlap
    assert other.overlaps(one) is overlap


_PROMPT = st.lists(st.integers(0, 1), max_size=6)


@settings(deadline=None, max_examples=500)
@given(shared=_PROMPT, ends=st.tuples(_PROMPT, _PROMPT), data=st.data())
def test_overlap_is_that_of_the_sets_of_keys(
    shared: list[int], ends: tuple[list[int], list[int]], data: st.DataObject
) -> None:
    brought = []
    for end in ends:
        chain = _chain(shared + end)
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(chain))] * 2)))
        brought.append(Brings(chain, start, stop))
    one, other = brought
    in_both = set(one.keys[one.start : one.stop]) & set(other.keys[other.start : other.stop])
    assert one.overlaps(other) is other.overlaps(one) is bool(in_both)


# --- the ledger -------------------------------------------------------------------------------------------


def test_ids_are_never_given_out_twice() -> None:
    ledger = Ledger(1)
    ids = [ledger.next_id() for _ in range(5)]
    assert len(set(ids)) == 5
    assert ids == sorted(ids)


def test_planned_transfer_waits_for_every_rank_and_is_live() -> None:
    ledger = Ledger(3)
    transfer = _plan(ledger, Direction.LOAD, "a")
    assert transfer.state is State.PLANNED
    assert transfer.waiting_on == {0, 1, 2}
    assert (transfer.request_id, transfer.orphaned, transfer.brings) == ("a", False, [])
    assert list(ledger) == [transfer]
    assert len(ledger) == 1
    ledger.check()


def test_two_transfers_do_not_share_the_ranks_they_wait_for() -> None:
    ledger = Ledger(2)
    first, second = _submitted(ledger), _submitted(ledger)
    assert _say(ledger, first, 0) is None
    assert second.waiting_on == {0, 1}
    assert first.brings is not second.brings
    assert first.events is not second.events


def test_submitting_hands_out_the_order_and_starts_the_clock() -> None:
    ledger = Ledger(1)
    transfer = _plan(ledger)
    assert ledger.submit(transfer, 3.5) is transfer.order
    assert (transfer.state, transfer.submitted_at) == (State.SUBMITTED, 3.5)
    ledger.check()


def test_cancelled_transfer_ends_at_once() -> None:
    ledger = Ledger(2)
    transfer = _plan(ledger)
    ledger.cancel(transfer)
    assert transfer.state is State.DROPPED
    assert list(ledger) == []
    assert _say(ledger, transfer, 0) is Late.ENDED_TRANSFER


def test_submitted_transfer_cannot_be_cancelled() -> None:
    ledger = Ledger(2)
    transfer = _submitted(ledger)
    with pytest.raises(TransitionError):
        ledger.cancel(transfer)
    ledger.abandon(transfer)
    with pytest.raises(InvariantError):
        ledger.cancel(transfer)
    assert list(ledger) == [transfer]
    ledger.check()


def test_planned_transfer_cannot_be_abandoned() -> None:
    ledger = Ledger(1)
    with pytest.raises(TransitionError):
        ledger.abandon(_plan(ledger))


@pytest.mark.parametrize("order", list(permutations(range(3))))
@pytest.mark.parametrize("failing", [set(), {0}, {2}, {0, 1, 2}], ids=repr)
@pytest.mark.parametrize("abandoned_after", [None, 0, 1, 2])
def test_transfer_ends_with_the_last_report_in_any_order(
    order: tuple[int, ...], failing: set[int], abandoned_after: int | None
) -> None:
    ledger = Ledger(3)
    transfer = _submitted(ledger)
    for number, rank in enumerate(order):
        assert list(ledger) == [transfer]
        if number == abandoned_after:
            ledger.abandon(transfer)
        answer = _say(ledger, transfer, rank, Outcome.FAILED if rank in failing else Outcome.DONE)
        assert answer is (transfer if number == 2 else None)
    if abandoned_after is not None:
        assert transfer.state is State.DROPPED
    else:
        assert transfer.state is (State.FAILED if failing else State.DONE)
    assert transfer.failed is bool(failing)
    assert len(ledger) == 0


def test_one_failure_does_not_end_a_transfer_that_others_still_copy() -> None:
    ledger = Ledger(2)
    transfer = _submitted(ledger)
    assert _say(ledger, transfer, 0, Outcome.FAILED) is None
    assert transfer.state is State.SUBMITTED
    assert list(ledger) == [transfer]


# --- reports that cannot be used ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, -1, 2, 99])
def test_report_for_an_id_that_was_never_given_out(number: int) -> None:
    ledger = Ledger(1)
    transfer = _submitted(ledger)
    assert transfer.id == 1
    assert ledger.report(Report(TransferId(number), Rank(0), Outcome.DONE)) is Late.UNKNOWN_TRANSFER
    assert transfer.waiting_on == {0}


def test_report_for_a_transfer_that_no_rank_was_told_of() -> None:
    ledger = Ledger(1)
    transfer = _plan(ledger)
    assert _say(ledger, transfer, 0) is Late.UNKNOWN_TRANSFER
    assert (transfer.state, transfer.waiting_on) == (State.PLANNED, {0})


def test_report_for_a_transfer_that_has_ended() -> None:
    ledger = Ledger(1)
    transfer = _submitted(ledger)
    assert _say(ledger, transfer, 0) is transfer
    assert _say(ledger, transfer, 0) is Late.ENDED_TRANSFER
    assert _say(ledger, transfer, 5) is Late.ENDED_TRANSFER
    assert transfer.state is State.DONE


@pytest.mark.parametrize("rank", [2, 99, -1])
def test_report_of_a_rank_that_does_not_exist(rank: int) -> None:
    ledger = Ledger(2)
    transfer = _submitted(ledger)
    assert _say(ledger, transfer, rank, Outcome.FAILED) is Late.UNKNOWN_RANK
    assert (transfer.waiting_on, transfer.failed) == ({0, 1}, False)


def test_repeated_report_changes_nothing() -> None:
    ledger = Ledger(2)
    transfer = _submitted(ledger)
    assert _say(ledger, transfer, 0) is None
    assert _say(ledger, transfer, 0, Outcome.FAILED) is Late.REPEATED, "the first word counts"
    assert _say(ledger, transfer, 0) is Late.REPEATED
    assert _say(ledger, transfer, 1) is transfer
    assert transfer.state is State.DONE


@pytest.mark.parametrize("seed", range(20))
def test_reports_of_many_transfers_in_any_order(seed: int) -> None:
    """Every report once, some of them twice, mixed with abandons and with new transfers."""
    rng = random.Random(seed)
    ledger = Ledger(4)
    waiting: dict[TransferId, set[int]] = {}
    by_id: dict[TransferId, Transfer] = {}
    failed: set[TransferId] = set()
    abandoned: set[TransferId] = set()
    for _ in range(400):
        if len(waiting) < 5 and rng.random() < 0.3:
            transfer = _submitted(ledger, rng.choice(list(Direction)))
            waiting[transfer.id], by_id[transfer.id] = set(range(4)), transfer
            continue
        if not by_id:
            continue
        number = rng.choice(list(waiting) if waiting and rng.random() < 0.8 else list(by_id))
        transfer, rank = by_id[number], rng.randrange(5)
        if rng.random() < 0.05 and transfer.state is State.SUBMITTED:
            ledger.abandon(transfer)
            abandoned.add(number)
            continue
        outcome = rng.choices([Outcome.DONE, Outcome.FAILED], [9, 1])[0]
        answer = _say(ledger, transfer, rank, outcome)
        if number not in waiting:
            assert answer is Late.ENDED_TRANSFER
        elif rank == 4:
            assert answer is Late.UNKNOWN_RANK
        elif rank not in waiting[number]:
            assert answer is Late.REPEATED
        else:
            waiting[number].remove(rank)
            failed |= {number} if outcome is Outcome.FAILED else set()
            assert answer is (None if waiting[number] else transfer)
            if not waiting[number]:
                del waiting[number]
                expected = State.FAILED if number in failed else State.DONE
                assert transfer.state is (State.DROPPED if number in abandoned else expected)
        assert {each.id: each.waiting_on for each in ledger} == waiting
    assert {transfer.state for transfer in by_id.values()} >= TERMINAL, "the test must reach every end"


# --- views ------------------------------------------------------------------------------------------------


def test_transfers_of_a_request_are_its_live_ones() -> None:
    ledger = Ledger(1)
    mine, other, nobodys = _plan(ledger, request="a"), _plan(ledger, request="b"), _plan(ledger)
    assert ledger.of_request(RequestId("a")) == [mine]
    assert ledger.of_request(RequestId("c")) == []
    ledger.submit(mine, 0.0)
    ledger.abandon(mine)
    assert ledger.of_request(RequestId("a")) == [mine], "abandoned, but not ended"
    _say(ledger, mine, 0)
    assert ledger.of_request(RequestId("a")) == []
    assert list(ledger) == [other, nobodys]


def test_older_transfers_are_those_submitted_before_that_time() -> None:
    ledger = Ledger(1)
    late, early = _plan(ledger, Direction.LOAD), _plan(ledger, Direction.LOAD)
    ledger.submit(early, 1.0)
    ledger.submit(late, 2.0)  # planned first, submitted last
    _submitted(ledger, Direction.STORE, 0.0)
    _plan(ledger, Direction.LOAD)  # never submitted, so it has no age
    assert ledger.older_than(1.0, Direction.LOAD) == []
    assert ledger.older_than(1.5, Direction.LOAD) == [early]
    assert ledger.older_than(9.0, Direction.LOAD) == [late, early]
    _say(ledger, early, 0)
    assert ledger.older_than(9.0, Direction.LOAD) == [late]


def test_abandoned_transfer_still_grows_old() -> None:
    # Nobody wants it, but it holds memory: whoever counts overdue transfers must see it.
    ledger = Ledger(1)
    transfer = _submitted(ledger, now=1.0)
    ledger.abandon(transfer)
    assert ledger.older_than(2.0, Direction.STORE) == [transfer]


# --- check() ----------------------------------------------------------------------------------------------


def _ended(transfer: Transfer) -> None:
    transfer.state = State.DONE


def _waits_for_nobody(transfer: Transfer) -> None:
    transfer.waiting_on.clear()


def _without_a_clock(transfer: Transfer) -> None:
    transfer.submitted_at = None


def _other_id(transfer: Transfer) -> None:
    transfer.order = transfer.order._replace(id=TransferId(99))


def _key_too_many(transfer: Transfer) -> None:
    transfer.order = transfer.order._replace(keys=keys(1, 2, 3))


def _slot_missing(transfer: Transfer) -> None:
    transfer.order.slots.pop()


def _half_a_move(transfer: Transfer) -> None:
    transfer.order.move_from.append(BlockId(1))


@pytest.mark.parametrize(
    "spoil",
    [_ended, _waits_for_nobody, _without_a_clock, _other_id, _key_too_many, _slot_missing, _half_a_move],
)
def test_check_finds_books_that_disagree(spoil: Callable[[Transfer], None]) -> None:
    ledger = Ledger(2)
    transfer = _submitted(ledger)
    ledger.check()
    spoil(transfer)
    with pytest.raises(InvariantError):
        ledger.check()
