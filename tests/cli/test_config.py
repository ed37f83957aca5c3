"""`forebay config`, as a user sees it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from forebay.amounts import shown, typed
from forebay.cli import transfer
from forebay.cli.sizes import Memory
from forebay.copier.memory import MACHINE, Limit
from forebay.errors import ConfigError
from forebay.plan.models import kv_bytes_per_token
from forebay.settings import KNOWN, ConnectorSettings
from tests.cli.builders import GB, ROOT, forebay, right

HEAVY = ("torch", "vllm", "numpy", "triton", "xxhash")
LIMITS = [Limit(MACHINE, 256 * GB, 200 * GB), Limit("the cgroup", 64 << 30, 60 << 30)]

# What the model cards say: layers, heads for keys, their width.
LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def shown_by(*arguments: str) -> dict[str, Any]:
    run = forebay("config", *arguments)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n") == 1
    config: dict[str, Any] = json.loads(run.stdout)
    return config


def checked(config: object) -> tuple[int, str]:
    run = forebay("config", "--check", "-", text=config if isinstance(config, str) else json.dumps(config))
    assert run.stderr == ""
    return run.returncode, " ".join(run.stdout.split())


# --- printing ---------------------------------------------------------------------------------------------


def test_it_prints_one_line_that_an_engine_takes() -> None:
    assert shown_by("--memory", "64GB") == right()
    config = shown_by("--memory", "1.5GiB", "--mode", "lazy", "--policy", "s3fifo", "--verify", "sampled")
    assert config["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": "1.5GiB",
        "lazy_offload": True,
        "eviction_policy": "s3fifo",
        "verify": "sampled",
    }
    ConnectorSettings.parse(config["kv_connector_extra_config"])


def test_it_can_be_pasted_into_a_shell() -> None:
    command = f"{sys.executable} -m forebay.cli config --memory 64GB"
    echo = shlex.join([sys.executable, "-c", "import sys; print(sys.argv[1:])"])
    script = f'{echo} --kv-transfer-config "$({command})"'
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == f"{['--kv-transfer-config', json.dumps(right())]}\n"


def test_without_a_size_it_is_the_default_and_said_so() -> None:
    run = forebay("config")
    assert json.loads(run.stdout)["kv_connector_extra_config"] == {"cpu_bytes_to_use": 8 << 30}
    assert "as by default" in run.stderr


def test_what_it_prints_passes_its_own_check() -> None:
    printed = forebay("config", "--memory", "4GiB/rank", "--mode", "eager", "--policy", "arc").stdout
    code, said = checked(printed)
    assert code == 0
    assert "all is well" in said


def test_explanations_go_to_the_other_stream() -> None:
    run = forebay("config", "--memory", "1GB", "--ranks", "4")
    assert all(line.startswith("# ") for line in run.stderr.splitlines())
    assert "250.0 MB (250000000 bytes) on each of 4 ranks, 1.0 GB in all" in run.stderr
    run = forebay("config", "--memory", "1GB/rank", "--ranks", "4")
    assert "1.0 GB (1000000000 bytes) on each of 4 ranks, 4.0 GB in all" in run.stderr
    assert "more than there is" in forebay("config", "--memory", "1000TB").stderr


@pytest.mark.parametrize(
    ("text", "key", "setting", "num_bytes"),
    [
        ("64GB", "cpu_bytes_to_use", "64GB", 64 * GB),
        ("1000000", "cpu_bytes_to_use", 1_000_000, 1_000_000),
        ("16GiB/rank", "cpu_bytes_to_use_per_rank", "16GiB", 16 << 30),
        ("50%", "cpu_bytes_to_use", 32 << 30, 32 << 30),
        ("12.5%/rank", "cpu_bytes_to_use_per_rank", 8 << 30, 8 << 30),
        ("100%", "cpu_bytes_to_use", 64 << 30, 64 << 30),
    ],
)
def test_sizes(text: str, key: str, setting: object, num_bytes: int) -> None:
    """A part is one of the smallest limit, here that of the container."""
    memory = Memory.parse(text, LIMITS)
    assert (memory.key, memory.setting, memory.num_bytes) == (key, setting, num_bytes)


@pytest.mark.parametrize("text", ["64 gigs", "0", "0%", "101%", "50%%", "16GB/gpu", "16GB/", "", "-1GB", "%"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--memory: expected .*, got"):
        Memory.parse(text, LIMITS)


def test_a_part_of_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Memory.parse("50%", [])


def test_sizes_for_people_and_for_commands() -> None:
    assert [shown(n) for n in (12, 64 << 10, 64 * GB, 2 * 10**12)] == ["12 bytes", "65.5 KB", "64.0 GB", "2.0 TB"]
    assert [typed(n) for n in (64 * GB + 1, 5 * 10**8, 12)] == ["64GB", "500MB", "1MB"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--memory", "6gigs"], "forebay config: --memory: expected"),
        (["--policy", "mru"], "forebay config: --policy: expected"),
        (["--mode", "slow"], "--mode"),
        (["--verify", "some"], "--verify"),
        (["--ranks", "0"], "--ranks"),
        (["--memory", "1B", "--ranks", "8"], "--memory: expected at least a byte for each of 8 ranks, got '1B'"),
        (["--model", "/nowhere"], "forebay config: --model: expected a folder with a config.json"),
        (["--memroy", "1GB"], "--memroy"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it(arguments: list[str], named: str) -> None:
    run = forebay("config", *arguments)
    assert run.returncode == 2
    assert run.stdout == ""
    [line] = [line for line in run.stderr.splitlines() if not line.startswith("# ")]
    assert named in line


# --- tokens -----------------------------------------------------------------------------------------------


def test_tokens_of_plain_models() -> None:
    assert kv_bytes_per_token(LLAMA_8B) == 131_072
    assert kv_bytes_per_token(LLAMA_8B, ranks=8) == 16_384
    assert kv_bytes_per_token(LLAMA_8B, ranks=16) == 16_384  # two ranks have the same head
    assert kv_bytes_per_token({**LLAMA_8B, "head_dim": 64}) == 65_536
    assert kv_bytes_per_token(DEEPSEEK_V3) == kv_bytes_per_token(DEEPSEEK_V3, ranks=8) == 70_272


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma3"},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"num_hidden_layers": None},
        {"num_attention_heads": 0, "num_key_value_heads": None},
    ],
)
def test_tokens_of_other_models_are_not_guessed(change: dict[str, Any]) -> None:
    assert kv_bytes_per_token({**LLAMA_8B, **change}) is None


def test_a_window_that_is_not_used_is_none() -> None:
    assert kv_bytes_per_token({**LLAMA_8B, "sliding_window": 4096, "use_sliding_window": False}) == 131_072


def test_tokens_are_said_on_the_other_stream(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = forebay("config", "--memory", "64GiB", "--model", str(tmp_path))
    assert "about 524,288 tokens: 131,072 bytes each" in run.stderr
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    assert "gemma3 is not a plain transformer" in forebay("config", "--model", str(tmp_path)).stderr
    (tmp_path / "config.json").write_text("[]")
    assert forebay("config", "--model", str(tmp_path)).returncode == 2
    (tmp_path / "config.json").write_text("[" * 100_000)
    run = forebay("config", "--model", str(tmp_path))
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert "--model: expected a folder with a config.json (nested too deeply), got " in run.stderr


def test_ranks_that_heads_cannot_be_spread_over_are_not_the_fault_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    run = forebay("config", "--model", str(tmp_path), "--ranks", "3")
    assert run.returncode == 0
    said = "--ranks: expected a divisor or a multiple of the model's 8 heads of keys and values, got 3"
    assert f"tokens: not counted, {said}\n" in run.stderr


def test_one_is_not_several(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    said = forebay("config", "--memory", "131072", "--model", str(tmp_path), "--ranks", "1").stderr
    assert "131.1 KB (131072 bytes) on 1 rank, 131.1 KB in all" in said
    assert "about 1 token: 131,072 bytes each" in said
    assert (
        "# 1 byte (1 byte) on each of 2 ranks, 2 bytes in all\n"
        in forebay("config", "--memory", "1/rank", "--ranks", "2").stderr
    )


# --- checking ---------------------------------------------------------------------------------------------


def test_every_setting_that_can_be_wrong_has_a_right_value() -> None:
    assert transfer._RIGHT.keys() == set(KNOWN)
    for key, value in transfer._RIGHT.items():
        ConnectorSettings.parse({key: value})


@pytest.mark.parametrize("deep", [101, 500, 900, 960, 970, 980, 990, 1_000, 100_000])
def test_what_is_nested_too_deeply_is_one_line(deep: int) -> None:
    inner = "[" * deep + "]" * deep
    for text in (inner, f'{{"kv_role": {inner}}}', f'{{"kv_connector_extra_config": {{"verify": {inner}}}}}'):
        code, said = checked(text)
        assert code == 1
        assert "standard input: expected JSON, got text that is none: nested" in said


def test_a_wrong_folder_for_recordings_is_named() -> None:
    code, said = checked(right(kv_connector_extra_config={"record_trace": "/a\0b", "record_trace_bytes": 5}))
    assert code == 1
    assert r"half characters, got '/a\x00b'" in said
    assert '"record_trace": "/var/lib/forebay"' in said
    assert "record_trace_bytes: expected at least 1,000,000 bytes, got 5" in said


@pytest.mark.parametrize("size", [f'"{"9" * 5000}GB"', "9" * 4000])
def test_a_size_of_too_many_digits_is_refused(size: str) -> None:
    code, said = checked(f'{{"kv_connector_extra_config": {{"cpu_bytes_to_use": {size}}}}}')
    assert code == 1
    assert "kv_connector_extra_config.cpu_bytes_to_use: expected " in said


@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_what_is_right_passes(role: str) -> None:
    assert checked(right(kv_role=role)) == (0, "ok config the configuration is right all is well")


@pytest.mark.parametrize(
    ("config", "code", "said"),
    [
        (right(kv_rol="kv_both", kv_role=None), 1, "unknown key 'kv_rol'; did you mean 'kv_role'?"),
        (
            right(kv_connector_extra_config={"cpu_byte": "6GB"}),
            1,
            "kv_connector_extra_config: unknown key 'cpu_byte'; did you mean 'cpu_bytes_to_use'?",
        ),
        (
            right(kv_connector_extra_config={"lazy_offload": "yes"}),
            1,
            "kv_connector_extra_config.lazy_offload: expected true or false, got 'yes'",
        ),
        (right(kv_connector_extra_config=[1]), 1, "kv_connector_extra_config: expected a JSON object, got [1]"),
        (
            right(kv_connector_module_path=None),
            1,
            "kv_connector_module_path: expected 'forebay.vllm', got nothing",
        ),
        (right(kv_connector="LMCacheConnectorV1"), 1, "kv_connector: expected 'SimpleCPUOffloadConnector'"),
        (right(kv_role=None), 1, "kv_role: expected 'kv_both' or 'kv_producer', got nothing"),
        (right(kv_role="kv_consumer"), 0, "kv_role: expected 'kv_both' or 'kv_producer', got 'kv_consumer'"),
        (right(kv_load_failure_policy=None), 0, "warning failure-policy kv_load_failure_policy: expected"),
        (right(kv_load_failure_policy="fail"), 0, "kv_load_failure_policy: expected 'recompute', got 'fail'"),
        (right(kv_load_failure_policy="retry"), 1, "expected 'recompute' or 'fail', got 'retry'"),
        ("{'a': 1}", 1, "standard input: expected JSON, got text that is none"),
        ("[]", 1, "standard input: expected a JSON object, got []"),
        ("", 1, "standard input: expected JSON"),
    ],
)
def test_what_is_wrong_is_said_once(config: object, code: int, said: str) -> None:
    exit_code, output = checked(config)
    assert exit_code == code
    assert said in output
    assert output.endswith((" 1 error", " 1 warning")), "one finding, and no other"


def test_all_that_is_wrong_is_said_at_once() -> None:
    extra = {"cpu_bytes_to_use": "64 gigs", "verify": "some", "verfy": "all", "load_deadline_s": -1}
    code, said = checked(right(kv_role="both", kv_connector_extra_config=extra))
    assert code == 1
    for part in (
        "cpu_bytes_to_use: expected whole bytes",
        "verify: expected one of all, sampled, off, got 'some'",
        "did you mean 'verify'?",
        "load_deadline_s: expected a number of seconds, at least 0, got -1",
        "got 'both'",
        "5 errors",
    ):
        assert part in said


def test_a_file_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kv_transfer_config": right(), "max_model_len": 4096}))
    assert forebay("config", "--check", str(file)).returncode == 0
    run = forebay("config", "--check", str(tmp_path / "none.json"))
    assert run.returncode == 1
    assert "config-unreadable" in run.stdout


def test_what_does_not_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    run = forebay("config", "--check", "/dev/zero")
    assert run.returncode == 1
    assert "more than 4,194,304 characters" in " ".join(run.stdout.split())
    (tmp_path / "config.json").symlink_to("/dev/zero")
    for command in (("config", "--model", str(tmp_path)), ("plan", "examples", "--model", str(tmp_path))):
        run = forebay(*command)
        assert run.returncode == 2
        assert "more than 4,194,304 characters" in run.stderr


# --- where it runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--memory", "50%"], ["config", "--check", "-"]])
def test_it_needs_nothing_but_python(arguments: list[str]) -> None:
    run = forebay(*arguments, text=json.dumps(right()), without=HEAVY)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_a_module_that_is_refused_is_not_there() -> None:
    """The test above would notice: vLLM's half does need it."""
    run = forebay("config", "--policy", "forebay.vllm:Nothing", without=HEAVY)
    assert run.returncode == 2
    assert "No module named 'torch'" in run.stderr or "No module named 'vllm'" in run.stderr


_AFTER_HELP = """
import sys
from forebay.cli import main
try:
    main(["--help"])
finally:
    print(*sys.modules, file=sys.stderr)
"""


def test_help_is_there_at_once() -> None:
    """It waits for no command, and for nothing that takes long to import."""
    run = subprocess.run(
        [sys.executable, "-c", _AFTER_HELP], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    modules = set(run.stderr.split())
    assert "forebay.cli" in modules
    assert not modules & {"asyncio", "multiprocessing", "socket", "numpy", "torch", "vllm", "xxhash"}
    assert not modules & {
        f"forebay.{name}" for name in ("plan", "copier", "vllm", "cli.doctor", "cli.top", "cli.plan")
    }


def test_it_is_installed_as_a_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"forebay": "forebay.cli:main"}


_INTERRUPTED = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
sys.argv = ["forebay", "config"]
from forebay.cli import main
sys.exit(main())
"""


def test_control_c_while_a_command_is_still_imported_is_one_line() -> None:
    script = _INTERRUPTED.format(module="forebay.cli.config")
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (run.returncode, run.stdout) == (130, "")
    assert run.stderr == "forebay config: interrupted\n"
