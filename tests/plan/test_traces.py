from __future__ import annotations

import gzip
import json
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError, TraceError
from forebay.plan.request import Trace, TraceRequest
from forebay.plan.traces import lines, open_trace

MOONCAKE = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 250, "input_length": 1600, "output_length": 0, "hash_ids": [0, 1, 3, 4]},
    {"timestamp": 250, "input_length": 512, "output_length": 7, "hash_ids": [0]},
]
TEXT = {"timestamp": 1760428258635837, "input": "a prompt", "output": "an answer", "session_id": "s"}


def write(path: Path, *records: object) -> Path:
    text = "".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def message_of(error: type[Exception], call: Callable[[], object]) -> str:
    with pytest.raises(error) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def times(trace: Trace) -> list[float]:
    return [round(request.time_s, 6) for request in trace]


# --- hashes -------------------------------------------------------------------------------------------


def test_a_mooncake_trace_gives_its_requests(tmp_path: Path) -> None:
    trace: Trace = open_trace(write(tmp_path / "mooncake.jsonl", *MOONCAKE))
    first, second, third = trace
    assert (trace.name, trace.block_tokens) == ("mooncake.jsonl", 512)
    assert times(trace) == [0, 0.25, 0.25]
    assert [request.input_tokens for request in (first, second, third)] == [1100, 1600, 512]
    assert [request.output_tokens for request in (first, second, third)] == [5, 0, 7]
    assert first.prefixes[:2] == second.prefixes[:2]
    assert not {*first.prefixes[2:]} & {*second.prefixes[2:]}
    assert third.prefixes == first.prefixes[:1]
    assert [*trace] == [first, second, third], "it can be read again"


def test_what_was_assumed_is_said(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "mooncake.jsonl", *MOONCAKE))
    assert trace.format == "hash trace"
    assert trace.notes == (
        "hash_ids stand for blocks of 512 tokens, by the lengths",
        "timestamps are in milliseconds, as usual for this format",
    )
    given = open_trace(write(tmp_path / "mooncake.jsonl", *MOONCAKE), block_tokens=512, time_unit="s")
    assert given.notes == (
        "hash_ids stand for blocks of 512 tokens, as given",
        "timestamps are in seconds, as given",
    )
    assert times(given) == [0, 250, 250]


def test_chat_ids_mean_blocks_of_16_and_seconds(tmp_path: Path) -> None:
    chats = [
        {"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "type": "text", "turn": 1}
        | {"input_length": 33, "output_length": 4, "hash_ids": [7, 8, 9]},
        {"chat_id": 2, "parent_chat_id": 1, "timestamp": 62.0, "type": "text", "turn": 2}
        | {"input_length": 50, "output_length": 4, "hash_ids": [7, 8, 10, 11]},
    ]
    trace = open_trace(write(tmp_path / "chats.jsonl", *chats))
    assert trace.block_tokens == 16
    assert times(trace) == [0, 0.5]


def test_ids_that_stand_for_a_block_alone_become_ids_of_prefixes(tmp_path: Path) -> None:
    """Public traces have such ids. A cache of prefixes cannot hit the block 5 of the second request."""
    records = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [4, 5]},
        {"timestamp": 1, "input_length": 1024, "output_length": 1, "hash_ids": [6, 5]},
    ]
    first, second = open_trace(write(tmp_path / "a.jsonl", *records))
    assert len({*first.prefixes, *second.prefixes}) == 4


