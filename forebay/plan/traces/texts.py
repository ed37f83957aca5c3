"""Traces of texts: `timestamp, input, output, session_id`, and logs of OpenAI-style requests.

A log has a request a line, as it was sent (`messages`, or `prompt`) or inside of something else: under `request`,
`body` or `input`, or one in the other, perhaps as text, with the answer under `response`. Times may be numbers or
dates in ISO 8601.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from xxhash import xxh3_64_hexdigest

from forebay.amounts import counted
from forebay.errors import is_whole
from forebay.plan.traces.base import Record, Row, count, number
from forebay.plan.traces.clock import UNITS, seconds_of, unit_of
from forebay.plan.traces.lines import BadLineError, shown
from forebay.plan.traces.tokens import Tokenized, Tokens, prefixes_of

_TIMES = ("timestamp", "time", "created_at", "created")
_INSIDE = ("request", "body", "input")
_ANSWERS = ("response", "body")


class Texts:
    """Both kinds. What of a request is its prompt is written out as text; where that is the same, so is the id."""

    late_lines = 256

    def __init__(
        self,
        sample: Sequence[Record],
        name: str,
        tokens: Tokens,
        block_tokens: int,
        time_unit: str | None,
    ) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self._tokens = tokens
        first = next(_times(sample), None)
        self.seconds: float | None = None
        about_time = "no request has a time: they follow one another at once"
        if isinstance(first, str):
            self.seconds, about_time = 1.0, "timestamps are dates"
        elif first is not None:
            unit, about_time = unit_of(first, "s", time_unit)
            self.seconds = UNITS[unit]
        self._dates = isinstance(first, str)
        self.notes = [tokens.note, f"blocks of {counted(block_tokens, 'token')}", about_time]

    def row(self, record: Record, place: int) -> Row:
        time = self.time(record)
        request = request_of(record)
        if request is None:
            raise BadLineError("a request with messages, prompt or input", shown(record))
        prompt = self._prompt(request)
        return Row(time, prompt.tokens, self._output_tokens(record), prompt.prefixes)

    def time(self, record: Record) -> float:
        if self.seconds is None:
            return 0
        field = _time_field(record)
        if field is None:
            raise BadLineError("a timestamp", shown(record))
        holder, name = field
        value = holder[name]
        if self._dates:
            time = seconds_of(value) if isinstance(value, str) else None
            if time is None:
                raise BadLineError(f"{name} as a date and time", shown(value))
            return time
        return number(holder, name)

    def _prompt(self, request: Record) -> Tokenized:
        match request:
            case {"messages": list(messages)}:
                return self._tokens.prefixes("".join(_written(request.get("tools"), messages)))
            case {"prompt": str(text)} | {"input": str(text)}:
                return self._tokens.prefixes(text)
            case {"input": list(messages)}:
                return self._tokens.prefixes("".join(_written(None, messages)))
            case {"prompt": list(ids)} if all(map(is_whole, ids)):
                return Tokenized(len(ids), prefixes_of(ids, self.block_tokens))
        known = next(field for field in ("messages", "prompt", "input") if field in request)
        raise BadLineError(f"{known} as {'a list' if known == 'messages' else 'text'}", shown(request[known]))

    def _output_tokens(self, record: Record) -> int:
        """As the answer says, else by its text, else none."""
        answers = [record, *_inside(record, _ANSWERS)]
        for answer in answers:
            usage = answer.get("usage")
            if isinstance(usage, Mapping):
                for field in ("completion_tokens", "output_tokens"):
                    if usage.get(field) is not None:
                        return count(usage, field)
        for answer in answers:
            text = answer.get("output")
            if isinstance(text, str):
                return self._tokens.count(text)
            if isinstance(choices := answer.get("choices"), list):
                return self._tokens.count("".join(map(_chosen, choices)))
        return 0


def request_of(record: Record) -> Record | None:
    """The record itself or what is inside of it, whichever has a prompt."""
    for each in chain((record,), _inside(record, _INSIDE)):
        if "messages" in each or "prompt" in each or not isinstance(each.get("input", {}), Mapping):
            return each
    return None


def _inside(record: Record, fields: Sequence[str], depth: int = 2) -> Iterator[Record]:
    """What lies under these fields, and under the same fields of that. Logs often have it as text."""
    for field in fields:
        value = record.get(field)
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, Mapping):
            yield value
            if depth > 1:
                yield from _inside(value, fields, depth - 1)


def _time_field(record: Record) -> tuple[Record, str] | None:
    """When it was sent, if that is known; else when its answer was made."""
    for holder in chain((record,), _inside(record, _INSIDE), _inside(record, _ANSWERS)):
        for name in _TIMES:
            if holder.get(name) is not None:
                return holder, name
    return None


def _times(sample: Sequence[Record]) -> Iterator[float | str]:
    """Those of the first lines that are something like a time."""
    for record in sample:
        field = _time_field(record)
        if field is not None:
            value = field[0][field[1]]
            if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
                yield value


def _written(tools: Any, messages: Sequence[Any]) -> Iterator[str]:
    """A conversation as text, in the order in which chat templates put it."""
    if tools:
        yield f"<|tools|>\n{_as_json(tools)}\n"
    for message in messages:
        if not isinstance(message, Mapping):
            raise BadLineError("messages as objects", shown(message))
        yield f"<|{message.get('role', '')}|>\n"
        yield from _contents(message.get("content"))
        if message.get("tool_calls"):
            yield _as_json(message["tool_calls"])
        yield "\n"


def _contents(content: Any) -> Iterator[str]:
    match content:
        case None:
            return
        case str():
            yield content
        case list():
            for part in content:
                if isinstance(part, str):
                    yield part
                elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    yield part["text"]
                else:
                    # An image or a sound: other bytes make another prefix, but its tokens are not known.
                    yield f"<|{xxh3_64_hexdigest(_as_json(part).encode('utf-8', 'surrogatepass'))}|>"
        case _:
            raise BadLineError("content as text or as a list of parts", shown(content))


def _chosen(choice: Any) -> str:
    if not isinstance(choice, Mapping):
        return ""
    message = choice.get("message") or choice
    if not isinstance(message, Mapping):
        return ""
    said = [message.get(field) for field in ("reasoning_content", "content", "text")]
    called = message.get("tool_calls")
    return "".join(each for each in said if isinstance(each, str)) + (_as_json(called) if called else "")


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise BadLineError("something less deep", shown(value)) from None
