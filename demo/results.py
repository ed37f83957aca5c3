"""What the three runs took, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.amounts import as_columns, percent

TITLES = {"none": "no offload", "eager": "eager", "lazy": "lazy"}


@dataclass(frozen=True)
class Answer:
    session: int
    turn: int
    prompt_tokens: int
    cached_tokens: int  # on the device or from the host
    ttft_s: float
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Run:
    name: str
    answers: tuple[Answer, ...]
    loaded_tokens: int
    total_s: float
    versions: dict[str, str]

    @property
    def computed_tokens(self) -> int:
        return sum(each.prompt_tokens - each.cached_tokens for each in self.answers)

    @property
    def share_cached(self) -> float:
        return sum(each.cached_tokens for each in self.answers) / sum(each.prompt_tokens for each in self.answers)

    def ttft_s(self, turns: Callable[[int], bool] = lambda turn: True) -> list[float]:
        return [each.ttft_s for each in self.answers if turns(each.turn)]

    @property
    def repeat_ttft_s(self) -> list[float]:
        """Of the turns whose prompt was there before, but for the newest question."""
        return self.ttft_s(lambda turn: turn > 0)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the values that so many percent of them do not exceed."""
    if not values:
        raise ValueError("no values, no percentile")
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def equal_answers(run: Run, reference: Run) -> float:
    """The share of answers that are the same, token by token."""
    pairs = zip(run.answers, reference.answers, strict=True)
    return sum(one.tokens == other.tokens for one, other in pairs) / len(reference.answers)


def gain(run: Run, reference: Run) -> float:
    """How many times lower the median TTFT is, on repeat turns."""
    return percentile(reference.repeat_ttft_s, 50) / percentile(run.repeat_ttft_s, 50)


def rows(runs: Sequence[Run]) -> list[list[str]]:
    """A label and a value for each run; the first run is the reference. The first row has their names."""
    first = runs[0]

    def row(label: str, value: Callable[[Run], str]) -> list[str]:
        return [label, *map(value, runs)]

    return [
        row("", lambda run: TITLES[run.name]),
        row("prefill tokens computed", lambda run: f"{run.computed_tokens:,}"),
        row("tokens loaded from the host", lambda run: f"{run.loaded_tokens:,}"),
        row("share of prompt tokens cached", lambda run: percent(run.share_cached)),
        row("TTFT p50, first turn", lambda run: _ms(percentile(run.ttft_s(lambda turn: turn == 0), 50))),
        row("TTFT p50, repeat turns", lambda run: _ms(percentile(run.repeat_ttft_s, 50))),
        row("TTFT p99, repeat turns", lambda run: _ms(percentile(run.repeat_ttft_s, 99))),
        row("total time of all chats", lambda run: f"{run.total_s:.1f} s"),
        row("answers equal", lambda run: "reference" if run is first else percent(equal_answers(run, first))),
    ]


def as_text(table: Sequence[Sequence[str]]) -> str:
    return as_columns(table, least=10)


def verdict(runs: Sequence[Run]) -> str:
    gains = ", ".join(f"{_times(gain(run, runs[0]))} with {run.name}" for run in runs[1:])
    return f"TTFT p50 on repeat turns: {gains}."


def _times(factor: float) -> str:
    return f"{factor:.1f} x lower" if factor >= 1 else f"{1 / factor:.1f} x higher"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
