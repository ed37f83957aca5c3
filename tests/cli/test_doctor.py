"""`forebay doctor`: every fault that is planted is named, and where nothing is wrong nothing is said."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import kinds
from forebay.cli.doctor import examine
from forebay.cli.findings import Finding, Severity, as_json, as_text, worst
from forebay.cli.machine import Gpus, Machine, SharedFile, Torch
from forebay.cli.sizes import Memory
from forebay.cli.transfer import split
from forebay.copier.memory import Limit
from tests.cli.builders import CPU_MACHINE, GB, GPU_MACHINE, forebay, right
from tests.cli.test_config import LLAMA_8B

OF_GPU = GPU_MACHINE.gpus
CGROUP = Limit("the cgroup", 64 * GB, 60 * GB)


def faults(machine: Machine, document: dict[str, Any] | None = None, memory: str | None = None) -> list[Finding]:
    given = None if document is None else split(document, "test")
    asked = None if memory is None else Memory.parse(memory, machine.limits)
    return [each for each in examine(machine, given, asked) if each.severity > Severity.OK]


@pytest.mark.parametrize("machine", [GPU_MACHINE, CPU_MACHINE], ids=["gpu", "cpu"])
@pytest.mark.parametrize("document", [None, right(), {"kv_transfer_config": right(), "tensor_parallel_size": 4}])
def test_nothing_is_said_of_a_machine_that_is_well(machine: Machine, document: dict[str, Any] | None) -> None:
    assert faults(machine, document) == []


# The reading that is wrong, what is asked for, the one finding, and what has to be in its text.
PLANTED: list[tuple[str, dict[str, Any], str | None, str]] = [
    ("python-old", {"python": (3, 10, 12)}, None, "3.10.12"),
    ("vllm-missing", {"vllm": None}, None, "vLLM"),
    ("vllm-old", {"vllm": "0.25.1"}, None, "0.25.1"),
    ("vllm-untested", {"vllm": "0.33.0rc1"}, None, "0.33.0rc1"),
    ("vllm-untested", {"vllm": ""}, None, "without a number"),
    ("torch-missing", {"torch": None}, None, "torch"),
    ("torch-rocm", {"torch": Torch("2.13.0+rocm7", rocm="7.0")}, None, "ROCm"),
    ("torch-cpu", {"torch": Torch("2.13.0+cpu")}, None, "2.13.0+cpu"),
    ("gpu-missing", {"gpus": Gpus(reason="CUDA_ERROR_NO_DEVICE"), "gpu_nodes": []}, None, "CUDA_ERROR_NO_DEVICE"),
    ("driver-old", {"gpus": OF_GPU._replace(cuda="12.4", batched_copies=False)}, None, "CUDA 12.4"),
    ("triton-missing", {"triton_error": "No module named 'triton'"}, None, "No module named 'triton'"),
    ("memlock-low", {"memlock_bytes": 64 << 10}, None, "65.5 KB"),
    ("memory-unknown", {"limits": []}, None, "could not be read"),
    (
        "memory-too-large",
        {"numa_bytes": {1: 256 * GB}},
        "257GB",
        "257.0 GB are asked for, and the machine has 256.0 GB",
    ),
    ("memory-short", {"gpu_nodes": [0, 1]}, "199GB", "the machine has 200.0 GB left, of which 5.1 GB"),
    ("memory-under-block", {}, "10KB", "10.0 KB on each rank is less than a block"),
    ("container-limit", {"limits": [*GPU_MACHINE.limits, CGROUP]}, None, "64.0 GB of the machine's 256.0 GB"),
    ("huge-pages-off", {"huge_pages": "never"}, None, "never"),
    ("overcommit-strict", {"overcommit": 2}, None, "100.0 GB"),
    ("numa-unknown", {"gpu_nodes": [None]}, None, "2 NUMA nodes"),
    ("numa-small", {}, "150GB", "NUMA node 1 has 128.0 GB, and its GPUs are to use 150.0 GB"),
    (
        "shm-leftover",
        {"shared": [SharedFile("vllm_offload_7.mmap", 9 * GB, False)]},
        None,
        "vllm_offload_7.mmap in /dev/shm, 9.0 GB",
    ),
    ("shm-in-use", {"shared": [SharedFile("lmcache_x", 9 * GB, True)]}, None, "lmcache_x in /dev/shm, 9.0 GB"),
]
OF_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("prefix-caching-off", {"enable_prefix_caching": False, **right()}, "off"),
    ("prefix-caching-off", {"no-enable-prefix-caching": True, "kv-transfer-config": right()}, "off"),
    ("failure-policy", right(kv_load_failure_policy="fail"), "'fail'"),
    ("module-path", right(kv_connector_module_path=None), "nothing"),
    ("connector-other", right(kv_connector="OffloadingConnector"), "'OffloadingConnector'"),
    ("connector-none", {"enable_prefix_caching": True, "max_model_len": 4096}, "no kv_transfer_config"),
    ("role-wrong", right(kv_role="both"), "'both'"),
    ("role-one-sided", right(kv_role="kv_consumer"), "'kv_consumer'"),
    ("unknown-key", right(kv_conector_module="x"), "kv_conector_module"),
    ("unknown-key", right(kv_connector_extra_config={"lazy": True}), "did you mean 'lazy_offload'?"),
    ("wrong-value", right(kv_connector_extra_config={"eviction_policy": "mru"}), "'mru'"),
    ("faults-injected", right(kv_connector_extra_config={"inject_faults": {"fail_chance": 0.1}}), "inject_faults"),
    ("memory-too-large", right(kv_connector_extra_config={"cpu_bytes_to_use": "1TB"}), "1.0 TB"),
    (
        "memory-too-large",
        {
            "tensor_parallel_size": 2,
            "data_parallel_size": 2,
            **right(kv_connector_extra_config={"cpu_bytes_to_use_per_rank": "65GB"}),
        },
        "260.0 GB",
    ),
    ("memory-under-block", right(kv_connector_extra_config={"cpu_bytes_to_use": 4096}), "4.1 KB"),
]


@pytest.mark.parametrize(
    ("name", "readings", "memory", "text"), PLANTED, ids=[f"{each[0]}-{n}" for n, each in enumerate(PLANTED)]
)
def test_a_planted_fault_is_one_finding(
    name: str, readings: dict[str, Any], memory: str | None, text: str
) -> None:
    [found] = [
        each for each in faults(replace(GPU_MACHINE, **readings), memory=memory) if each.id != "numa-small"
    ] or [*faults(replace(GPU_MACHINE, **readings), memory=memory)]
    assert found.id == name
    assert text in found.what
    assert found.why


@pytest.mark.parametrize(
    ("name", "document", "text"), OF_SETTINGS, ids=[f"{each[0]}-{n}" for n, each in enumerate(OF_SETTINGS)]
)
def test_a_setting_that_defeats_offload_is_one_finding(name: str, document: dict[str, Any], text: str) -> None:
    [found] = faults(CPU_MACHINE, document)
    assert found.id == name
    assert text in found.what
    assert found.type


def test_every_kind_can_be_found() -> None:
    planted = {each[0] for each in PLANTED} | {each[0] for each in OF_SETTINGS} | {"config-unreadable"}
    assert planted == {kind.id for kind in kinds.ALL if kind.severity > Severity.OK}
    well = {each.id for machine in (GPU_MACHINE, CPU_MACHINE) for each in examine(machine, split(right(), "test"))}
    assert well == {kind.id for kind in kinds.ALL if kind.severity is Severity.OK}


def test_ids_are_given_once_and_all_but_two_say_what_to_type() -> None:
    assert len({kind.id for kind in kinds.ALL}) == len(kinds.ALL) >= 30
    silent = {kind.id for kind in kinds.ALL if kind.severity > Severity.OK and not kind.type}
    assert silent == {"shm-in-use"}, "another engine's memory is not ours to free"


def test_a_size_that_fits_is_suggested_and_does() -> None:
    [found] = [each for each in faults(GPU_MACHINE, memory="300GB") if each.id == "memory-too-large"]
    fits = found.type.removeprefix("forebay config --memory ")
    assert not [each for each in faults(GPU_MACHINE, memory=fits) if each.id.startswith("memory")]


def test_a_container_counts_before_the_machine() -> None:
    machine = replace(CPU_MACHINE, limits=[*CPU_MACHINE.limits, CGROUP])
    assert [each.id for each in faults(machine, memory="100GB")] == ["memory-too-large", "container-limit"]
    assert [each.id for each in faults(machine, memory="60GB")] == ["memory-short", "container-limit"]
    assert [each.id for each in faults(machine, memory="50%")] == ["container-limit"]
    unlimited = replace(CPU_MACHINE, limits=[*CPU_MACHINE.limits, Limit("the cgroup", 1 << 62, 1 << 62)])
    assert faults(unlimited) == []


def test_a_block_is_as_large_as_the_model_says(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))  # 2 MiB a block
    for size, expected in (("2MiB", []), (2_097_151, ["memory-under-block"])):
        document = {"model": str(tmp_path), **right(kv_connector_extra_config={"cpu_bytes_to_use": size})}
        assert [each.id for each in faults(CPU_MACHINE, document)] == expected
    document = {
        "model": str(tmp_path),
        "block_size": 32,
        **right(kv_connector_extra_config={"cpu_bytes_to_use": "2MiB"}),
    }
    assert [each.id for each in faults(CPU_MACHINE, document)] == ["memory-under-block"]


def test_what_is_given_on_the_command_line_counts() -> None:
    assert faults(CPU_MACHINE, right(kv_connector_extra_config={"cpu_bytes_to_use": "1TB"}), "10GB") == []


def test_files_that_take_no_memory_are_left_alone() -> None:
    assert faults(replace(CPU_MACHINE, shared=[SharedFile("lmcache_x", 0, False)])) == []


# --- what it prints ---------------------------------------------------------------------------------------


def all_wrong() -> list[Finding]:
    """Every finding, with long values."""
    names = {name for kind in kinds.ALL for name in re.findall(r"{(\w+)", kind.what + kind.type)}
    short = {
        "fits": "22GB",
        "name": "a",
        "newest": "0.32",
        "expected": "x",
        "the_right_key": "x",
        "a_right_value": "x",
    }
    values = {**dict.fromkeys(names, "value " * 12), **short}
    return [kind.found(**values) for kind in kinds.ALL]


def test_text_fits_eighty_columns() -> None:
    lines = as_text(all_wrong()).splitlines()
    assert max(map(len, lines)) <= 80
    ids = [re.match(r"(?:ok|note|warning|error) +", line) for line in lines]
    assert len({match.end() for match in ids if match}) == 1, "severities and ids stand in columns"


def test_every_finding_says_why_and_what_to_type() -> None:
    for finding in all_wrong():
        text = as_text([finding])
        if finding.severity is Severity.OK:
            assert "why:" not in text
        else:
            assert f"type: {finding.type}" in text or not finding.type
            assert "    why:  " in text


def test_colour_changes_no_letter() -> None:
    plain, coloured = as_text(all_wrong()), as_text(all_wrong(), colour=True)
    assert "\033" not in plain
    assert coloured != plain
    assert re.sub(r"\033\[\d+m", "", coloured) == plain


def test_the_last_line_counts() -> None:
    assert as_text(faults(replace(GPU_MACHINE, vllm=None, huge_pages="never", torch=None))).endswith(
        "\n2 errors, 1 warning"
    )
    assert as_text(examine(GPU_MACHINE)).endswith("\nall is well")


def test_json_has_all_that_text_has() -> None:
    findings = all_wrong()
    rows = json.loads(as_json(findings))
    assert [Finding(**{**row, "severity": Severity[row["severity"].upper()]}) for row in rows] == findings


# --- the command ------------------------------------------------------------------------------------------


def test_the_exit_code_is_that_of_the_worst(tmp_path: Path) -> None:
    """On whatever machine this is: what is found there by itself is not known."""
    run = forebay("doctor", "--json")
    here = json.loads(run.stdout)
    code = {"warning": 1, "error": 2}
    assert run.returncode == max(code.get(row["severity"], 0) for row in here)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({**right(), "enable_prefix_caching": False}))
    run = forebay("doctor", "--config", str(file), "--memory", "1GB")
    assert run.returncode == 2
    assert "prefix-caching-off" in run.stdout
    assert "\033" not in run.stdout, "not a terminal"
    run = forebay("doctor", "--config", str(tmp_path / "none.json"))
    assert run.returncode == 2
    assert "config-unreadable" in run.stdout
    assert forebay("doctor", "--memory", "6gigs").returncode == 2


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from forebay.cli import doctor, main

    for change, code in (
        ({}, 0),
        ({"memlock_bytes": 0}, 0),
        ({"huge_pages": "never"}, 1),
        ({"vllm": None, "huge_pages": "never"}, 2),
    ):
        monkeypatch.setattr(doctor, "read_machine", lambda change=change: replace(GPU_MACHINE, **change))
        assert main(["doctor"]) == code
    assert worst([]) is Severity.OK
    assert "vllm-missing" in capsys.readouterr().out


def test_it_runs_without_vllm_and_says_so() -> None:
    run = forebay("doctor", "--json", without=("vllm", "torch", "numpy", "triton"))
    assert run.returncode == 2, run.stderr
    assert {"vllm-missing", "torch-missing"} <= {row["id"] for row in json.loads(run.stdout)}
