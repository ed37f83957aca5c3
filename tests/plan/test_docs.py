"""docs/how-much-memory.md is true: its commands run and print what it shows, its keys are those of the JSON."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from forebay.plan.advice import Verdict
from forebay.plan.document import SCHEMA, as_document
from tests.cli.builders import ROOT
from tests.plan.reports import make_report
from tests.shell import shell

PAGE = ROOT / "docs" / "how-much-memory.md"
TEXT = PAGE.read_text()
SHOWN = {"plan": "forebay plan chat.jsonl", "real": "forebay plan examples/mooncake-first-1000.jsonl.gz"}
"""By the name of the block that shows it: the command whose output that is."""
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return dict(run_all(tmp_path_factory.mktemp("docs")))


def run_all(folder: Path) -> Iterator[tuple[str, str]]:
    """In their order: some read what others have written."""
    environment = shell(folder)
    (folder / "examples").symlink_to(ROOT / "examples")
    for command in COMMANDS:
        run = subprocess.run(
            ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, f"{command}: {run.stderr}"
        yield command, run.stdout


def test_every_command_shown_runs(outputs: dict[str, str]) -> None:
    assert len(outputs) >= 10
    silent = [command for command, output in outputs.items() if not output]
    assert silent == [COMMANDS[0]], "only the generator, which writes a file, says nothing"


def test_what_is_shown_is_what_is_printed(outputs: dict[str, str]) -> None:
    """To write it anew: `python -m tests.plan.test_docs`."""
    assert filled(TEXT, outputs) == TEXT
    [config] = re.findall(r"forebay config --memory (\S+)", TEXT)
    assert f'"cpu_bytes_to_use": "{config}"' in outputs["forebay plan chat.jsonl"]


def filled(page: str, outputs: dict[str, str]) -> str:
    """The page with every output as it should be."""
    for name, command in SHOWN.items():
        begin, end = f"<!-- {name}-output -->\n", f"<!-- /{name}-output -->"
        before, found, rest = page.partition(begin)
        _, ends, after = rest.partition(end)
        assert found, name
        assert ends, name
        page = before + begin + indented(outputs[command]) + "\n" + end + after
    return page


def indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines()) + "\n"


def described(key: str) -> set[str]:
    [row] = re.findall(rf"^\| `{key}` \| (.*) \|$", TEXT, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", row))


def test_every_key_of_the_json_is_described() -> None:
    document: dict[str, Any] = json.loads(json.dumps(as_document(make_report(speeds=True))))
    assert re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE) == list(document)
    assert described("trace") == set(document["trace"])
    assert described("engine") == set(document["engine"])
    assert described("advice") == {*document["advice"], *document["advice"]["knee"], "null"}
    assert described("curves") == set(document["curves"][0])
    assert described("replays") == set(document["replays"][0])
    tail = set(re.findall(r"`(\w+)`", TEXT.partition("A moment has")[2]))
    assert tail == {*document["replays"][0]["moments"][0], *document["replays"][0]["speed"], "null"}
    assert f'`"{SCHEMA}"`' in TEXT
    assert all(f'`"{verdict.value}"`' in TEXT for verdict in Verdict)


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        PAGE.write_text(filled(TEXT, dict(run_all(Path(temporary)))))
