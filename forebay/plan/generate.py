"""Traffic made up from a seed, in the shape of Mooncake's traces: for tests, and for whoever has no trace yet.

    chat      conversations over a few shared system prompts; each turn repeats all before it
    agent     tasks that go step by step without long pauses: long shared instructions, short answers, quick growth
    shared    one request each, over a few long documents, some asked about far more often than others

The same arguments give the same lines, byte for byte, on every version of Python: only `Random.random()` is used,
whose numbers are promised not to change, and only arithmetic and square roots, which are exact everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from math import sqrt
from random import Random
from typing import Any

from forebay.amounts import counted
from forebay.errors import ConfigError, UnknownKeyError, is_whole

_MS = 1000
_MOST = 1e9
"""Of times and rates: more is no traffic, and its arithmetic would overflow."""
_MOST_WHOLE = 10**7
"""Of lengths and counts, and of the blocks of all prefixes together, which are kept in memory."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a kind of traffic is like. Lengths are in tokens; each is the middle of what is drawn."""

    sessions_per_s: float
    """New conversations, tasks or questions."""
    turns: int
    """Requests of a session, about."""
    pause_s: float
    """From the end of an answer to the next request of its session."""
    prefixes: int
    """System prompts, instructions or documents that sessions begin with. The first is the most popular."""
    prefix_tokens: int
    input_tokens: int
    """That each turn adds."""
    output_tokens: int
    tokens_per_s: float = 50.0
    """How fast an answer is given."""
    max_tokens: int = 128_000
    """A session that would pass it ends."""


KINDS: Mapping[str, Traffic] = {
    "chat": Traffic(
        sessions_per_s=0.5,
        turns=5,
        pause_s=30.0,
        prefixes=4,
        prefix_tokens=1000,
        input_tokens=200,
        output_tokens=300,
    ),
    "agent": Traffic(
        sessions_per_s=0.05,
        turns=20,
        pause_s=2.0,
        prefixes=2,
        prefix_tokens=6000,
        input_tokens=800,
        output_tokens=150,
    ),
    "shared": Traffic(
        sessions_per_s=2.0,
        turns=1,
        pause_s=0.0,
        prefixes=100,
        prefix_tokens=8000,
        input_tokens=100,
        output_tokens=200,
    ),
}


@dataclass(slots=True)
class _Session:
    ids: list[int]
    """Of the whole blocks of what was said so far."""
    tokens: int
    turns_left: int


def generate(
    kind: str, *, requests: int, seed: int = 0, block_tokens: int = 16, **changes: Any
) -> Iterator[dict[str, Any]]:
    """So many requests, in the order of time: `timestamp` in milliseconds, `input_length`, `output_length` and
    `hash_ids`, one for each `block_tokens` tokens. `changes` are fields of Traffic that differ from KINDS[kind].

    Raises ConfigError at once. Memory grows with the sessions that are alive, not with the requests.
    """
    traffic = _checked(kind, requests, seed, block_tokens, changes)
    return _requests(traffic, requests, Random(seed).random, block_tokens)


def as_lines(requests: Iterator[dict[str, Any]]) -> Iterator[str]:
    """As a file has them, each with its line end."""
    for request in requests:
        yield json.dumps(request, separators=(", ", ": ")) + "\n"


def _requests(
    traffic: Traffic, requests: int, draw: Callable[[], float], block_tokens: int
) -> Iterator[dict[str, Any]]:
    ids = _Ids()
    prefixes = [
        _Session(ids.new(tokens // block_tokens), tokens, 0)
        for tokens in (_length(traffic.prefix_tokens, draw) for _ in range(traffic.prefixes))
    ]
    due: list[tuple[int, int, _Session]] = []  # no two have the same number
    next_start_ms, begun = 0, 0
    for _ in range(requests):
        if not due or next_start_ms <= due[0][0]:
            prefix = prefixes[_popular(len(prefixes), draw)]
            session = _Session([*prefix.ids], prefix.tokens, _turns(traffic.turns, draw))
            time_ms, number = next_start_ms, begun
            begun += 1
            next_start_ms += _wait_ms(1 / traffic.sessions_per_s, draw)
        else:
            time_ms, number, session = heappop(due)
        output_tokens = _length(traffic.output_tokens, draw)
        _say(session, _length(traffic.input_tokens, draw), ids, block_tokens)
        tail = ids.new(1) if session.tokens % block_tokens else []
        yield {
            "timestamp": time_ms,
            "input_length": session.tokens,
            "output_length": output_tokens,
            "hash_ids": [*session.ids, *tail],
        }
        session.turns_left -= 1
        if session.turns_left > 0 and session.tokens + output_tokens < traffic.max_tokens:
            _say(session, output_tokens, ids, block_tokens)
            answered_ms = int(output_tokens / traffic.tokens_per_s * _MS)
            heappush(due, (time_ms + answered_ms + _wait_ms(traffic.pause_s, draw), number, session))


class _Ids:
    """A number for each new block, as Mooncake has them."""

    def __init__(self) -> None:
        self._next = 0

    def new(self, count: int) -> list[int]:
        first, self._next = self._next, self._next + count
        return list(range(first, self._next))


def _say(session: _Session, tokens: int, ids: _Ids, block_tokens: int) -> None:
    session.tokens += tokens
    session.ids += ids.new(session.tokens // block_tokens - len(session.ids))


def _length(middle: int, draw: Callable[[], float]) -> int:
    """From half of it to several times as much, mostly less than twice: long ones are rare."""
    x = draw()
    return max(1, int(middle * (0.5 + x / sqrt(1.02 - x))))


def _turns(middle: int, draw: Callable[[], float]) -> int:
    return 1 + int((2 * middle - 1) * draw())


def _wait_ms(middle_s: float, draw: Callable[[], float]) -> int:
    """Mostly short, sometimes three times as long: bursts, and pauses between them."""
    x = draw()
    return int(3 * x * x * middle_s * _MS)


def _popular(count: int, draw: Callable[[], float]) -> int:
    """The first few most of the time, but any."""
    x = draw()
    return int(x * x * x * count)


def _checked(kind: str, requests: int, seed: int, block_tokens: int, changes: Mapping[str, Any]) -> Traffic:
    if kind not in KINDS:
        raise ConfigError("kind", kind, f"one of {', '.join(KINDS)}")
    for name, value, least in (("requests", requests, 1), ("seed", seed, 0), ("block_tokens", block_tokens, 1)):
        if not is_whole(value) or value < least:
            raise ConfigError(name, value, f"a whole number of at least {least}")
    known = {each.name: each for each in fields(Traffic)}
    for name, value in changes.items():
        if name not in known:
            raise UnknownKeyError(name, known, f"traffic of kind {kind!r}")
        if known[name].type == "int":
            if not is_whole(value) or not 1 <= value <= _MOST_WHOLE:
                raise ConfigError(name, value, f"a whole number from 1 to {_MOST_WHOLE:,}")
        else:
            lowest, shown = (1 / _MOST, "1e-9") if name.endswith("per_s") else (0.0, "0")
            if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= _MOST:
                raise ConfigError(name, value, f"a number from {shown} to 1e9")
    traffic = replace(KINDS[kind], **changes)
    if traffic.prefixes * traffic.prefix_tokens // block_tokens > _MOST_WHOLE:
        name = "prefixes" if "prefixes" in changes else "prefix_tokens"
        size = counted(block_tokens, "token")
        wanted = f"prefixes of together at most {_MOST_WHOLE:,} blocks of {size}"
        raise ConfigError(name, getattr(traffic, name), wanted)
    return traffic
