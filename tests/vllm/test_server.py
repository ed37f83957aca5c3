"""A real server with a real client. One server with Forebay and one without, asked the same."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoint import save_checkpoint
from tests.vllm.server import Server

pytestmark = pytest.mark.timeout(600)  # a server takes 40 s to start on two cores that have nothing else to do

BLOCK = 32
ANSWER = 24
TURNS = 5
ARGUMENTS = (
    *("--served-model-name", "small", "--host", "127.0.0.1", "--enforce-eager", "--dtype", "float32"),
    *("--max-model-len", "1000", "--max-num-seqs", "4", "--block-size", str(BLOCK)),
    *("--num-gpu-blocks-override", "40"),  # 1248 tokens: less than two conversations
    *("--enable-prompt-tokens-details", "--shutdown-timeout", "20"),
)
OFFLOAD = {"cpu_bytes_to_use": "64MiB"}
LOADS_WEIGHTS = ("Starting to load model", "Loading safetensors", "Loading weights")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_checkpoint(tmp_path_factory.mktemp("model") / "small")


@dataclass(frozen=True)
class Pair:
    plain: Server
    forebay: Server


def _pair(stack: ExitStack, tmp_path_factory: pytest.TempPathFactory, model: str, **forebay: Any) -> Pair:
    """Started at the same time: most of the start is imports, on one core each."""
    plain = stack.enter_context(Server(model, tmp_path_factory.mktemp("plain"), *ARGUMENTS))
    other = stack.enter_context(Server(model, tmp_path_factory.mktemp("forebay"), *ARGUMENTS, **forebay))
    plain.wait_until_ready()
    other.wait_until_ready()
    return Pair(plain, other)


@pytest.fixture(scope="module")
def servers(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield _pair(stack, tmp_path_factory, model, offload=OFFLOAD)


class Client:
    def __init__(self, server: Server) -> None:
        from openai import OpenAI

        self.api = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def chat(self, messages: list[dict[str, str]], max_tokens: int = ANSWER) -> Any:
        return self.api.chat.completions.create(
            model="small", messages=messages, max_tokens=max_tokens, temperature=0
        )

    def complete(self, prompt: str, max_tokens: int = ANSWER) -> str:
        answer = self.api.completions.create(model="small", prompt=prompt, max_tokens=max_tokens, temperature=0)
        return str(answer.choices[0].text)


@dataclass
class Conversation:
    topic: str
    messages: list[dict[str, str]] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)  # by turn: tokens of the prompt, of them cached

    def say(self, client: Client) -> None:
        turn = len(self.messages) // 2
        said = f"turn {turn} about {self.topic}: " + " ".join(f"{self.topic}{turn}{i}" for i in range(12))
        self.messages.append({"role": "user", "content": said})
        answer = client.chat(self.messages)
        details = answer.usage.prompt_tokens_details
        self.sizes.append((answer.usage.prompt_tokens, (details and details.cached_tokens) or 0))
        self.messages.append({"role": "assistant", "content": answer.choices[0].message.content})

    @property
    def answers(self) -> list[str]:
        return [message["content"] for message in self.messages if message["role"] == "assistant"]


def _converse(server: Server) -> tuple[list[Conversation], list[str]]:
    """Two conversations take turns, and between any two turns others come, together as large as the device."""
    client = Client(server)
    conversations = [Conversation("harbour"), Conversation("granite")]
    others: list[str] = []
    for turn in range(TURNS):
        for conversation in conversations:
            conversation.say(client)
            prompts = [f"{conversation.topic} {turn} {i} " + "something else entirely " * 16 for i in range(3)]
            with ThreadPoolExecutor(len(prompts)) as at_once:
                others += at_once.map(client.complete, prompts)
    return conversations, others


def test_conversations_that_the_device_cannot_hold(servers: Pair) -> None:
    expected, others = _converse(servers.plain)
    hits = servers.forebay.metric("vllm:external_prefix_cache_hits_total")
    said, others_said = _converse(servers.forebay)

    assert [each.answers for each in said] == [each.answers for each in expected]
    assert others_said == others
    for each in expected:
        assert sum(cached for _, cached in each.sizes) < BLOCK * TURNS, "the device was large enough"
    for each in said:
        assert each.sizes[0][1] == 0
        for (before, _), (prompt, cached) in zip(each.sizes, each.sizes[1:], strict=False):
            # Everything up to here, the answer too, but for the answer's last token: that was never computed.
            assert cached == (before + ANSWER - 1) // BLOCK * BLOCK < prompt
    loaded = sum(cached for each in said for _, cached in each.sizes)
    assert servers.forebay.metric("vllm:external_prefix_cache_hits_total") - hits > 0.8 * loaded
    assert servers.plain.metric("vllm:external_prefix_cache_hits_total") == 0

    # Wrong bytes would have been noticed: what was said first decides what is answered last.
    messages = [dict(message) for message in expected[0].messages[:-1]]
    messages[0]["content"] = messages[0]["content"].replace("about", "above")
    assert Client(servers.plain).chat(messages).choices[0].message.content != expected[0].answers[-1]


def _counted(line: str) -> dict[str, float]:
    return {name: float(value) for name, value in re.findall(r"(\w+)=([\d.e-]+)", line.partition("metrics: ")[2])}


def test_counters_are_in_the_log(servers: Pair) -> None:
    client, text = Client(servers.forebay), "KV Transfer metrics: "
    for i in range(100):  # vLLM logs once a second, and only while there is something to do
        client.complete(f"number {i} " * 40)
        if any("stored_blocks" in line for line in servers.forebay.lines(text)):
            break
    lines = [_counted(line) for line in servers.forebay.lines(text)]
    assert sum(line.get("stored_blocks", 0) for line in lines) > 0
    assert sum(line.get("stored_bytes", 0) for line in lines) > 0
    # However many steps a line adds up, what it says of slots is how it is now.
    assert {line["slots"] for line in lines} == {512}
    assert all(line["slots_free"] + line["slots_filling"] + line["slots_cached"] <= 512 for line in lines)
    assert not servers.plain.lines(text)


def test_the_log_has_a_line_at_start_and_none_for_a_request(servers: Pair) -> None:
    Client(servers.forebay).complete("once more " * 40)
    # The statistics, which vLLM logs by itself, and what it was started with aside.
    said = [line.partition("forebay: ")[2] for line in servers.forebay.lines("forebay: ")]
    assert said == [
        "rank 0 has 512 slots of 131072 bytes (0.07 GB)",
        "slots=512 bytes_per_rank=67108864 ranks=1 mode=eager policy=lru verify=all layout=engine",
    ]
    assert not [line for line in servers.forebay.lines("forebay") if "WARNING" in line or "ERROR" in line]


def _warnings(server: Server) -> list[str]:
    return [line for line in server.lines("kv_load_failure_policy") if "WARNING" in line]


def test_a_policy_that_recomputes_is_not_warned_about(servers: Pair) -> None:
    assert not _warnings(servers.forebay)


def _begin_to_answer(server: Server, max_tokens: int) -> Iterator[Any]:
    """A stream of which the first part has arrived."""
    stream = iter(
        Client(server).api.completions.create(
            model="small", prompt="on and on " * 20, max_tokens=max_tokens, temperature=0, stream=True
        )
    )
    yield next(stream)
    yield from stream


def test_sigterm_ends_it_as_it_ends_vllm(servers: Pair) -> None:
    """In the middle of an answer, which is given to its end. The last test that asks these servers anything."""
    pair = (servers.plain, servers.forebay)
    answers = [_begin_to_answer(server, max_tokens=200) for server in pair]
    parts = [[next(answer)] for answer in answers]
    for server in pair:
        server.terminate()
    texts = [
        "".join(part.choices[0].text for part in [*first, *rest])
        for first, rest in zip(parts, answers, strict=True)
    ]
    assert servers.forebay.wait() == servers.plain.wait()
    assert texts[0] == texts[1]
    assert len(texts[0]) == 200
    assert not any(server.left_in_shared_memory() for server in pair)
    # vLLM leaves some of the sockets between its processes.
    assert servers.forebay.left_in_temporary_folder() <= servers.plain.left_in_temporary_folder()


def test_sigkill_leaves_nothing_with_a_name(model: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Host memory of Forebay has none, so it goes with its process."""
    with ExitStack() as stack:
        lazy = OFFLOAD | {"lazy_offload": True}
        pair = _pair(stack, tmp_path_factory, model, offload=lazy, load_failure_policy=None)
        [warning] = _warnings(pair.forebay)
        assert "a request whose load fails ends with an error; with 'recompute' it computes instead" in warning
        for server in (pair.plain, pair.forebay):
            answer = _begin_to_answer(server, max_tokens=700)
            next(answer)
            server.kill()
            assert server.wait() == -signal.SIGKILL
            assert not server.left_in_shared_memory()
        # vLLM leaves all its sockets.
        assert pair.forebay.left_in_temporary_folder() <= pair.plain.left_in_temporary_folder()


def test_a_misspelt_setting_ends_it_before_anything_is_loaded(model: str, tmp_path: Path) -> None:
    with Server(model, tmp_path, *ARGUMENTS, offload={"cpu_bytes_to_used": "64MiB"}) as server:
        assert server.process.wait(120) != 0  # ten seconds of imports, on cores that have nothing else to do
        assert server.lines("unknown key 'cpu_bytes_to_used'; did you mean 'cpu_bytes_to_use'?")
        assert not server.lines("EngineCore"), "an engine was started"
        for text in LOADS_WEIGHTS:
            assert not server.lines(text)
