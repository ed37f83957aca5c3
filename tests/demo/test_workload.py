from __future__ import annotations

import pytest

from demo.workload import ANSWER, BLOCK, Workload, warm_up_prompt

WORKLOADS = [Workload(), Workload(2, 2, 100), Workload(100, 10, 8000), Workload(3, 4, 333)]
each_workload = pytest.mark.parametrize("workload", WORKLOADS, ids=str)


@each_workload
def test_a_turn_begins_with_all_that_was_said_before(workload: Workload) -> None:
    answers = ["x" * ANSWER] * (workload.turns - 1)
    for turn in range(1, workload.turns):
        before = workload.prompt(1, answers[: turn - 1]) + answers[turn - 1]
        assert workload.prompt(1, answers[:turn]).startswith(before)


@each_workload
def test_the_chats_do_not_fit_on_the_device_but_one_does_and_the_host_has_room_for_all(workload: Workload) -> None:
    last = ["x" * ANSWER] * (workload.turns - 1)
    longest = max(len(workload.prompt(session, last)) + ANSWER for session in range(workload.sessions))
    in_all = workload.sessions * workload.blocks_of_a_chat
    assert longest <= workload.max_model_len == workload.blocks_of_a_chat * BLOCK
    assert workload.blocks_of_a_chat < workload.device_blocks <= in_all // 2 + 1
    assert workload.host_blocks > in_all


def test_the_text_has_the_length_that_was_asked_for() -> None:
    short, long = (len(Workload(text_tokens=length).prompt(0, [])) for length in (100, 1100))
    assert long - short == 1000


def test_sessions_share_the_system_prompt_and_no_block_more() -> None:
    one, other = Workload().prompt(0, []), Workload().prompt(1, [])
    common = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    assert BLOCK < common < 200


def test_prompts_are_ascii_so_that_a_token_is_a_letter() -> None:
    assert all(Workload().prompt(session, []).isascii() for session in range(50))


def test_the_same_every_time_and_nothing_of_it_in_the_warm_up() -> None:
    assert Workload().prompt(3, ["a"]) == Workload().prompt(3, ["a"])
    assert warm_up_prompt(Workload())[:BLOCK] != Workload().prompt(0, [])[:BLOCK]