@given(
    block_tokens=st.sampled_from([1, 16, 32, 48, 100, 512, 528, 2048]),
    lengths=st.lists(st.integers(4000, 20_000), min_size=40, max_size=60),
    with_tail=st.booleans(),
)
def test_the_size_of_a_block_is_found_out(block_tokens: int, lengths: list[int], with_tail: bool) -> None:
    from forebay.plan.traces.hashed import Hashed

    sample = []
    for length in lengths:
        ids = -(-length // block_tokens) if with_tail else length // block_tokens
        sample.append({"timestamp": 0, "input_length": length, "output_length": 0, "hash_ids": [*range(ids)]})
    found = Hashed(sample, None, None)
    for place, record in enumerate(sample):
        row = found.row(record, place)  # fits, so nothing is raised
        assert len(row.prefixes) == -(-row.input_tokens // found.block_tokens), "one for every block, and the rest"
    if len({*lengths}) > 30:
        assert found.block_tokens == block_tokens


def test_tokens_without_an_id_are_like_no_others(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 1000, "output_length": 1, "hash_ids": [4]}
    longer = {"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [4, 5]}
    trace = open_trace(write(tmp_path / "a.jsonl", longer, record, record))
    first, second, third = trace
    assert trace.notes[0] == "hash_ids stand for whole blocks of 512 tokens, by the lengths"
    assert first.prefixes[0] == second.prefixes[0] == third.prefixes[0]
    assert second.prefixes[1] != third.prefixes[1]
    assert [*trace] == [first, second, third]


def test_a_line_that_does_not_fit_is_named_though_the_size_was_found_out(tmp_path: Path) -> None:
    bad = {"timestamp": 0, "input_length": 2000, "output_length": 0, "hash_ids": [0, 1]}
    path = write(tmp_path / "a.jsonl", bad, *MOONCAKE)
    assert message_of(TraceError, lambda: open_trace(path)) == (
        f"{path}:1: expected 4 hash_ids for 2,000 tokens in blocks of 512 tokens, got 2"
    )


def test_hash_ids_may_be_text(tmp_path: Path) -> None:
    records = [
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ["a", "b"]},
        {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": ["a", "c"]},
    ]
    first, second = open_trace(write(tmp_path / "a.jsonl", *records))
    assert first.prefixes[0] == second.prefixes[0]
    assert first.prefixes[1] != second.prefixes[1]


# --- times and files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("unit", "first"), [("s", 1760428258), ("ms", 1760428258635), ("us", 1760428258635837)])
def test_times_since_1970_have_the_unit_of_their_size(tmp_path: Path, unit: str, first: int) -> None:
    step = {"s": 1, "ms": 1000, "us": 1_000_000}[unit]
    records = [{**TEXT, "timestamp": first}, {**TEXT, "timestamp": first + 3 * step}]
    assert times(open_trace(write(tmp_path / "a.jsonl", *records))) == [0, 3]


def test_an_unknown_unit_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *MOONCAKE)
    assert message_of(ConfigError, lambda: open_trace(path, time_unit="min")) == (
        "time_unit: expected one of s, ms, us, ns, got 'min'"
    )


@given(st.data())
def test_files_of_a_folder_are_merged_by_time(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    all_times = []
    for number in range(data.draw(st.integers(1, 5))):
        own = sorted(data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=8)))
        all_times += own
        suffix = data.draw(st.sampled_from([".jsonl", ".jsonl.gz", ".json"]))
        write(folder / f"{number}{suffix}", *({**MOONCAKE[0], "timestamp": time * 1000} for time in own))
    found = times(open_trace(folder))
    assert found == [time - min(all_times) for time in sorted(all_times)]


def test_files_are_opened_only_when_their_time_has_come(tmp_path: Path) -> None:
    """A folder may have a file for each of many thousand sessions."""
    for number in range(300):
        record = {**MOONCAKE[0], "timestamp": number * 10}
        write(tmp_path / f"{number}.jsonl", record, {**record, "timestamp": number * 10 + 15})
    trace = open_trace(tmp_path)
    requests, most_open, before = 0, 0, len(os.listdir("/proc/self/fd"))
    for _ in trace:
        requests += 1
        most_open = max(most_open, len(os.listdir("/proc/self/fd")) - before)
    assert (requests, most_open) == (600, 2)


def test_bytes_read_grow_to_all_bytes_also_of_gzip(tmp_path: Path) -> None:
    numbers = random.Random(0)
    records = [{**MOONCAKE[0], "hash_ids": [numbers.getrandbits(60) for _ in range(3)]} for _ in range(5000)]
    paths = [write(tmp_path / "a.jsonl", *records), write(tmp_path / "b.jsonl.gz", *records)]
    trace = open_trace(paths)
    assert trace.num_bytes == sum(path.stat().st_size for path in paths)
    seen = [trace.bytes_read for _ in trace]
    assert seen == sorted(seen)
    assert len({*seen}) > 10
    assert trace.bytes_read == trace.num_bytes


def test_a_file_that_is_there_plain_and_gzipped_is_read_once(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *MOONCAKE)
    write(tmp_path / "a.jsonl.gz", *MOONCAKE)
    assert len([*open_trace(tmp_path)]) == 3


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    def peak_bytes(requests: int) -> int:
        path = tmp_path / f"{requests}.jsonl"
        with path.open("w") as file:
            for number in range(requests):
                ids = [number, number + 1, number + 2]
                file.write(json.dumps({**MOONCAKE[0], "timestamp": number, "hash_ids": ids}) + "\n")
        trace = open_trace(path)
        tracemalloc.start()
        total = sum(request.input_tokens for request in trace)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total == requests * 1100
        return peak

    assert peak_bytes(40_000) < peak_bytes(400) + 100_000


def test_lines_of_a_log_may_be_a_little_late(tmp_path: Path) -> None:
    """They are written when requests end."""
    path = write(tmp_path / "a.jsonl", *({**TEXT, "timestamp": time} for time in (3, 1, 2, 5, 4)))
    assert times(open_trace(path)) == [0, 1, 2, 3, 4]
    late = [*range(10, 400), 5]
    path = write(tmp_path / "a.jsonl", *({**TEXT, "timestamp": time} for time in late))
    assert message_of(TraceError, lambda: [*open_trace(path)]) == (
        f"{path}:391: expected a time of at least 143, as on lines before: sort by time, got 5"
    )


# --- texts ----------------------------------------------------------------------------------------------


def test_texts_that_begin_alike_have_ids_that_begin_alike(tmp_path: Path) -> None:
    shared = "x" * 640
    records = [{**TEXT, "input": shared + tail} for tail in ("", "a" * 100, "b" * 100)]
    trace = open_trace(write(tmp_path / "a.jsonl", *records))
    plain, a, b = trace
    assert (trace.format, trace.block_tokens) == ("text trace", 16)
    assert trace.notes == (
        "tokens are estimated: one for 4 bytes of text",
        "blocks of 16 tokens",
        "timestamps are in microseconds since 1970, by their size",
    )
    assert (plain.input_tokens, a.input_tokens, plain.output_tokens) == (160, 185, 3)
    assert len(plain.prefixes) == 10
    assert len(a.prefixes) == 12
    assert plain.prefixes == a.prefixes[:10] == b.prefixes[:10]
    assert not {*a.prefixes[10:]} & {*b.prefixes[10:]}


@given(
    texts=st.lists(st.text(max_size=60), min_size=2, max_size=4),
    block_tokens=st.integers(1, 8),
    bytes_per_token=st.sampled_from([1, 2.5, 3.7, 4]),
)
def test_ids_are_equal_as_far_as_bytes_are(texts: list[str], block_tokens: int, bytes_per_token: float) -> None:
    from forebay.plan.traces.tokens import ByteEstimate

    estimate = ByteEstimate(block_tokens, bytes_per_token)
    block_bytes = max(1, round(block_tokens * bytes_per_token))
    whole = "".join(texts)
    for first in texts:
        for second in (*texts, whole):
            a, b = estimate.prefixes(first), estimate.prefixes(second)
            assert len(a.prefixes) == -(-a.tokens // block_tokens)
            data, other = first.encode(), second.encode()
            for number, (left, right) in enumerate(zip(a.prefixes, b.prefixes, strict=False), start=1):
                upto = number * block_bytes
                assert (left == right) == (data[:upto] == other[:upto])


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why is the sky blue?" * 10}]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda request: request | {"timestamp": 3},
        lambda request: {"created": 3, "request": request},
        lambda request: {"timestamp": 3, "body": request},
        lambda request: {"time": 3, "request": {"method": "POST", "body": request}},
        lambda request: {"timestamp": 3, "request": json.dumps(request)},
        lambda request: {"timestamp": "2026-11-15T12:00:00Z", "request": request},
        lambda request: {"timestamp": 3, "input": request, "output": {"role": "assistant"}},
        lambda request: {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": request},
    ],
    ids=["plain", "request", "body", "both", "text", "date", "input", "batch"],
)
def test_logs_of_requests_may_be_wrapped(tmp_path: Path, wrap: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    request = {"model": "m", "messages": CHAT}
    later = {"model": "m", "messages": [*CHAT, {"role": "assistant", "content": "Scattering."}]}
    trace = open_trace(write(tmp_path / "log.jsonl", wrap(request), wrap(later)))
    first, second = trace
    assert trace.format == "request log"
    assert first.input_tokens < second.input_tokens
    assert first.prefixes[:-1] == second.prefixes[: len(first.prefixes) - 1]
    assert len(first.prefixes) > 2


def test_content_may_come_in_parts(tmp_path: Path) -> None:
    def asks(*parts: object) -> dict[str, Any]:
        return {"timestamp": 0, "messages": [{"role": "user", "content": [*parts]}]}

    text = {"type": "text", "text": "What is in this picture? " * 10}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    other = {"type": "image_url", "image_url": {"url": "data:image/png;base64,BBBB"}}
    same = {"timestamp": 0, "messages": [{"role": "user", "content": text["text"]}]}
    log = write(tmp_path / "log.jsonl", asks(text), same, asks(image, text), asks(image, text), asks(other, text))
    plain, as_text, first, again, different = open_trace(log)
    assert plain.prefixes == as_text.prefixes
    assert first.prefixes == again.prefixes
    assert not {*first.prefixes} & {*different.prefixes}


def test_tools_come_before_messages(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "search", "description": "find things " * 20}}]
    records = [
        {"timestamp": 0, "messages": [{"role": "user", "content": text}], "tools": tools} for text in ("a", "b")
    ]
    first, second = open_trace(write(tmp_path / "log.jsonl", *records))
    assert first.prefixes[:3] == second.prefixes[:3]
    assert first.input_tokens > 60


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        ({"response": {"usage": {"completion_tokens": 17}, "choices": []}}, 17),
        ({"response": {"body": {"usage": {"completion_tokens": 17}}}}, 17),
        ({"usage": {"prompt_tokens": 5, "completion_tokens": 17}}, 17),
        ({"response": {"choices": [{"message": {"role": "assistant", "content": "x" * 40}}]}}, 10),
        ({"choices": [{"text": "x" * 40}]}, 10),
        ({"output": "x" * 40}, 10),
        ({"response": None}, 0),
        ({}, 0),
    ],
)
def test_output_tokens_are_those_of_the_answer(tmp_path: Path, answer: dict[str, Any], tokens: int) -> None:
    log = write(tmp_path / "log.jsonl", {"timestamp": 0, "request": {"messages": CHAT}, **answer})
    (request,) = open_trace(log)
    assert request.output_tokens == tokens


