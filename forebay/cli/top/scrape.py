"""Where a server is, and how it is asked for its metrics: a scrape ends in a reading or in a problem."""

from __future__ import annotations

import re
import ssl
import textwrap
from collections.abc import Callable, Sequence
from functools import cache
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead, RemoteDisconnected
from queue import SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic
from typing import NamedTuple, Self
from urllib.parse import quote, urlsplit

from forebay import __version__
from forebay.cli.top.exposition import ExpositionError, samples
from forebay.cli.top.reading import Problem, Reading, read
from forebay.errors import ConfigError

TIMEOUT_S = 10.0
_MOST_BYTES = 64 << 20  # a page of vLLM has 70 KB for each engine
_CHUNK_BYTES = 1 << 16
_LONGEST = 300
_PATH = "/metrics"
_EXPECTED = "the address of a server, such as http://localhost:8000"
_HEADERS = {
    "Accept": "text/plain;version=0.0.4",
    "Connection": "close",
    "User-Agent": f"forebay-top/{__version__}",
}


class Address(NamedTuple):
    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, text: str) -> Address:
        """`localhost:8000`, `http://localhost:8000`, or the page itself. Raises ConfigError."""
        wrong = ConfigError("URL", text, _EXPECTED)
        if not text.isprintable() or " " in text:
            raise wrong
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError as error:
            raise wrong from error
        if parts.scheme not in ("http", "https") or not host or parts.username is not None or port == 0:
            raise wrong
        path = parts.path.rstrip("/")
        if not path.endswith(_PATH):
            path += _PATH
        path = quote(path, safe="/%:@!$&'()*+,;=~")
        if parts.query:
            path += "?" + quote(parts.query, safe="/%:@!$&'()*+,;=~?")
        secure = parts.scheme == "https"
        return cls(secure, host, port or (443 if secure else 80), path)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}{self.path.removesuffix(_PATH)}"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.path}"


def scrape(address: Address, timeout_s: float = TIMEOUT_S) -> Reading | Problem:
    """Asks once. No proxy is used and no redirect is followed: the numbers are those of the server named."""
    connection: HTTPConnection
    if address.secure:
        connection = HTTPSConnection(address.host, address.port, timeout=timeout_s, context=_trusted())
    else:
        connection = HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request("GET", address.path, headers=_HEADERS)
        response = connection.getresponse()
        at_s = monotonic()  # vLLM makes the whole page, then sends it
        if response.status != 200:
            to = response.getheader("Location")
            text = f"HTTP {response.status} {response.reason}".strip() + (f", to {to}" if to else "")
            return _problem(f"{address.url} answers {text}", answered=True)
        page = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            page += chunk
            if len(page) > _MOST_BYTES or monotonic() > at_s + timeout_s:
                return _problem(f"{address.url} does not come to an end", answered=True)
        if response.length:  # of what was announced, not sent
            raise IncompleteRead(bytes(page), response.length)
        return read(samples(page.decode("utf-8", "replace")), at_s)
    except ExpositionError as error:
        return _problem(f"{address.url} is not a page of metrics: {error}", answered=True)
    except (RemoteDisconnected, IncompleteRead):
        return _problem("the connection ended before the answer did", answered=False)
    except HTTPException as error:
        said = f"{type(error).__name__}: {error}"
        return _problem(f"what is there does not speak HTTP: {said}", answered=True)
    except (OSError, ValueError) as error:
        return _problem(_why(error, timeout_s), answered=False)
    finally:
        connection.close()


@cache
def _trusted() -> ssl.SSLContext:
    """Read once: certificates are many."""
    return ssl.create_default_context()


def _problem(text: str, *, answered: bool) -> Problem:
    """In one line that is not endless: parts of it may be words of whatever is there."""
    return Problem(monotonic(), textwrap.shorten(text, _LONGEST, placeholder="..."), answered)


def _why(error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {timeout_s:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or str(error)).replace('_', ' ').lower()}"
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    text = re.sub(r"^\[Errno -?\d+\] ", "", text)
    return text[0].lower() + text[1:]


class Answer(NamedTuple):
    server: int
    """Which of the addresses, from 0."""
    outcome: Reading | Problem | BaseException
    """An exception is a bug here. It is raised where somebody sees it."""


class Scrapers:
    """A thread for each server, so that a slow one holds up no other. Each asks once an interval, and never again
    before it has an answer."""

    def __init__(
        self,
        addresses: Sequence[Address],
        interval_s: float,
        *,
        timeout_s: float = TIMEOUT_S,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """`wake` is called from these threads whenever there is a new answer."""
        self._addresses = addresses
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._wake = wake
        self._ended = Event()
        self._waking = Lock()  # nobody is woken who has left
        self._asked_s: list[float | None] = [None] * len(addresses)
        self.answers: SimpleQueue[Answer] = SimpleQueue()
        for index, address in enumerate(addresses):
            # A daemon: one that waits for a server does not keep the program from ending.
            Thread(target=self._run, args=(index,), name=f"scrape {address.url}", daemon=True).start()

    def waiting_s(self, now_s: float) -> list[float]:
        """For how long each server has not answered what it was asked; 0 for one that has."""
        return [0.0 if asked is None else max(0.0, now_s - asked) for asked in self._asked_s]

    def _run(self, index: int) -> None:
        outcome: Reading | Problem | BaseException
        while not self._ended.is_set():
            asked = self._asked_s[index] = monotonic()
            try:
                outcome = scrape(self._addresses[index], self._timeout_s)
            except BaseException as error:  # noqa: BLE001 - raised where somebody waits for it
                outcome = error
            self._asked_s[index] = None
            self.answers.put(Answer(index, outcome))
            with self._waking:
                if not self._ended.is_set():
                    self._wake()
            self._ended.wait(max(0.0, asked + self._interval_s - monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with self._waking:
            self._ended.set()
