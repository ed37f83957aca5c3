"""Forebay in vLLM: an out-of-tree connector that keeps the names of vLLM's own CPU offload.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "SimpleCPUOffloadConnector",
    "kv_connector_module_path": "forebay.vllm", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"cpu_bytes_to_use": "64GB"}}'
"""

from typing import TYPE_CHECKING, Any

from forebay.vllm import compat
from forebay.vllm import connector as _connector
from forebay.vllm.config import ConnectorConfig
from forebay.vllm.metadata import SimpleCPUOffloadMetadata, SimpleCPUOffloadWorkerMetadata
from forebay.vllm.scheduler import SimpleCPUOffloadScheduler
from forebay.vllm.worker import SimpleCPUOffloadWorker

if TYPE_CHECKING:
    from forebay.vllm.connector import SimpleCPUOffloadConnector

__all__ = [
    "SimpleCPUOffloadConnector",
    "SimpleCPUOffloadMetadata",
    "SimpleCPUOffloadScheduler",
    "SimpleCPUOffloadWorker",
    "SimpleCPUOffloadWorkerMetadata",
]


def __getattr__(name: str) -> Any:
    """The connector is looked up, not imported, so that its settings are checked each time vLLM looks it up."""
    if name != "SimpleCPUOffloadConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    settings = compat.settings_being_resolved()
    if settings is not None:
        ConnectorConfig.parse(settings)
    return _connector.SimpleCPUOffloadConnector
