"""docs/configuration.md has the tables that the dataclasses say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, fields

import pytest

from forebay.config import OffloadConfig
from forebay.copier import InjectedFaults
from forebay.settings import KNOWN, ConnectorSettings
from tools import settings_page
from tools.pages import ROOT
from tools.settings_page import PAGE


def test_the_page_has_the_tables_that_the_code_says() -> None:
    page = PAGE.read_text()
    assert settings_page.filled(page) == page, "run tools/settings_page.py"
    command = [sys.executable, ROOT / "tools" / "settings_page.py", "--check"]
    assert subprocess.run(command, check=False, timeout=60).returncode == 0


def test_a_page_that_says_something_else_is_noticed() -> None:
    page = PAGE.read_text()
    for wrong in (page.replace("| `30.0` |", "| `20.0` |"), page.replace("Shorter hits are", "Shorter hits were")):
        assert wrong != page
        assert settings_page.filled(wrong) == page
    with pytest.raises(ValueError, match="one table for each of connector, core, faults"):
        settings_page.filled(page.replace("<!-- table: core -->", ""))


@pytest.mark.parametrize("kind", [OffloadConfig, InjectedFaults, ConnectorSettings])
def test_every_field_has_its_text(kind: type) -> None:
    assert set(settings_page.meanings(kind)) == {field.name for field in fields(kind)}


def test_every_key_can_be_written_and_is_read() -> None:
    """What is shown as an example is taken, and changes something, unless it is the only choice."""
    usual = ConnectorSettings.parse({})
    for field in fields(ConnectorSettings):
        if field.metadata:
            given = ConnectorSettings.parse({field.metadata["key"]: field.metadata["example"]})
            changed = {
                each.name for each in fields(given) if getattr(given, each.name) != getattr(usual, each.name)
            }
            assert changed == ({field.name} if field.name != "backend" else set())
    assert len(set(KNOWN)) == len(KNOWN) == 14


def test_texts_may_have_several_lines() -> None:
    @dataclass
    class Settings:
        first: int = 1
        """Said in
        two lines."""
        second: int = 2
        third: int = 3
        """Not of the second."""

    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(Settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tools.settings_page.inspect.getsource", lambda kind: source)
        assert settings_page.meanings(Settings) == {"first": "Said in two lines.", "third": "Not of the second."}
