"""The prompts are what the tables say they are, and the same for every engine."""

from __future__ import annotations

import asyncio

import pytest
from _engines import ENGINES, LLAMA_8B, engine_args, graphs, with_settings
from _workloads import (
    FULL,
    HEAD_START_S,
    QUICK,
    TINY,
    WORKLOADS,
    Answer,
    Shape,
    Tokens,
    chat_prompts,
    document_prompts,
    fits_prompts,
    miss_prompts,
    step_lengths,
    warm_up,
    warm_up_prompts,
)
from gpu_peers import chosen

SHAPES = [FULL, QUICK, TINY]


class Fake:
    """Answers after a moment, and remembers the prompts and how many it had at a time."""

    def __init__(self) -> None:
        self.asked: list[Tokens] = []
        self.now = self.most = 0

    async def __call__(self, prompt: Tokens, answer_tokens: int) -> Answer:
        self.asked.append(prompt)
        number = len(self.asked)
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        return Answer(len(prompt), len(prompt) // 2, [number] * answer_tokens, 0.25, 1.0)


def run(name: str, shape: Shape) -> tuple[Fake, list[dict[str, float]]]:
    fake = Fake()
    return fake, asyncio.run(WORKLOADS[name](shape, fake))  # type: ignore[arg-type]


def test_the_full_shape_is_the_one_of_the_published_numbers() -> None:
    assert [len(each) for each in document_prompts(FULL)] == [16_000] * 8
    assert [len(each) for each in chat_prompts(FULL)] == [6_000] * 32
    assert (FULL.device_blocks, FULL.block_tokens, FULL.host_bytes, FULL.rounds) == (4096, 16, 60_000_000_000, 3)
    assert (FULL.more_tokens, FULL.answer_tokens, FULL.at_once, FULL.turns) == (1_000, 64, 8, 3)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_prompts_are_the_same_each_time_and_share_nothing(shape: Shape) -> None:
    def everything() -> list[Tokens]:
        slices = [each for i in range(shape.miss_slices) for each in miss_prompts(shape, i)]
        warm = [each for prompts in warm_up_prompts(shape) for each in prompts]
        return document_prompts(shape) + chat_prompts(shape) + fits_prompts(shape) + slices + warm

    prompts = everything()
    assert prompts == everything()
    assert len({tuple(each[: shape.block_tokens]) for each in prompts}) == len(prompts)
    assert all(3 <= token < shape.vocabulary for each in prompts for token in each)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_what_has_to_fit_fits_and_what_must_not_does_not(shape: Shape) -> None:
    device = (shape.device_blocks - 1) * shape.block_tokens  # block 0 is nobody's
    last_turn = shape.first_turn_tokens + (shape.turns - 1) * shape.more_tokens + shape.answer_tokens
    assert shape.documents * shape.document_tokens > 1.5 * device
    assert shape.sessions * last_turn > 1.5 * device
    assert shape.at_once * (last_turn + shape.block_tokens) <= device
    assert shape.miss_prompts * (shape.miss_tokens + shape.answer_tokens + shape.block_tokens) <= device
    assert shape.fits_prompts * (shape.fits_tokens + shape.answer_tokens + shape.block_tokens) <= device / 2
    assert max(shape.document_tokens, last_turn) < shape.max_model_len


def test_the_host_holds_documents_chat_and_what_warmed_up() -> None:
    per_token = 2 * LLAMA_8B["num_hidden_layers"] * LLAMA_8B["num_key_value_heads"] * LLAMA_8B["head_dim"] * 2  # type: ignore[operator]
    warm = sum(len(each) for prompts in warm_up_prompts(FULL) for each in prompts) + FULL.at_once * 64
    last_turn = FULL.first_turn_tokens + (FULL.turns - 1) * FULL.more_tokens + FULL.answer_tokens
    tokens = warm + FULL.documents * FULL.document_tokens + FULL.sessions * last_turn
    assert tokens * per_token < FULL.host_bytes
    assert warm > FULL.device_blocks * FULL.block_tokens  # so that something is loaded before the clock starts


def test_before_the_clock_starts_steps_are_as_long_as_those_of_chats() -> None:
    assert step_lengths(FULL) == [944, 2 * 952, 3 * 944, 4 * 952, 5 * 944, 6 * 952, 7 * 944, 8 * 952]
    _, steps, _ = warm_up_prompts(FULL)
    assert [len(each) for each in steps] == step_lengths(FULL)


def test_documents_are_asked_all_at_once_and_again() -> None:
    fake, phases = run("documents", TINY)
    assert fake.most == TINY.documents
    assert fake.asked == document_prompts(TINY) * TINY.rounds
    assert len(phases) == TINY.rounds
    assert phases[0]["share_cached"] == 0.5
    assert phases[0]["token_s"] == []  # one token has no time between tokens


def test_every_session_takes_a_turn_before_the_next_and_goes_on_from_its_answer() -> None:
    fake, phases = run("chat", TINY)
    turns = [fake.asked[i : i + TINY.sessions] for i in range(0, len(fake.asked), TINY.sessions)]
    assert fake.most == TINY.at_once
    assert len(turns) == len(phases) == TINY.turns
    for turn, prompts in enumerate(turns):
        assert {len(each) for each in prompts} == {TINY.first_turn_tokens + turn * TINY.more_tokens}
    for session, (first, second) in enumerate(zip(*turns[:2], strict=True), 1):
        assert second[: len(first)] == first
        assert second[len(first) : len(first) + TINY.answer_tokens] == [session] * TINY.answer_tokens
    assert phases[0]["token_s"] == [0.75 / (TINY.answer_tokens - 1)] * TINY.sessions


def test_miss_never_repeats_and_fits_always_does() -> None:
    fake, phases = run("miss", TINY)
    assert len({tuple(each) for each in fake.asked}) == len(fake.asked) == TINY.miss_slices * TINY.miss_prompts
    assert len(phases) == TINY.miss_slices
    fake, phases = run("fits", TINY)
    assert fake.asked == fits_prompts(TINY) * (TINY.fits_slices + 1)
    assert len(phases) == TINY.fits_slices  # the round that fills the device is not counted


def test_warming_up_asks_for_a_document_that_was_pushed_out() -> None:
    fake = Fake()
    asyncio.run(warm_up(TINY, fake))
    assert fake.asked[-1] == fake.asked[0]
    assert all(each in fake.asked for prompts in warm_up_prompts(TINY) for each in prompts)
    assert len(fake.asked[0]) == TINY.document_tokens


@pytest.mark.parametrize(
    ("kind", "mode", "sizes"),
    [
        ("decode", "FULL_DECODE_ONLY", [1, 2, 4, 8]),
        ("full", "FULL", [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]),
    ],
)
def test_graphs_are_for_decoding_or_for_all_small_steps(kind: str, mode: str, sizes: list[int]) -> None:
    assert graphs(kind, 8) == {"mode": 0, "cudagraph_mode": mode, "cudagraph_capture_sizes": sizes}


def test_engines_differ_in_their_connector_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = tmp_path_factory.mktemp("model")
    args = {
        name: engine_args(engine, FULL, model, cuda=True, cuda_graphs=None, batched_tokens=8192)
        for name, engine in ENGINES.items()
    }
    connectors = {name: each.pop("kv_transfer_config", None) for name, each in args.items()}
    assert all(each == args["none"] for each in args.values())
    assert args["none"]["num_gpu_blocks_override"] == 4096
    assert connectors["none"] is None
    assert connectors["forebay-lazy"] == {
        "kv_connector": "SimpleCPUOffloadConnector",
        "kv_connector_module_path": "forebay.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 60_000_000_000, "lazy_offload": True},
    }
    for name in ("simple-eager", "offloading"):
        assert connectors[name]["kv_connector_extra_config"]["cpu_bytes_to_use"] == 60_000_000_000
    assert float(ENGINES["lmcache"].environment(60 * 2**30)["LMCACHE_MAX_LOCAL_CPU_SIZE"]) == 60.0


def test_engines_are_chosen_by_name() -> None:
    assert [each.name for each in chosen(None, None, [])] == list(ENGINES)
    assert [each.name for each in chosen("none,forebay-lazy", "forebay-lazy", [])] == ["forebay-lazy", "none"]
    assert [each.name for each in chosen(None, "lmcache,none", [])][:3] == ["lmcache", "none", "simple-eager"]
    names = [each.name for each in chosen(None, None, [{"min_load_tokens": 64}])]
    assert names[-2:] == ["forebay-eager+min_load_tokens=64", "forebay-lazy+min_load_tokens=64"]
    extra = with_settings({"min_load_tokens": 64})[0].connector(1)["kv_connector_extra_config"]  # type: ignore[misc]
    assert extra == {"cpu_bytes_to_use": 1, "lazy_offload": False, "min_load_tokens": 64}
    with pytest.raises(KeyError, match="nobody"):
        chosen("nobody", None, [])


def test_the_first_prompt_of_a_miss_slice_is_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or chance would say whether the first step has one prompt or two."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr("_workloads.asyncio.sleep", noted)
    run("miss", TINY)
    head_starts = [seconds for seconds in slept if seconds]
    assert head_starts == [HEAD_START_S] * (TINY.miss_slices * (TINY.miss_prompts - 1))
    slept.clear()
    run("documents", TINY)
    assert not any(slept)
