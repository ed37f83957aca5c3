"""A scrape ends in a reading or in one line that says why not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from forebay.cli.top.board import Board
from forebay.cli.top.exposition import samples
from forebay.cli.top.reading import EngineId, Problem, Reading, read
from forebay.cli.top.scrape import Address, Scrapers, scrape
from forebay.errors import ConfigError
from tests.cli.top.fake import GAUGES, FakeServer, engine_lines, labels, page


@pytest.mark.parametrize(
    ("text", "url", "name"),
    [
        ("localhost:8000", "http://localhost:8000/metrics", "localhost:8000"),
        ("http://localhost:8000", "http://localhost:8000/metrics", "localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000/metrics", "localhost:8000"),
        ("http://localhost:8000/metrics/", "http://localhost:8000/metrics", "localhost:8000"),
        ("https://models.example/a/metrics", "https://models.example:443/a/metrics", "models.example:443/a"),
        ("models.example/a?key=ä b".replace(" ", "+"), "http://models.example:80/a/metrics?key=%C3%A4+b", None),
        ("[::1]:8000", "http://[::1]:8000/metrics", "[::1]:8000"),
        ("HTTP://Localhost:8000#top", "http://localhost:8000/metrics", "localhost:8000"),
    ],
)
def test_addresses_as_people_write_them(text: str, url: str, name: str | None) -> None:
    address = Address.parse(text)
    assert address.url == url
    assert name is None or address.name == name


@pytest.mark.parametrize(
    "text",
    [
        *("", "http://", "ftp://localhost:8000", "http://localhost:port", "http://localhost:70000", "localhost:0"),
        *(
            "http://me:secret@localhost:8000",
            "http://local host:8000",
            "http://[::1",
            "a\nb",
            "http://a..b",
            "--x y",
        ),
    ],
)
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Address.parse(text)
    assert str(raised.value) == (
        f"URL: expected the address of a server, such as http://localhost:8000, got {text!r}"
    )


# --- what a page says ---------------------------------------------------------------------------------


def test_every_engine_has_its_numbers() -> None:
    text = page(
        engine_lines({"hit_tokens": 5}, engine="10", latencies={"load_latency_s": {0.005: 3, 0.01: 1}}),
        engine_lines({"hit_tokens": 7}, gauges={}, engine="9"),
        started_at=1.7e9,
    )
    reading = read(samples(text), at_s=3.0)
    assert isinstance(reading, Reading)
    assert (reading.at_s, reading.started_at) == (3.0, 1.7e9)
    nine, ten = EngineId("small", "9"), EngineId("small", "10")
    assert list(reading.engines) == [nine, ten]
    assert reading.engines[nine].counters["hit_tokens"] == 7
    assert reading.engines[nine].gauges == {}
    assert reading.engines[ten].counters["hit_tokens"] == 5
    assert reading.engines[ten].gauges == GAUGES
    buckets = reading.engines[ten].counters
    assert [buckets["load_latency_s", bound] for bound in (0.0025, 0.005, 0.01, float("inf"))] == [0, 3, 4, 4]


def test_series_that_other_labels_tell_apart_are_added_up() -> None:
    lines = [f"forebay_evictions_total{{{labels(engine='0', model_name='small', pid=pid)}}} 2.0" for pid in "12"]
    reading = read(samples("\n".join(lines)), 0.0)
    assert isinstance(reading, Reading)
    assert reading.engines[EngineId("small", "0")].counters == {"evictions": 4}


# --- what is at an address ----------------------------------------------------------------------------


def _problem(answer: str | bytes, timeout_s: float = 10.0) -> Problem:
    with FakeServer(lambda: answer) as server:
        outcome = scrape(Address.parse(server.url), timeout_s)
    assert isinstance(outcome, Problem)
    assert "\n" not in str(outcome)
    return outcome


def test_a_server_with_forebay_is_read() -> None:
    with FakeServer(lambda: page(engine_lines({"lookups": 3}))) as server:
        reading = scrape(Address.parse(server.url))
    assert isinstance(reading, Reading)
    assert reading.engines[EngineId("small", "0")].counters["lookups"] == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("vllm:num_requests_running 1.0\n", "this vLLM runs without Forebay: see forebay config"),
        ("python_info 1.0\n", "none of Forebay's; a vLLM with --disable-log-stats has none"),
        ("", "none of Forebay's"),
        ("<!doctype html>\n<p>hello", "is not a page of metrics: line 1: expected a name"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", "answers HTTP 503 Service Unavailable"),
        (b"HTTP/1.1 302 Found\r\nLocation: /login\r\n\r\n", "answers HTTP 302 Found, to /login"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not speak HTTP: BadStatusLine: SSH-2.0-OpenSSH_9.2"),
    ],
)
def test_what_answers_without_metrics_of_forebay(answer: str | bytes, said: str) -> None:
    problem = _problem(answer)
    assert problem.answered
    assert str(problem).startswith("no metrics: ")
    assert said in problem.text


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nforebay_lookups_total 1\n"]
)
def test_an_answer_that_ends_too_early_is_no_reading(answer: bytes) -> None:
    """Half a number would look like a restart."""
    problem = _problem(answer)
    assert str(problem) == "down: the connection ended before the answer did"


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        outcome = scrape(Address.parse(f"127.0.0.1:{taken.getsockname()[1]}"))
    assert str(outcome) == "down: connection refused"


def test_a_name_that_nobody_knows() -> None:
    outcome = scrape(Address.parse("http://nobody.invalid:8000"))
    assert isinstance(outcome, Problem)
    assert not outcome.answered


def test_no_answer_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        outcome = scrape(Address.parse(f"127.0.0.1:{silent.getsockname()[1]}"), timeout_s=0.2)
    assert str(outcome) == "down: no answer in 0.2 s"


def test_tls_where_there_is_none() -> None:
    with FakeServer(lambda: page(engine_lines())) as server:
        outcome = scrape(Address.parse(server.url.replace("http:", "https:")))
    assert isinstance(outcome, Problem)
    assert str(outcome).startswith("down: TLS: ")


def test_a_proxy_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with FakeServer(lambda: page(engine_lines())) as server:
        assert isinstance(scrape(Address.parse(server.url)), Reading)


# --- again and again ----------------------------------------------------------------------------------


class Held:
    """A page that comes when it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def page(self) -> str:
        self.asked.set()
        self.let_go.wait(60)
        return page(engine_lines())


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.let_go.set()


