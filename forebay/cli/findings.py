"""What a command has found: of which kind, how bad, why it matters and what to type."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

_COLUMNS = 80
_COLOURS = {"ok": 32, "note": 36, "warning": 33, "error": 31}


class Severity(IntEnum):
    OK = 0
    NOTE = 1  # good to know
    WARNING = 2  # it works, but slower, smaller or less safe than it could
    ERROR = 3  # the engine does not start, or nothing is offloaded

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Finding:
    id: str
    severity: Severity
    what: str
    why: str
    type: str
    """The command or setting, as it has to be typed. Empty where nothing is to be done."""


class _Blanks(dict[str, str]):
    """What stands in a text for values that are not known: their names, in capitals."""

    def __missing__(self, name: str) -> str:
        return name.upper().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Kind:
    """A finding before it is found: texts with names in braces for what only the machine knows."""

    id: str
    severity: Severity
    what: str
    why: str
    type: str = ""

    def found(self, **values: object) -> Finding:
        what, kind = (text.format(**values) for text in (self.what, self.type))
        return Finding(self.id, self.severity, what, self.why, kind)

    def row(self) -> str:
        """Its line in docs/cli.md. Braces of JSON are doubled in texts; here they are as they are found."""
        what, to_do = (text.format_map(_Blanks()) for text in (self.what, self.type))
        cells = (f"`{self.id}`", str(self.severity), what, self.why, f"`{to_do}`" if to_do else "")
        escaped = " | ".join(cell.replace("|", r"\|") for cell in cells)
        return f"| {escaped} |"


def worst(findings: Iterable[Finding]) -> Severity:
    return max((each.severity for each in findings), default=Severity.OK)


def as_json(findings: Iterable[Finding]) -> str:
    rows = [
        {"id": each.id, "severity": str(each.severity), "what": each.what, "why": each.why, "type": each.type}
        for each in findings
    ]
    return json.dumps(rows, indent=1)


def as_text(findings: list[Finding], *, colour: bool = False) -> str:
    """Two columns and the text. Why and what to type follow below it, unless all is well."""
    width = max((len(each.id) for each in findings), default=0)
    lines = []
    for each in findings:
        severity = f"{each.severity!s:<7}"
        # Colour is added last: the codes take no room on the screen, but count as letters.
        first, *rest = _wrapped(f"{severity}  {each.id:<{width}}  ", each.what)
        if colour:
            first = f"\033[{_COLOURS[str(each.severity)]}m{severity}\033[0m{first[len(severity) :]}"
        lines += [first, *rest]
        if each.severity is not Severity.OK:
            lines += _wrapped("    why:  ", each.why)
            # Never wrapped: it is to be copied.
            lines += [f"    type: {each.type}"] if each.type else []
    return "\n".join([*lines, "", _summary(findings)])


def _wrapped(begin: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=begin,
        subsequent_indent=" " * len(begin),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(findings: list[Finding]) -> str:
    counts = [
        f"{number} {severity}{'s' if number > 1 else ''}"
        for severity in reversed(Severity)
        if severity and (number := sum(each.severity is severity for each in findings))
    ]
    return ", ".join(counts) or "all is well"
