"""Hits over time, in a bounded number of parts however long the trace is."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.plan.results import Moment

_MOST = 96


class Moments:
    """Parts of so many requests each; when there are too many parts, two become one."""

    def __init__(self) -> None:
        self._parts: list[Moment] = []
        self._width = 1
        self._in_last = 0

    def add(self, request: Moment) -> None:
        """The next request, as a part of its own."""
        if self._parts and self._in_last < self._width:
            self._parts[-1] = _joined(self._parts[-1], request)
            self._in_last += 1
            return
        if len(self._parts) == _MOST:
            pairs = zip(self._parts[::2], self._parts[1::2], strict=True)
            self._parts = [_joined(*pair) for pair in pairs]
            self._width *= 2
        self._parts.append(request)
        self._in_last = 1

    def all(self) -> Sequence[Moment]:
        return tuple(self._parts)


def _joined(first: Moment, second: Moment) -> Moment:
    return Moment(
        first.time_s,
        first.input_tokens + second.input_tokens,
        first.device_tokens + second.device_tokens,
        first.host_tokens + second.host_tokens,
        second.occupied_slots,
        first.evictions + second.evictions,
    )