def test_a_slow_server_holds_up_no_other_and_is_not_asked_again(held: Held) -> None:
    with FakeServer(held.page) as slow, FakeServer(lambda: page(engine_lines())) as quick:
        addresses = [Address.parse(server.url) for server in (slow, quick)]
        with Scrapers(addresses, 0.01) as scrapers:
            assert held.asked.wait(30)
            answers = [scrapers.answers.get(timeout=30) for _ in range(20)]
            assert {answer.server for answer in answers} == {1}
            assert slow.scrapes == 1
            assert scrapers.waiting_s(float("inf"))[0] > 0
            held.let_go.set()
            while scrapers.answers.get(timeout=30).server != 0:
                pass


def test_whoever_waits_is_woken_by_every_answer() -> None:
    woken = threading.Semaphore(0)
    with (
        FakeServer(lambda: page(engine_lines())) as server,
        Scrapers([Address.parse(server.url)], 0.01, wake=woken.release) as scrapers,
    ):
        for _ in range(3):
            assert woken.acquire(timeout=30)
            assert isinstance(scrapers.answers.get(timeout=30).outcome, Reading)


def test_whoever_has_left_is_not_woken(held: Held) -> None:
    """What it waited on may be closed by then, and its number be that of another file."""
    woken = threading.Semaphore(0)
    with FakeServer(held.page) as server:
        with Scrapers([Address.parse(server.url)], 0.01, wake=woken.release) as scrapers:
            assert held.asked.wait(30)
        held.let_go.set()
        assert isinstance(scrapers.answers.get(timeout=30).outcome, Reading)
        for thread in threading.enumerate():
            if thread.name == f"scrape {server.url}/metrics":
                thread.join(30)
        assert not woken.acquire(blocking=False)
        assert server.scrapes == 1, "it was asked after the end"


def test_what_should_not_happen_is_raised_where_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(address: Address, timeout_s: float) -> Reading:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("forebay.cli.top.scrape.scrape", fails)
    address = Address.parse("localhost:8000")
    with Scrapers([address], 3600) as scrapers:
        answer = scrapers.answers.get(timeout=30)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Board([address], 2.0).take(answer)