def test_prompts_of_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    records = [{"timestamp": 0, "prompt": [1, 2, 3, 4, 5]}, {"timestamp": 0, "prompt": [1, 2, 3, 4, 6]}]
    first, second = open_trace(write(tmp_path / "log.jsonl", *records), block_tokens=2)
    assert first.input_tokens == 5
    assert first.prefixes[:2] == second.prefixes[:2]
    assert first.prefixes[2] != second.prefixes[2]


def test_a_log_without_times_is_one_after_another(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "log.jsonl", {"messages": CHAT}, {"messages": CHAT[:1]}))
    assert times(trace) == [0, 0]
    assert not trace.has_times
    assert "no request has a time: they follow one another at once" in trace.notes


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """One token for each word."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0} | {f"w{number}": number for number in range(1, 50)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_local_tokenizer_gives_the_tokens(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    words = [f"w{number}" for number in range(1, 11)]
    records = [
        {**TEXT, "input": " ".join(words), "output": "w1 w2"},
        {**TEXT, "input": " ".join([*words[:5], "w9"])},
    ]
    path = write(folder / "a.jsonl", *records)
    for given_as in (tokenizer, tokenizer.parent):
        first, second = open_trace(path, tokenizer=given_as, block_tokens=4)
        assert (first.input_tokens, first.output_tokens, second.input_tokens) == (10, 2, 6)
        assert len(first.prefixes) == 3
        assert first.prefixes[0] == second.prefixes[0]
        assert first.prefixes[1] != second.prefixes[1]


def test_a_tokenizer_that_cannot_be_had_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", TEXT)
    missing = tmp_path / "tokenizer.json"
    pytest.importorskip("tokenizers")
    assert message_of(ConfigError, lambda: open_trace(path, tokenizer=missing)) == (
        f"tokenizer: expected a tokenizer.json, or a folder that has one, got '{missing}'"
    )
    missing.write_text("{}")
    assert "tokenizer: expected a file that tokenizers can read" in message_of(
        ConfigError, lambda: open_trace(path, tokenizer=missing)
    )
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    assert "the package tokenizers to be installed" in message_of(
        ConfigError, lambda: open_trace(path, tokenizer=missing)
    )


# --- bad input --------------------------------------------------------------------------------------------

BAD_LINES = {
    "not JSON": ('{"timestamp": 300,', "expected one JSON object, got '{\"timestamp\": 300,'"),
    "a list": ("[1, 2]", "expected one JSON object, got [1, 2]"),
    "NaN": ('{"timestamp": NaN}', "expected one JSON object, got '{\"timestamp\": NaN}'"),
    "too deep": ("[" * 100_000, "expected one JSON object, got '["),
    "negative": (MOONCAKE[0] | {"timestamp": 300, "input_length": -1}, "at least 0, got -1"),
    "a boolean": (MOONCAKE[0] | {"timestamp": 300, "output_length": True}, "output_length as a whole number"),
    "a fraction": (MOONCAKE[0] | {"timestamp": 300, "input_length": 1100.5}, "input_length as a whole number"),
    "a time as text": (MOONCAKE[0] | {"timestamp": "soon"}, "expected timestamp as a number, got 'soon'"),
    "no ids": (MOONCAKE[0] | {"timestamp": 300, "hash_ids": None}, "expected hash_ids as a list, got None"),
    "a time out of this world": (MOONCAKE[0] | {"timestamp": 10**400}, "expected timestamp as a number"),
    "a length out of this world": (MOONCAKE[0] | {"timestamp": 300, "output_length": 10**400}, "output_length as"),
    "too few ids": (
        MOONCAKE[0] | {"timestamp": 300, "hash_ids": [0, 1]},
        "expected 3 hash_ids for 1,100 tokens in blocks of 512 tokens, got 2",
    ),
    "mixed ids": (MOONCAKE[0] | {"timestamp": 300, "hash_ids": [0, 1, "2"]}, "or all as text, got '2'"),
    "negative ids": (MOONCAKE[0] | {"timestamp": 300, "hash_ids": [0, 1, -2]}, "got -2"),
    "ids of booleans": (MOONCAKE[0] | {"timestamp": 300, "hash_ids": [0, 1, True]}, "got True"),
    "huge ids": (MOONCAKE[0] | {"timestamp": 300, "hash_ids": [0, 1, 1 << 64]}, "got 18446744073709551616"),
    "a missing field": (
        {"timestamp": 300, "input_length": 1100, "hash_ids": [0, 1, 2]},
        "expected the field 'output_length', got an object with 'timestamp', 'input_length', 'hash_ids'",
    ),
    "time backwards": (
        MOONCAKE[0] | {"timestamp": 249},
        "expected a time of at least 250, as on lines before: sort by time, got 249",
    ),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path: Path, kind: str) -> None:
    bad, expected = BAD_LINES[kind]
    path = write(tmp_path / "a.jsonl", *MOONCAKE[:2], "", bad, MOONCAKE[2])
    read: list[TraceRequest] = []
    message = message_of(TraceError, lambda: read.extend(open_trace(path)))
    assert message.startswith(f"{path}:4: expected ")
    assert expected in message
    assert len(message) < len(str(path)) + 250

    trace = open_trace(path, skip_bad_lines=True)
    assert times(trace) == [0, 0.25, 0.25]
    assert trace.skipped == 1
    assert trace.reasons == (message,)
    assert len([*trace]) == 3, "and again"
    assert trace.skipped == 1


@pytest.mark.parametrize("kind", BAD_LINES.keys() - {"time backwards"})
def test_the_first_line_may_be_bad_too(tmp_path: Path, kind: str) -> None:
    bad, expected = BAD_LINES[kind]
    path = write(tmp_path / "a.jsonl", bad, *MOONCAKE)
    assert message_of(TraceError, lambda: open_trace(path)).startswith(f"{path}:1: expected ")
    write(tmp_path / "b.jsonl", *MOONCAKE)
    trace = open_trace(tmp_path, skip_bad_lines=True)
    assert times(trace) == [0, 0, 0.25, 0.25, 0.25, 0.25]
    assert trace.skipped == 1
    assert expected in trace.reasons[0]


def test_inputs_without_tokens_say_nothing_about_blocks(tmp_path: Path) -> None:
    nothing = {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}
    trace = open_trace(write(tmp_path / "a.jsonl", *[nothing] * 5, *MOONCAKE))
    assert trace.notes[0] == "hash_ids stand for blocks of 512 tokens, by the lengths"
    assert next(iter(trace)).prefixes == []


def test_many_bad_lines_are_counted_and_a_few_told(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "a.jsonl", "first", *MOONCAKE, *["bad"] * 100), skip_bad_lines=True)
    assert len([*trace]) == 3
    assert trace.skipped == 101
    assert len(trace.reasons) == 5


def test_an_unknown_set_of_fields_is_refused_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"when": 1, "what": 2})
    expected = (
        f"{path}:1: expected fields of a trace: timestamp with hash_ids, input_length and output_length, or with "
        "input and output, or with messages; or those of a recording, got an object with 'when', 'what'"
    )
    assert message_of(TraceError, lambda: open_trace(path)) == expected
    assert message_of(TraceError, lambda: open_trace(path, skip_bad_lines=True)) == expected


@pytest.mark.parametrize("content", ["", "\n \n\n", "\ufeff"])
@pytest.mark.parametrize("skip", [False, True])
def test_an_empty_file_is_no_trace(tmp_path: Path, content: str, skip: bool) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    message = message_of(TraceError, lambda: open_trace(tmp_path / "a.jsonl", skip_bad_lines=skip))
    assert message == f"{tmp_path / 'a.jsonl'}: expected at least one request, got an empty file"


def test_an_empty_file_among_others(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *MOONCAKE)
    (tmp_path / "b.jsonl").touch()
    assert "b.jsonl: expected at least one request" in message_of(TraceError, lambda: open_trace(tmp_path))
    assert len([*open_trace(tmp_path, skip_bad_lines=True)]) == 3


def test_a_byte_order_mark_and_other_line_ends_are_no_matter(tmp_path: Path) -> None:
    text = "\ufeff" + "\r\n".join(map(json.dumps, MOONCAKE))
    (tmp_path / "a.jsonl").write_text(text)
    assert len([*open_trace(tmp_path / "a.jsonl")]) == 3


def test_bytes_that_are_not_utf_8_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", *MOONCAKE)
    path.write_bytes(path.read_bytes() + b'{"a": "\xff"}\n')
    assert message_of(TraceError, lambda: [*open_trace(path)]) == (
        f"{path}:4: expected UTF-8 text, got byte 0xff at column 8"
    )


def test_a_line_without_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 500)
    path = write(tmp_path / "a.jsonl", *MOONCAKE[:2], "x" * 3_000_000, MOONCAKE[2])
    assert message_of(TraceError, lambda: [*open_trace(path)]) == (
        f"{path}:3: expected a line of at most 500 bytes, got a longer one"
    )
    trace = open_trace(path, skip_bad_lines=True)
    assert len([*trace]) == 3
    assert trace.skipped == 1


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    numbers = random.Random(0)
    records = [{**MOONCAKE[0], "hash_ids": [numbers.getrandbits(60) for _ in range(3)]} for _ in range(500)]
    path = write(tmp_path / "a.jsonl.gz", *records)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return path


def test_a_truncated_gzip_is_read_to_its_end_and_named(truncated: Path) -> None:
    read: list[TraceRequest] = []
    message = message_of(TraceError, lambda: read.extend(open_trace(truncated)))
    assert 200 < len(read) < 300
    assert message == (
        f"{truncated}:{len(read) + 1}: expected the rest of the compressed data, "
        "got its end: the file is truncated"
    )
    trace = open_trace(truncated, skip_bad_lines=True)
    assert len([*trace]) == len(read)
    assert trace.skipped == 1


def test_gzip_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_text(json.dumps(MOONCAKE[0]))
    assert message_of(TraceError, lambda: open_trace(path)).startswith(f"{path}:1: expected gzip data")


def test_gzip_without_the_name_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", *MOONCAKE).rename(tmp_path / "a.jsonl")
    assert message_of(TraceError, lambda: open_trace(path)) == (
        f"{path}:1: expected text, or a name that ends in .gz, got gzipped data"
    )


def test_spoilt_gzip_is_named(tmp_path: Path, truncated: Path) -> None:
    data = bytearray(truncated.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    truncated.write_bytes(data)
    assert message_of(TraceError, lambda: [*open_trace(truncated)]).startswith(f"{truncated}:")


def test_places_without_a_trace_are_named(tmp_path: Path) -> None:
    assert message_of(TraceError, lambda: open_trace(tmp_path / "gone")) == (
        f"{tmp_path / 'gone'}: expected a file or a folder, got nothing there"
    )
    (tmp_path / "readme.txt").touch()
    assert message_of(TraceError, lambda: open_trace(tmp_path)) == (
        f"{tmp_path}: expected a folder with files named *.jsonl, *.ndjson, *.json, or so with .gz, got none"
    )
    assert message_of(TraceError, lambda: open_trace("/dev/null")) == (
        "/dev/null: expected a file or a folder, got something else"
    )
    assert message_of(ConfigError, lambda: open_trace([])) == "trace: expected at least one file or folder, got []"
    path = write(tmp_path / "a.jsonl", *MOONCAKE)
    assert message_of(ConfigError, lambda: open_trace(path, block_tokens=0)) == (
        "block_tokens: expected a whole number of at least 1, got 0"
    )


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *MOONCAKE)
    path = write(tmp_path / "b.jsonl", *MOONCAKE)
    trace, lenient = open_trace(tmp_path), open_trace(tmp_path, skip_bad_lines=True)
    path.unlink()
    assert message_of(TraceError, lambda: [*trace]) == (
        f"{path}: expected a file that can be read, got nothing any more; engines that still record delete old "
        "files: copy the folder, or try again"
    )
    assert len([*lenient]) == 3
    assert lenient.skipped == 1


def test_another_format_in_the_same_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *MOONCAKE)
    path = write(tmp_path / "b.jsonl", TEXT)
    assert message_of(TraceError, lambda: open_trace(tmp_path)).startswith(f"{path}:1: expected the field")


def test_texts_that_are_none_are_named(tmp_path: Path) -> None:
    for bad, expected in [
        ({**TEXT, "input": 5}, "expected input as text, got 5"),
        ({"timestamp": 1, "messages": "hello"}, "expected messages as a list, got 'hello'"),
        ({"timestamp": 1, "messages": ["hello"]}, "expected messages as objects, got 'hello'"),
        ({"timestamp": 1, "messages": [{"content": 5}]}, "expected content as text or as a list of parts, got 5"),
        (
            {**TEXT, "timestamp": 1, "usage": {"completion_tokens": -1}},
            "expected completion_tokens as a whole number",
        ),
        ({"timestamp": 1, "prompt": [1, -1]}, "expected token ids as whole numbers"),
        ({"messages": []}, "expected a timestamp, got an object with 'messages'"),
    ]:
        path = write(tmp_path / "a.jsonl", {**TEXT, "timestamp": 1}, bad)
        message = message_of(TraceError, lambda path=path: [*open_trace(path)])
        assert message.startswith(f"{path}:2: {expected}")
