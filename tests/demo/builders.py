"""Runs that nobody ran."""

from __future__ import annotations

from demo.results import Answer, Run


def make_run(
    name: str, *ttft_s: float, sessions: int = 2, cached: int = 0, tokens: tuple[int, ...] = (7, 8)
) -> Run:
    """So many seconds to the first token in each turn, of all sessions."""
    answers = [
        Answer(
            session,
            turn,
            prompt_tokens=100,
            cached_tokens=cached if turn else 0,
            ttft_s=seconds,
            tokens=tokens,
            text="ab",
        )
        for turn, seconds in enumerate(ttft_s)
        for session in range(sessions)
    ]
    return Run(name, tuple(answers), loaded_tokens=cached * sessions, total_s=12.34, versions={"vLLM": "1.2.3"})


def make_runs() -> list[Run]:
    return [
        make_run("none", 1.0, 1.2, 1.4),
        make_run("eager", 1.1, 0.1, 0.2, cached=96),
        make_run("lazy", 1.0, 0.3, 0.3, cached=96),
    ]
