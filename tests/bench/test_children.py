"""A process that fails, hangs or leaves others behind is a record with a reason, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import _children
import pytest
from _children import End, processes, reason, resident_bytes, run_child

START = """
import json, sys, time
from pathlib import Path

def say(**record):
    part = Path(sys.argv[2] + ".part")
    part.write_text(json.dumps(record))
    part.replace(sys.argv[2])

"""


def run(
    folder: Path, body: str, limit_s: float = 20.0, spec: dict[str, int] | None = None
) -> tuple[End, list[str]]:
    script = folder / "child.py"
    script.write_text(START + textwrap.dedent(body))
    stages: list[str] = []
    end = run_child(
        script,
        spec or {},
        folder / "run",
        limit_s=limit_s,
        environment={"FOREBAY_TEST": "1"},
        on_stage=lambda stage, seconds: stages.append(stage),
    )
    return end, stages


def test_a_child_that_completes_has_its_record(tmp_path: Path) -> None:
    body = """
    import os
    spec = json.loads(Path(sys.argv[1]).read_text())
    say(stage="done", complete=True, twice=2 * spec["n"], env=os.environ["FOREBAY_TEST"])
    """
    end, _ = run(tmp_path, body, spec={"n": 21})
    assert (end.problem, end.record["twice"], end.record["env"]) == (None, 42, "1")


def test_a_child_that_fails_says_why_and_keeps_what_it_had(tmp_path: Path) -> None:
    end, stages = run(tmp_path, 'say(stage="chat", documents=[1])\ntime.sleep(1)\nraise KeyError("no such thing")')
    assert end.problem == "failed in chat: KeyError: 'no such thing'"
    assert end.record["documents"] == [1]
    assert stages == ["chat"]
    assert end.tail[-1] == "KeyError: 'no such thing'"


def test_a_child_that_ends_without_a_word_has_its_exit_status(tmp_path: Path) -> None:
    end, _ = run(tmp_path, "sys.exit(3)")
    assert end.problem == "failed: exit status 3"


@pytest.mark.parametrize("complete", [False, True])
def test_a_child_that_hangs_is_killed_with_all_it_started(tmp_path: Path, complete: bool) -> None:
    """Also one that only has not gone away yet: that is not late, and nobody waits for it."""
    body = f"""
    import subprocess
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    say(stage="start", child=started.pid, complete={complete})
    time.sleep(60)
    """
    began = time.monotonic()
    end, _ = run(tmp_path, body, limit_s=20.0 if complete else 2.0)
    assert time.monotonic() - began < 15
    assert end.problem == (None if complete else "late: killed after 2 s in start")
    assert end.record["child"] not in {pid for pid, _, _ in processes()}


def test_who_is_told_to_end_takes_the_children_along(tmp_path: Path) -> None:
    child, parent = tmp_path / "child.py", tmp_path / "parent.py"
    child.write_text(START + 'say(stage="start")\ntime.sleep(60)')
    parent.write_text(f"""
import sys
sys.path.append({str(Path(_children.__file__).parent)!r})
from pathlib import Path
from _children import end_on_signal, run_child
end_on_signal()
tell = lambda stage, seconds: print(stage, flush=True)
run_child(Path({str(child)!r}), {{}}, Path({str(tmp_path / "run")!r}), limit_s=60, environment={{}}, on_stage=tell)
""")
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"start\n"
        mine = {pid for pid, above, _ in processes() if above == running.pid}
        running.terminate()
        assert running.wait(20) == 128 + signal.SIGTERM
    assert mine
    assert not mine & {pid for pid, _, _ in processes()}


def test_shared_memory_that_was_left_behind_is_gone(tmp_path: Path) -> None:
    name = f"/dev/shm/vllm_offload_test_{os.getpid()}.mmap"
    end, _ = run(tmp_path, f'Path("{name}").write_bytes(b"x")\nsay(complete=True)')
    assert end.problem is None
    assert not Path(name).exists()


def test_the_reason_is_the_last_error_that_says_something() -> None:
    lines = [
        "(EngineCore pid=7) ERROR 11-15 [core.py:1] ValueError: the cause",
        "    raise RuntimeError(",
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
        "UserWarning: resource_tracker: leaked",
    ]
    assert reason(lines) == "ValueError: the cause"
    assert reason(lines[2:]) == lines[2]
    assert reason(lines[3:]) is None


def test_resident_memory_counts_descendants() -> None:
    hold = "import time; block = bytearray(b'x') * (64 << 20); print(len(block), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline()
            assert resident_bytes(os.getpid()) > resident_bytes(child.pid) > 64 << 20
        finally:
            child.kill()


def test_memory_that_comes_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    available = iter([10, 20, 70, 90])
    monkeypatch.setattr(_children, "available_bytes", lambda: next(available))
    _children.wait_until_available(60)
    assert next(available) == 90
    monkeypatch.setattr(_children, "available_bytes", lambda: 10)
    _children.wait_until_available(60, patience_s=0.01)
