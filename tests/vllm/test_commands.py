"""Commands of README and docs that need vLLM. The first server that is shown is started, and asked as is shown."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import How, Shown, rule_of, to_run
from tests.shell import SAYS_WHAT_IT_WAS_GIVEN, shell
from tests.test_readme import PAGES, ROOT, snippets
from tests.vllm.checkpoint import save_checkpoint
from tests.vllm.server import Server
from tests.vllm.test_server import ARGUMENTS

pytestmark = pytest.mark.timeout(600)

SERVED = to_run(How.SERVED)
SERVE = [command for command in SERVED if command.line.startswith("vllm serve")]
ASK = [command for command in SERVED if command.line.startswith("curl")]
OTHERS = {command.line: command for command in SERVED if command not in SERVE + ASK}.values()
CLIENTS = [(page, code) for page in PAGES for code in snippets(page, served=True)]


def _arguments(command: Shown, folder: Path) -> list[str]:
    """What a shell gives to `vllm`, with all that it expands."""
    tell = f'exec {shlex.quote(sys.executable)} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
    run = _bash(command.text, folder, vllm=tell)
    assert run.returncode == 0, run.stderr
    arguments: list[str] = json.loads(run.stdout)
    return arguments


def _bash(text: str, folder: Path, vllm: str = SAYS_WHAT_IT_WAS_GIVEN) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", text],
        cwd=ROOT if text.startswith("python") else folder,
        env=shell(folder, vllm),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.parametrize("command", SERVE, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_vllm_takes_every_command_that_serves(command: Shown, tmp_path: Path) -> None:
    """All are read by vLLM's own parser, and all run Forebay's connector with settings that it takes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.entrypoints.cli.serve import ServeSubcommand

    import forebay.vllm
    from forebay.vllm.config import ConnectorConfig

    parser = argparse.ArgumentParser()
    ServeSubcommand().subparser_init(parser.add_subparsers(required=True))
    transfer: Any = parser.parse_args(_arguments(command, tmp_path)).kv_transfer_config
    assert KVConnectorFactory.get_connector_class(transfer) is forebay.vllm.SimpleCPUOffloadConnector
    assert transfer.kv_load_failure_policy == "recompute"
    ConnectorConfig.parse(transfer.kv_connector_extra_config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """README's command, with a small model, on a port that is free, and with as much memory as a test may take."""
    folder = tmp_path_factory.mktemp("readme")
    serve, model, *settings = _arguments(SERVE[0], folder)
    assert (SERVE[0].page, serve, model) == ("README.md", "serve", "MODEL")
    settings = [each.replace('"64GB"', '"64MiB"') for each in settings]
    model = save_checkpoint(folder / "small")
    with Server(model, folder, *ARGUMENTS, *settings) as started:
        started.wait_until_ready()
        yield started


def _asked(text: str, server: Server) -> str:
    text = text.replace("http://localhost:8000", server.url)
    return re.sub(r"\bMODEL\b", "small", text)


@pytest.mark.parametrize("command", ASK, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_the_server_answers_what_pages_ask(command: Shown, server: Server, tmp_path: Path) -> None:
    run = _bash(_asked(command.text, server), tmp_path)
    assert run.returncode == 0, run.stderr
    if "/v1/" in command.text:
        assert json.loads(run.stdout)["choices"][0]["finish_reason"] in ("stop", "length"), run.stdout
    else:
        assert "forebay_" in run.stdout
    assert server.lines("slots=512 bytes_per_rank=67108864 ranks=1 mode=eager policy=lru verify=all layout=engine")


@pytest.mark.parametrize(("page", "code"), CLIENTS, ids=lambda each: getattr(each, "name", ""))
def test_the_server_answers_clients_that_pages_show(page: Path, code: str, server: Server, tmp_path: Path) -> None:
    script = tmp_path / "client.py"
    script.write_text(_asked(code, server))
    run = _bash(f"python {shlex.quote(str(script))}", tmp_path)
    assert run.returncode == 0, f"{page.name}: {run.stderr}"
    assert run.stdout.strip()


@pytest.mark.parametrize("command", OTHERS, ids=lambda command: f"{command.page}: {command.line[:60]}")
def test_other_commands_run(command: Shown, tmp_path: Path) -> None:
    rule = rule_of(command)
    assert rule is not None
    run = _bash(rule.instead or command.text, tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout
