"""`make demo`, as a user runs it, with its smallest model."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from demo.model import TINY, is_made, model_folder, save

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = Path("/dev/shm")
FEW = ("--model", "tiny", "--sessions", "2", "--turns", "2", "--text", "300")
MANY = ("--model", "tiny", "--sessions", "100", "--turns", "10", "--text", "1000")


class Demo:
    """The command in a session of its own, with a folder of its own for temporary files."""

    def __init__(self, folder: Path, temporary: Path, *arguments: str) -> None:
        self.folder, self.temporary = folder, temporary
        self.process = subprocess.Popen(
            [sys.executable, "-m", "demo", "--folder", str(folder), *arguments],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, text: str) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if text in line:
                return
        raise AssertionError(f"it ended before it said {text!r}: {self.process.communicate()[1]}")

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=200)
        return self.process.returncode, out, err

    def processes(self) -> list[int]:
        """Those that know the folder: the command, its engines, and what those started."""
        found = []
        for each in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended, or is not ours
                known = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
                if str(self.folder).encode() in known and int(each.name) != os.getpid():
                    found.append(int(each.name))
        return found

    def shared_memory(self) -> set[str]:
        names: set[str] = set()
        for pid in self.processes():
            with suppress(OSError):
                names.update(re.findall(rf"{SHARED_MEMORY}/(\S+)", Path(f"/proc/{pid}/maps").read_text()))
        return names

    def check_nothing_is_left(self, shared: set[str]) -> None:
        assert self.processes() == []
        assert list(self.temporary.iterdir()) == []
        assert list(self.folder.glob("*.part")) == []
        assert [name for name in shared if (SHARED_MEMORY / name).exists()] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and vLLM's caches are made once, as for a user."""
    return tmp_path_factory.mktemp("demo") / "build"


def row(output: str, label: str) -> list[str]:
    [line] = [line for line in output.splitlines() if line.startswith(label)]
    return re.split(r"\s{2,}", line.removeprefix(label).strip())


def test_answers_are_equal_and_offload_loads(folder: Path, tmp_path: Path) -> None:
    demo = Demo(folder, tmp_path, *FEW)
    code, out, err = demo.end()
    assert (code, err) == (0, ""), out
    assert row(out, "answers equal") == ["reference", "100 %", "100 %"]
    none, eager, lazy = (int(value.replace(",", "")) for value in row(out, "tokens loaded from the host"))
    assert none == 0
    assert eager > 300
    assert lazy > 300
    none, eager, lazy = (int(value.replace(",", "")) for value in row(out, "prefill tokens computed"))
    assert max(eager, lazy) < none
    assert "vLLM 0." in (folder / "demo.html").read_text()
    demo.check_nothing_is_left(set())


@pytest.mark.parametrize("when", ["loading vLLM", "turn 1 of 10"])
def test_ctrl_c_leaves_nothing_behind(folder: Path, tmp_path: Path, when: str) -> None:
    demo = Demo(folder, tmp_path, *MANY)
    demo.wait_for(when)
    shared, engines = demo.shared_memory(), demo.processes()
    os.killpg(demo.process.pid, signal.SIGINT)
    code, _, err = demo.end()
    assert (code, err) == (130, "demo: interrupted\n")
    assert len(engines) >= 2  # or there was nothing to end
    demo.check_nothing_is_left(shared)


def test_an_engine_does_not_outlive_a_command_that_was_killed(folder: Path, tmp_path: Path) -> None:
    demo = Demo(folder, tmp_path, *MANY)
    demo.wait_for("turn 1 of 10")
    demo.process.kill()
    demo.end()
    deadline = time.monotonic() + 30
    while demo.processes() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert demo.processes() == []


def test_what_goes_wrong_in_vllm_is_one_line(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "build"
    model = model_folder(broken, TINY)
    (model / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "tmp").mkdir()
    demo = Demo(broken, tmp_path / "tmp", *FEW)
    code, _, err = demo.end()
    assert code == 1
    [line] = err.splitlines()
    assert line.startswith("demo: none: ")
    assert "none.log" in line
    demo.check_nothing_is_left(set())


# --- the model --------------------------------------------------------------------------------------------


def test_the_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save(tmp_path / name, TINY)
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_a_model_is_made_once_and_again_if_it_is_another(tmp_path: Path) -> None:
    made = model_folder(tmp_path, TINY)
    first = (made / "model.safetensors").stat().st_mtime_ns
    assert (model_folder(tmp_path, TINY) / "model.safetensors").stat().st_mtime_ns == first
    (made / "config.json").write_text("{}")
    assert not is_made(made, TINY)
    assert (model_folder(tmp_path, TINY) / "model.safetensors").stat().st_mtime_ns > first
    assert [path.name for path in tmp_path.iterdir()] == ["model-tiny"]


def test_a_token_is_a_letter_there_and_back(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder(tmp_path, TINY) / "tokenizer.json"))
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
