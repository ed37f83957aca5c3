"""`forebay plan` and `forebay generate`, as a user sees them."""

from __future__ import annotations

import errno
import gzip
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.plan.generate import KINDS
from forebay.plan.traces import open_trace
from forebay.settings import ConnectorSettings
from tests.cli.builders import ROOT, forebay
from tests.pages import assert_every_element_is_closed, assert_nothing_is_fetched

HEAVY = ("torch", "vllm", "numpy", "triton", "prometheus_client", "tokenizers")
SMALL = ("--requests", "300", "--block-tokens", "64", "--seed", "3")
DEVICE = ("--device-memory", "3GB")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A trace with blocks of 64 tokens, 8.39 MB each by default."""
    target = tmp_path_factory.mktemp("traces") / "chat.jsonl"
    made = forebay("generate", "chat", *SMALL, "--output", str(target))
    assert (made.returncode, made.stdout, made.stderr) == (0, "", "")
    return str(target)


def planned(*arguments: str) -> dict[str, Any]:
    run = forebay("plan", *arguments, "--json")
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


# --- what comes out -----------------------------------------------------------------------------------------


def test_a_trace_is_enough(chat: str) -> None:
    """Nothing else is asked for, what is assumed is said, and nothing heavy is needed."""
    run = forebay("plan", chat, without=HEAVY)
    assert (run.returncode, run.stderr) == (0, "")
    first, *_ = run.stdout.splitlines()
    assert first.startswith("chat.jsonl: 300 requests in ")
    assert "llama-3.1-8b, assumed: 131,072 bytes of KV per token, 8.39 MB per block (see --model)" in run.stdout
    assert "device: 40 GB of KV, assumed: 4,768 blocks (see --device-memory)" in run.stdout
    assert "The device is enough" in run.stdout


def test_table_advice_json_and_page_agree(chat: str, tmp_path: Path) -> None:
    page, document = tmp_path / "plan.html", tmp_path / "plan.json"
    run = forebay("plan", chat, *DEVICE, "--html", str(page), "--json", str(document))
    assert run.returncode == 0, run.stderr
    told = json.loads(document.read_text())
    recommended = told["advice"]["recommended"]
    pasted = re.findall(r'"kv_connector_extra_config": ({.*})', run.stdout)
    assert json.loads(pasted[0]) == recommended["kv_connector_extra_config"]
    settings = ConnectorSettings.parse(recommended["kv_connector_extra_config"])
    assert settings.total_bytes == recommended["num_bytes"]
    assert f"{recommended['slots']:,} slots" in run.stdout
    assert len(told["sizes_bytes"]) == 8
    assert recommended["num_bytes"] in told["sizes_bytes"]
    rows = [line for line in run.stdout.splitlines() if re.match(r"[\d.]+ [GM]B ", line)]
    assert len(rows) == 8
    html = page.read_text()
    assert_nothing_is_fetched(html)
    assert_every_element_is_closed(html)
    assert told["advice"]["words"][0] in html
    assert f"JSON: {document}" in run.stderr


def test_more_memory_never_finds_less_and_the_best_possible_bounds_it(chat: str) -> None:
    told = planned(chat, *DEVICE, "--policy", "lru,s3fifo,arc", "--mode", "both")
    lru, best = told["curves"]
    shares = dict(zip(lru["sizes_blocks"], lru["hit_share"], strict=True))
    bounds = dict(zip(best["sizes_blocks"], best["hit_share"], strict=True))
    block = told["engine"]["block_bytes"]
    slots = [size // block for size in told["sizes_bytes"]]
    assert [shares[each] for each in slots] == sorted(shares[each] for each in slots)
    assert all(shares[each] <= bounds[each] <= lru["unbounded_share"] for each in slots)
    for name in ("knee", "target"):
        choice = told["advice"][name]
        assert choice["hit_share"] == shares[choice["slots"]]
    runs = {(each["mode"], each["policy"]) for each in told["replays"]}
    assert runs == {(mode, policy) for mode in ("eager", "lazy") for policy in ("lru", "s3fifo", "arc")}
    assert len(told["replays"]) == 8 * 6
    assert all(each["hit_share"] >= told["without"]["hit_share"] for each in told["replays"])
    assert (told["without"]["mode"], told["without"]["host_tokens"]) == ("off", 0)


def test_sizes_modes_and_policies_are_those_that_were_asked_for(chat: str) -> None:
    told = planned(chat, *DEVICE, "--sizes", "20GB,5GB", "--mode", "lazy", "--policy", "arc")
    assert told["sizes_bytes"] == [5 * 10**9, 20 * 10**9]
    assert [(each["mode"], each["policy"], each["host_bytes"]) for each in told["replays"]] == [
        ("lazy", "arc", 5 * 10**9),
        ("lazy", "arc", 20 * 10**9),
    ]


def test_a_curve_alone_needs_no_replay(chat: str) -> None:
    told = planned(chat, *DEVICE, "--curve-only")
    assert told["replays"] == []
    assert told["without"] is None
    assert told["advice"]["recommended"] is not None


def test_processes_do_not_change_what_is_found(chat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.plan import run
    from forebay.plan.models import load_model

    wanted = run.Wanted(load_model("llama-3.1-8b"), device_bytes=3 * 10**9, sizes=[5 * 10**9], processes=2)
    here = run.plan(open_trace(chat), wanted)
    monkeypatch.setattr(run, "SMALL_BLOCKS", 0)
    assert run.plan(open_trace(chat), wanted) == here


def test_a_sampled_curve_says_so(chat: str) -> None:
    told = planned(chat, *DEVICE, "--curve-only", "--sample", "50%")
    assert told["curves"][0]["sampled"] == pytest.approx(0.5)
    assert any("sampled: 50 % of blocks" in each for each in told["assumptions"])


def test_speeds_predict_waiting_times(chat: str) -> None:
    told = planned(chat, *DEVICE, "--sizes", "20GB", "--prefill-tokens-per-s", "20000", "--bus-gb-per-s", "50")
    [run] = told["replays"]
    assert 0 < run["speed"]["ttft_p50_s"] <= run["speed"]["ttft_p50_without_s"]
    slow = planned(chat, *DEVICE, "--sizes", "20GB", "--prefill-tokens-per-s", "20000", "--bus-gb-per-s", "0.01")
    assert slow["replays"][0]["speed"]["bus_busy_share"] > 1
    assert any("does not keep up" in each for each in slow["advice"]["words"])


# --- the engine ---------------------------------------------------------------------------------------------


def test_memory_is_of_all_ranks_together(chat: str) -> None:
    one = planned(chat, "--kv-bytes-per-token", "100000", *DEVICE, "--sizes", "10GB")
    four = planned(chat, "--kv-bytes-per-token", "100000", "--tensor-parallel", "4", *DEVICE, "--sizes", "10GB")
    assert four["engine"]["ranks"] == 4
    for key in ("device_blocks", "block_bytes", "kv_bytes_per_token"):
        assert one["engine"][key] == four["engine"][key]
    [first], [second] = one["replays"], four["replays"]
    for key in ("slots", "host_bytes", "host_tokens", "bytes_loaded", "bytes_stored", "device_blocks"):
        assert first[key] == second[key], key
    assert first["slots"] == 10 * 10**9 // (64 * 100_000)


def test_a_model_of_this_machine_is_read(chat: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = planned(chat, "--model", str(tmp_path), "--device-tokens", "20000", "--curve-only")
    assert told["engine"]["kv_bytes_per_token"] == 2 * 2 * 8 * 64 * 2
    assert told["engine"]["device_blocks"] == 20_000 // 64
    assert not told["engine"]["model_assumed"]
    assert not told["engine"]["device_assumed"]
    small = planned(chat, "--model", str(tmp_path), "--cache-dtype", "fp8", "--curve-only")
    assert small["engine"]["kv_bytes_per_token"] == 2 * 2 * 8 * 64


@pytest.mark.parametrize("model", ["gemma-3-27b", "deepseek-v3"])
def test_models_with_windows_and_latents_are_planned_for(chat: str, model: str) -> None:
    told = planned(chat, "--model", model, "--device-tokens", "30000", "--sizes", "40GB")
    [run] = told["replays"]
    assert run["requests"] == 300
    assert run["host_tokens"] > 0


# --- wrong input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sizes", "20GB,"], "--sizes: expected a list with commas between"),
        (["--sizes", "lots"], "--sizes: expected whole bytes, or text such as"),
        (["--sizes", "1MB"], "--sizes: expected at least a block of the trace, 8.39 MB, got '1 MB'"),
        (["--policy", "fifo"], "forebay plan: --policy: expected "),
        (["--model", "no-such-model"], "forebay plan: --model: expected a folder with a config.json, or a name"),
        (
            ["--model", "llama-3.1-8b", "--kv-bytes-per-token", "1"],
            "--kv-bytes-per-token: expected nothing beside",
        ),
        (["--cache-dtype", "int3"], "forebay plan: --cache-dtype: expected one of"),
        (["--device-memory", "1KB"], "--device-memory: expected at least a block of the trace, 8.39 MB"),
        (["--device-memory", "x"], "--device-memory: expected whole bytes"),
        (["--device-memory", "1GB", "--device-tokens", "5"], "not allowed with"),
        (["--target-hit-share", "120%"], "expected a share such as 30% or 0.3, got '120%'"),
        (["--prefill-tokens-per-s", "5"], "--prefill-tokens-per-s: expected both speeds or none"),
        (
            ["--bus-gb-per-s", "5"],
            "--bus-gb-per-s: expected both speeds or none: --prefill-tokens-per-s too, got 5",
        ),
        (["--bus-gb-per-s", "0"], "expected a number above 0, got '0'"),
        (["--html", "no/such/folder/plan.html"], "--html: expected a file that can be written"),
        (["--json", "other.jsonl"], "--json: expected a file to be written, not named like a trace"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
        (
            ["--tensor-parallel", "3"],
            "forebay plan: --tensor-parallel: expected a divisor or a multiple of the model's 8 heads of keys and "
            "values, got 3\n",
        ),
        (
            ["--model", "granite-4.0-h-tiny", "--tensor-parallel", "5"],
            "forebay plan: --tensor-parallel: expected ",
        ),
        (["--device-tokens", "9" * 5000], "--device-tokens: expected at most 30 digits, got 5,000"),
        (["--bus-gb-per-s", "1e300"], "--bus-gb-per-s: expected a number above 0 and at most 1e+30, got '1e300'"),
        (["--model", ""], "--model: expected a config.json that can be read"),
        (["--html", "-", "--json"], "--html: expected a file: standard output has what --json gives, got '-'"),
    ],
)
def test_a_wrong_command_line_is_one_line(chat: str, arguments: list[str], said: str) -> None:
    run = forebay("plan", chat, *arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert said in run.stderr
    assert run.stderr.startswith("forebay plan: ")
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            "one.json --json one.json",
            "--json: expected a file to be written, not one that is read, got 'one.json'",
        ),
        ("one.json --json ./sub/../one.json", "--json: expected a file to be written, not one that is read"),
        ("one.json --html link.html", "--html: expected a file to be written, not one that is read"),
        ("one.json --html hard.html", "--html: expected a file to be written, not one that is read"),
        ("link.html --html one.json", "--html: expected a file to be written, not one that is read"),
        ("sub --html into.html", "--html: expected a file to be written, not one that is read"),
        ("sub --json sub/plan.json", "--json: expected a file elsewhere: in "),
        ("sub/ --html sub/plan.json", "--html: expected a file elsewhere: in "),
        (
            "one.json --tokenizer t.json --json t.json",
            "--json: expected a file to be written, not one that is read",
        ),
        ("one.json --model model --json model/config.json", "--json: expected a file to be written, not one that"),
        ("one.json --json x --html x", "--html: expected another file than --json, got 'x'"),
        ("one.json --json x --html ./sub/../x", "--html: expected another file than --json"),
        ("one.json --json new.link --html x", "--html: expected another file than --json"),
    ],
)
def test_what_is_read_is_not_written_over(chat: str, tmp_path: Path, arguments: str, said: str) -> None:
    shutil.copy(chat, tmp_path / "one.json")
    for folder in ("sub", "model"):
        (tmp_path / folder).mkdir()
    shutil.copy(chat, tmp_path / "sub/two.json")
    (tmp_path / "t.json").write_text("{}")
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "link.html").symlink_to("one.json")
    (tmp_path / "hard.html").hardlink_to(tmp_path / "one.json")
    (tmp_path / "into.html").symlink_to("sub/two.json")
    (tmp_path / "new.link").symlink_to("x")
    before = {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()}
    run = forebay("plan", *arguments.split(), cwd=tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"forebay plan: {said}")
    assert run.stderr.count("\n") == 1
    assert {each: each.read_bytes() for each in tmp_path.rglob("*") if each.is_file()} == before


def test_a_page_may_lie_beside_the_trace(chat: str, tmp_path: Path) -> None:
    shutil.copy(chat, tmp_path)
    for _ in range(2):
        run = forebay("plan", str(tmp_path), "--curve-only", "--html", str(tmp_path / "plan.html"))
        assert run.returncode == 0, run.stderr


LONG = "x" * 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["plan", "{chat}", "--html", LONG], "forebay plan: --html: expected a file that can be written"),
        (["plan", "{chat}", "--json", LONG], "forebay plan: --json: expected a file that can be written"),
        (["plan", "{chat}", "--model", LONG], "forebay plan: --model: expected a config.json that can be read"),
        (
            ["generate", "chat", "--output", LONG],
            "forebay generate: --output: expected a file that can be written",
        ),
        (["config", "--model", LONG], "forebay config: --model: expected a folder with a config.json"),
    ],
)
def test_names_that_are_too_long_are_one_line(chat: str, arguments: list[str], said: str) -> None:
    run = forebay(*(each.format(chat=chat) for each in arguments))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.splitlines()[-1].startswith(said)
    assert "File name too long" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("option", "said"), [("--html", "--html: "), ("--model", "--model: ")])
def test_folders_nobody_may_look_into_are_one_line(
    chat: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str, said: str
) -> None:
    """Without such a folder: whoever may do everything could look into it."""
    from forebay.cli import main

    looked_at = Path.stat

    def stat(path: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if "closed" in path.parts:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return looked_at(path, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", stat)
    assert main(["plan", chat, option, "closed/here"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"forebay plan: {said}")
    assert "(Permission denied)" in errors


def test_a_bad_trace_is_one_line_and_can_be_skipped(chat: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    lines = Path(chat).read_text().splitlines(keepends=True)
    bad.write_text("".join([*lines[:5], "{oops\n", *lines[5:]]))
    run = forebay("plan", str(bad), "--curve-only")
    assert (run.returncode, run.stdout) == (1, "")
    assert f"{bad}:6: expected one JSON object, got " in run.stderr
    assert run.stderr.count("\n") == 1
    skipping = forebay("plan", str(bad), "--curve-only", "--skip-bad-lines")
    assert skipping.returncode == 0
    assert "; 1 bad line was skipped" in " ".join(skipping.stdout.split())
    assert skipping.stderr.startswith(f"# skipped 1 bad line:\n#   {bad}:6: ")
    missing = forebay("plan", str(tmp_path / "missing.jsonl"))
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)


def test_speeds_need_times(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"messages": [{"role": "user", "content": "Hello there, how are you today?"}]}\n' * 3)
    assert "log.jsonl: 3 requests, " in forebay("plan", str(log)).stdout
    run = forebay("plan", str(log), "--prefill-tokens-per-s", "10", "--bus-gb-per-s", "10")
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "forebay plan: --prefill-tokens-per-s: expected a trace with times, got 'log.jsonl'\n"


def test_requests_that_the_device_cannot_hold_are_named(chat: str) -> None:
    run = forebay("plan", chat, "--device-tokens", "2000", "--sizes", "20GB")
    assert run.returncode == 0
    assert re.search(r"\d+ requests are longer than the device and were left out", " ".join(run.stdout.split()))


# --- progress and interruption ------------------------------------------------------------------------------


def test_a_terminal_sees_a_bar_and_it_goes_away(chat: str) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "forebay.cli", "plan", chat, *DEVICE, "--policy", "lru,s3fifo,arc"]
    child = subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            new = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not new:
            break
        seen += new
    os.close(ours)
    output = child.communicate(timeout=60)[0]
    assert child.returncode == 0
    assert b"replays            [" in seen
    assert seen.endswith(b"\r\x1b[K")
    assert b"\x1b" not in output


def test_control_c_ends_all_of_it(chat: str, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    forebay("generate", "agent", "--requests", "1500", "--block-tokens", "64", "--output", str(long))
    child = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", "plan", str(long), "--sizes", "70GB", "--processes", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while sum(map(_has_worked, children := _children(child.pid))) < 2:
        assert time.monotonic() < deadline
        assert child.poll() is None, "it has ended before it could be interrupted"
        time.sleep(0.05)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    output, errors = child.communicate(timeout=60)
    assert (child.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "forebay plan: interrupted"
    assert "Traceback" not in errors
    while [each for each in children if Path(f"/proc/{each}").exists()]:
        assert time.monotonic() < deadline, "a process stayed behind"
        time.sleep(0.05)
    assert [each.name for each in tmp_path.iterdir()] == ["long.jsonl"]


@pytest.mark.parametrize(
    ("ending", "said"), [(signal.SIGTERM, "ended"), (signal.SIGHUP, "ended"), (signal.SIGINT, "interrupted")]
)
@pytest.mark.parametrize(
    ("command", "begun"),
    [
        (["plan", "long.jsonl", "--sizes", "70GB"], "forebay-plan-*"),
        (["generate", "agent", "--requests", "1000000", "--output", "made.jsonl"], ".forebay-*.part"),
    ],
)
def test_nothing_stays_behind(
    tmp_path: Path, command: list[str], begun: str, ending: signal.Signals, said: str
) -> None:
    if command[0] == "plan":
        forebay("generate", "agent", "--requests", "1500", "--output", "long.jsonl", cwd=tmp_path)
    before = [*tmp_path.iterdir()]
    child = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not [*tmp_path.glob(begun)]:
        assert time.monotonic() < deadline
        assert child.poll() is None, "it has ended before it could be ended"
        time.sleep(0.01)
    child.send_signal(ending)
    output, errors = child.communicate(timeout=60)
    assert (child.returncode, output, errors) == (128 + ending, "", f"forebay {command[0]}: {said}\n")
    assert [*tmp_path.iterdir()] == before


def _has_worked(process: int) -> bool:
    """Half a second: it is not only starting."""
    try:
        ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11]
    except OSError:
        return False
    return int(ticks) >= os.sysconf("SC_CLK_TCK") / 2


def _children(parent: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def test_a_model_that_is_not_understood_names_the_option_that_helps(chat: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    run = forebay("plan", chat, "--model", str(tmp_path))
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == (
        "forebay plan: --model: expected a config.json from which the KV cache can be counted (num_hidden_layers "
        f"is missing), or --kv-bytes-per-token, got {str(tmp_path)!r}\n"
    )


def test_a_folder_that_is_named_like_a_setting_keeps_its_name(chat: str, tmp_path: Path) -> None:
    folder = tmp_path / "tensor_parallel"
    folder.mkdir()
    run = forebay("plan", chat, "--model", str(folder))
    assert f"No such file or directory: '{folder}/config.json'" in run.stderr


def test_one_is_not_several(tmp_path: Path) -> None:
    line = '{"timestamp": %d, "input_length": 1, "output_length": 1, "hash_ids": [7]}\n'
    (tmp_path / "one.jsonl").write_text(line % 0 + "{\n")
    run = forebay(
        *("plan", str(tmp_path / "one.jsonl"), "--block-tokens", "1", "--kv-bytes-per-token", "1"),
        *("--device-tokens", "1", "--skip-bad-lines", "--html", str(tmp_path / "one.html")),
    )
    assert run.returncode == 0, run.stderr
    said = run.stdout + (tmp_path / "one.html").read_text() + run.stderr
    assert "1 request, 1 token in, 1 out, blocks of 1 token; 1 bad line was skipped" in said
    assert "1 byte of KV per token, 1 byte per block" in said
    assert not re.findall(r"(?<![\d.,])1 (?:\w+ )?(?:requests|tokens|blocks|bytes|slots|lines|seconds)\b", said)


def test_a_line_that_is_nested_too_deeply_is_one_line(chat: str, tmp_path: Path) -> None:
    for deep in (900, 960, 970, 980, 990, 100_000):
        inner = "[" * deep + "]" * deep
        (tmp_path / "deep.jsonl").write_text(
            f'{{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": {inner}}}\n'
        )
        run = forebay("plan", str(tmp_path / "deep.jsonl"))
        assert (run.returncode, run.stdout, run.stderr.count("\n")) == (1, "", 1)
        assert "deep.jsonl:1: expected " in run.stderr


# --- the generator ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", list(KINDS))
def test_what_is_generated_is_a_trace_and_always_the_same(kind: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain.jsonl", tmp_path / "packed.jsonl.gz"
    printed = forebay("generate", kind, "--requests", "50")
    forebay("generate", kind, "--requests", "50", "--output", str(plain))
    for _ in range(2):
        forebay("generate", kind, "--requests", "50", "--output", str(packed))
        assert gzip.decompress(packed.read_bytes()).decode() == plain.read_text() == printed.stdout
    trace = open_trace(plain)
    assert (len(list(trace)), trace.block_tokens) == (50, 16)
    other = forebay("generate", kind, "--requests", "50", "--seed", "1")
    assert other.stdout != printed.stdout


def test_a_dash_is_standard_output(chat: str, tmp_path: Path) -> None:
    printed = forebay("generate", "chat", "--requests", "5")
    dashed = forebay("generate", "chat", "--requests", "5", "--output", "-", cwd=tmp_path)
    assert (dashed.returncode, dashed.stdout, dashed.stderr) == (0, printed.stdout, "")
    page = forebay("plan", chat, "--curve-only", "--html", "-", cwd=tmp_path)
    assert (page.returncode, page.stderr) == (0, "")
    assert_every_element_is_closed(page.stdout)
    assert page.stdout.startswith("<!doctype html>")
    assert not [*tmp_path.iterdir()]


def test_what_it_is_like_can_be_changed() -> None:
    run = forebay(
        "generate", "chat", "--requests", "20", "--turns", "1", "--input-tokens", "5000", "--pause-s", "9"
    )
    lengths = [json.loads(line)["input_length"] for line in run.stdout.splitlines()]
    assert min(lengths) > 2500
    assert forebay("generate", "chat", "--requests", "1", "--pause-s", "0").returncode == 0
    wrong = forebay("generate", "poetry")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    wrong = forebay("generate", "chat", "--output", "no/such/folder/chat.jsonl")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prefix-tokens", "99999999999"),
        ("--prefixes", "9999999"),
        ("--sessions-per-s", "1e-320"),
        ("--sessions-per-s", "1e10"),
        ("--pause-s", "1e300"),
    ],
)
def test_what_is_too_much_is_named_by_its_option(option: str, value: str) -> None:
    run = forebay("generate", "chat", option, value)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert f"{option}: expected " in run.stderr.replace(f"argument {option}", option)
