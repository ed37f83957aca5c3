"""The traffic is what it says and the same each time; an answer is wrong where a choice was clear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _compare import Difference, clear_limit, differences, wrong
from _traffic import LARGE, SMALL, Sizes, in_order, questions
from gpu_answers import CHOICES, FLOAT32, INVARIANT, Bench, judge, mismatches, parse, table

ANSWERS = 300


@pytest.mark.parametrize("sizes", [LARGE, SMALL], ids=lambda sizes: sizes.name)
class TestTraffic:
    def test_it_is_the_same_each_time_and_enough(self, sizes: Sizes) -> None:
        asked = questions(sizes, ANSWERS)
        assert asked == questions(sizes, ANSWERS)
        assert ANSWERS <= sum(not each.is_aborted for each in asked) < ANSWERS + 2 * sizes.turns
        assert len({each.name for each in asked}) == len(asked)

    def test_lengths(self, sizes: Sizes) -> None:
        shortest = sizes.beginning_tokens + sizes.first_tokens[0]
        longest = sizes.beginning_tokens + sizes.first_tokens[1] + (sizes.turns - 1) * sizes.more_tokens[1]
        for each in questions(sizes, ANSWERS):
            assert shortest <= len(each.prompt) <= longest
            assert sizes.answer_tokens[0] <= each.answer_tokens <= sizes.answer_tokens[1]
            assert all(3 <= token < sizes.vocabulary for token in each.prompt)
        assert longest + sizes.answer_tokens[1] < sizes.max_model_len

    def test_a_session_goes_on_and_shares_its_beginning(self, sizes: Sizes) -> None:
        prompts = {each.name: each.prompt for each in questions(sizes, ANSWERS)}
        for turn in range(1, sizes.turns):
            before = prompts[f"session 3 turn {turn - 1}"]
            assert prompts[f"session 3 turn {turn}"][: len(before)] == before
        beginnings = {tuple(each[: sizes.beginning_tokens]) for each in prompts.values()}
        assert 1 < len(beginnings) <= sizes.beginnings

    def test_some_are_given_up_and_some_asked_twice(self, sizes: Sizes) -> None:
        asked = questions(sizes, ANSWERS)
        by_name = {each.name: each for each in asked}
        assert 0.02 < sum(each.is_aborted for each in asked) / len(asked) < 0.08
        assert {each.abort_after_steps is None for each in asked if each.is_aborted} == {True, False}
        twins = [each for each in asked if each.name.endswith(" again")]
        assert twins
        assert all(each.prompt == by_name[each.name.removesuffix(" again")].prompt for each in twins)

    def test_orders_differ_within_a_turn_and_keep_twins_together(self, sizes: Sizes) -> None:
        asked = questions(sizes, ANSWERS)
        first, second = in_order(asked, 0), in_order(asked, 1)
        assert first != second
        assert sorted(each.name for each in first) == sorted(each.name for each in asked)
        for order in (first, second):
            assert [each.turn for each in order] == sorted(each.turn for each in asked)
            names = [each.name for each in order]
            for i, name in enumerate(names):
                if name.endswith(" again"):
                    assert names[i - 1] == name.removesuffix(" again")

    def test_the_host_holds_all_of_it_and_the_device_a_part(self, sizes: Sizes) -> None:
        model = sizes.model
        per_token = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"]
        per_token *= 2 if sizes is LARGE else 4
        asked = questions(sizes, sizes.answers)
        last = [each for each in asked if each.turn == sizes.turns - 1 and not each.name.endswith(" again")]
        tokens = sum(len(each.prompt) + sizes.turns * sizes.answer_tokens[1] for each in last)
        assert tokens * per_token < sizes.host_bytes
        assert tokens > 4 * sizes.device_blocks * sizes.block_tokens
        mean = sum(len(each.prompt) for each in asked) / len(asked)
        assert sizes.at_once * mean > 2 * sizes.device_blocks * sizes.block_tokens


def said(*tokens: int, chances: dict[str, float] | None = None) -> dict[str, Any]:
    return {"tokens": list(tokens), "chances": [chances or {str(token): -0.1} for token in tokens]}


def test_the_first_token_that_differs_counts_with_the_gap_it_bridged() -> None:
    reference = {
        "a": said(1, 2, 3, chances={"2": -0.5, "9": -0.75, "1": -0.1, "3": -0.1, "4": -4.0}),
        "b": said(1, 2),
        "c": said(1, 2),
        "d": said(1, 2, chances={"1": -0.5, "2": -0.5, "7": -2.0}),
        "only here": said(1),
    }
    other = {
        "a": {"tokens": [1, 9, 4]},
        "b": {"tokens": [1, 2]},
        "c": {"tokens": [1]},
        "d": {"tokens": [1, 8]},  # not even among the likeliest: at least as far as the last of them
        "only there": {"tokens": [5]},
    }
    assert differences(reference, other) == [
        Difference("a", 1, 0.25),
        Difference("c", 1, float("inf")),
        Difference("d", 1, 1.5),
    ]


def test_what_rounding_bridges_without_offload_is_not_wrong_with_it() -> None:
    close, wide = Difference("a", 0, 0.01), Difference("b", 0, 0.3)
    assert wrong([close, wide], clear_limit([], 0.0)) == [close, wide]
    assert wrong([close, wide], clear_limit([], 0.05)) == [wide]
    assert wrong([close, wide], clear_limit([Difference("c", 3, 0.2)], 0.05)) == []
    assert clear_limit([Difference("c", 0, float("inf"))], 0.05) == 0.05


def row(**changes: Any) -> dict[str, Any]:
    counters = dict.fromkeys(("stored_blocks", "load_failures", "store_failures", "recomputes", "held"), 0)
    counters |= {"loaded_blocks": 10, "hit_tokens": 500, "mismatched_blocks": 0}
    return (
        {
            "variant": "eager",
            "offload": True,
            "faults": None,
            "problem": None,
            "compared": 100,
            "differ": 0,
            "wrong": 0,
            "odd": [],
            "aborted": 5,
            "preemptions": 3,
            "prompt_tokens": 1000,
            "cached_tokens": 700,
            "verifies": True,
            "seconds": 3.0,
            "start_s": 2.0,
        }
        | {"counters": counters | changes.pop("counters", {})}
        | changes
    )


def test_a_good_run_has_nothing_wrong() -> None:
    assert judge(row(), answers=100) == []
    assert judge(row(differ=3), answers=100) == []  # close calls


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"problem": "late: killed after 150 s in answers"}, "eager: late: killed after 150 s in answers"),
        ({"wrong": 2}, "eager: 2 answers are wrong"),
        ({"compared": 98}, "eager: 2 answers are missing"),
        ({"odd": ["x: 0 tokens, error"]}, "eager: x: 0 tokens, error"),
        ({"preemptions": 0}, "eager: nothing was preempted, so this was no pressure"),
        ({"counters": {"mismatched_blocks": 1}}, "eager: 1 mismatches"),
        ({"counters": {"loaded_blocks": 0}}, "eager: nothing was loaded, so nothing was tried"),
        ({"counters": {"held": 2}}, "eager: 2 pins or transfers are left"),
        ({"spoilt": ["a"] * 10, "noticed": 8}, "eager: only 8 of 10 were noticed"),
    ],
)
def test_what_is_wrong_is_said(changes: dict[str, Any], says: str) -> None:
    assert judge(row(**changes), answers=100) == [says]


def test_with_injected_faults_loads_have_to_fail() -> None:
    failing = {"fail_chance": 0.1}
    assert judge(row(faults=failing), answers=100) == ["eager: no load failed although faults were injected"]
    failed = {"load_failures": 1, "mismatched_blocks": 1}
    assert judge(row(faults=failing, counters=failed), answers=100) == []


def test_bytes_that_go_wrong_in_silence_have_to_be_noticed() -> None:
    flipping = {"fail_chance": 0.1, "spoil": "flip"}
    says = ["eager: bytes went wrong and nobody noticed"]
    assert judge(row(faults=flipping, counters={"load_failures": 1}), answers=100) == says
    noticed = {"load_failures": 1, "mismatched_blocks": 1}
    assert judge(row(faults=flipping, counters=noticed), answers=100) == []


def test_mismatches_are_not_none_where_nothing_is_proven() -> None:
    assert mismatches(row()) == 0
    assert mismatches(row(verifies=False)) is None
    assert mismatches({"counters": {}, "verifies": True}) is None


def test_the_table_has_a_line_for_each_engine_also_for_one_that_failed() -> None:
    none = row(variant="none", offload=False, verifies=False) | {"counters": {}}
    lines = table([none, row(), row(variant="lazy", problem="failed in start: KeyError: 'x'")])
    assert len(lines) == 4
    assert lines[1].split()[:4] == ["none", "100", "0", "0"]
    assert lines[2].split()[6:9] == ["0.700", "0.500", "10"]
    assert lines[3].split(maxsplit=1)[1] == "failed in start: KeyError: 'x'"


def test_peers_can_be_asked_too_with_settings_of_their_own(tmp_path: Path) -> None:
    bench = Bench(parse(["--only", "eager,lmcache", "--device", "cpu"]), tmp_path)
    assert bench.engine_args(CHOICES["lmcache"], 9)["kv_transfer_config"]["kv_connector"] == "LMCacheConnectorV1"
    assert "kv_transfer_config" not in bench.engine_args(CHOICES["eager"], 9)
    peer = CHOICES["lmcache"].peer
    assert peer is not None
    assert float(peer.environment(2**31)["LMCACHE_MAX_LOCAL_CPU_SIZE"]) == 2


def test_what_a_peer_gets_wrong_is_told_and_does_not_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, other = {"a": {"tokens": [1, 2], "chances": [{"1": -1, "5": -9}] * 2}}, {"a": {"tokens": [5, 2]}}
    mine = {"offload": False, "counters": {}, "verifies": False, "spec": {"answers": 1}, "peer": False}
    bench = Bench(parse(["--device", "cpu"]), tmp_path)
    bench.rows = [row(variant="none", answers=right, **mine)]
    bench.rows.append(row(variant="lmcache", answers=other, **mine | {"peer": True}))
    assert bench.report() == []
    assert "lmcache: a, token 0, by 8" in capsys.readouterr().out
    bench.rows[1]["peer"] = False
    assert bench.report() == ["lmcache: 1 answers are wrong"]


def test_a_gpu_is_first_asked_for_kernels_that_do_not_depend_on_the_batch() -> None:
    assert parse(["--device", "cuda"]).modes == [INVARIANT, FLOAT32]
    assert parse(["--device", "cpu"]).modes == [FLOAT32]
    assert parse(["--device", "cuda"]).answers == 1_500
    with pytest.raises(SystemExit):
        parse(["--device", "cpu", "--cuda-graphs"])
