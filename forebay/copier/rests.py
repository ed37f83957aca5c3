"""When the copier's thread had better not run."""

from __future__ import annotations

from time import monotonic

_MOST_S = 0.05
"""As long as a launch takes on a slow processor. The bus should not stand still for longer."""


class Rests:
    """The engine's thread begins and ends them, the copier's asks how long. If it has something to give it is held
    up, and that has an end, in one rest or in several: then it goes on until it has caught up, which is when the
    device has all that it may be given."""

    def __init__(self) -> None:
        self._until_s = 0.0
        self._held_up_since_s: float | None = None

    def begin(self) -> None:
        self._until_s = monotonic() + _MOST_S

    def end(self) -> None:
        self._until_s = 0.0

    @property
    def left_s(self) -> float:
        now = monotonic()
        left_s = self._until_s - now
        if self._held_up_since_s is not None:
            left_s = min(left_s, self._held_up_since_s + _MOST_S - now)
        return max(0.0, left_s)

    @property
    def holds_up(self) -> bool:
        return self._held_up_since_s is not None

    def hold_up(self) -> None:
        if self._held_up_since_s is None:
            self._held_up_since_s = monotonic()

    def caught_up(self) -> None:
        self._held_up_since_s = None
