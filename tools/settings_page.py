"""Writes the tables of docs/configuration.md from the dataclasses that hold the settings.

    .venv/bin/python tools/settings_page.py           # writes the page
    .venv/bin/python tools/settings_page.py --check   # only says whether it would change

What a setting means is the text below its field. Its default is what comes out if nothing is given.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from forebay.config import Mode, OffloadConfig
from forebay.copier.faults import InjectedFaults
from forebay.settings import CORE_EXAMPLES, ConnectorSettings
from tools import pages

PAGE = pages.ROOT / "docs" / "configuration.md"

MORE = {
    "lazy_offload": "#which-mode",
    "mode": "#which-mode",
    "eviction_policy": "adding-a-policy.md",
    "verify": "#verified-loads",
    "block_layout": "#block-layout",
    "inject_faults": "#faults-on-demand",
    "capacity_bytes": "#sizes",
    "cpu_bytes_to_use": "#sizes",
    "load_deadline_s": "differences.md#older-releases",
    "record_trace": "traces.md#recording",
}
"""Where the page says more about a setting."""


def filled(page: str) -> str:
    """The page with every table as it should be."""
    core = ["setting", "default", "meaning"]
    return pages.fill(
        page,
        {
            "connector": pages.table(["key", "default", "meaning", "example"], _connector_rows()),
            "core": pages.table(core, _rows(OffloadConfig)),
            "faults": pages.table(["key", *core[1:]], _rows(InjectedFaults)),
        },
    )


def meanings(kind: type) -> dict[str, str]:
    """By field: the text that stands below it, in one line."""
    [tree] = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(said))):
                found[name] = " ".join(said.split())
    return found


def default_of(field: Field[Any]) -> str:
    return "required" if field.default is MISSING else _code(field.default)


def _rows(kind: Any) -> Iterator[list[str]]:
    said = meanings(kind)
    for field in fields(kind):
        yield [f"`{field.name}`", default_of(field), _meaning(field.name, said[field.name])]


def _connector_rows() -> Iterator[list[str]]:
    usual, said, core = ConnectorSettings.parse({}), meanings(ConnectorSettings), meanings(OffloadConfig)
    for field in fields(ConnectorSettings):
        if key := field.metadata.get("key"):
            value = getattr(usual, field.name)
            default = _code(value is Mode.LAZY if isinstance(value, Mode) else value)
            yield [f"`{key}`", default, _meaning(key, said[field.name]), _code(field.metadata["example"])]
        else:  # those that go to the core
            for name, example in CORE_EXAMPLES.items():
                [of_core] = [each for each in fields(OffloadConfig) if each.name == name]
                yield [f"`{name}`", default_of(of_core), _meaning(name, core[name]), _code(example)]


def _meaning(name: str, text: str) -> str:
    return f"{text} [More]({MORE[name]})." if name in MORE else text


def _code(value: Any) -> str:
    if value is None:
        return "none"
    return f"`{json.dumps(value.value if isinstance(value, Enum) else value)}`"


if __name__ == "__main__":
    sys.exit(pages.main(PAGE, "forebay/settings.py or forebay/config.py", filled))
