"""NVIDIA GPUs. Importing this imports neither torch nor Triton; building a copier does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.copier.checksum import Verify
from forebay.copier.faults import InjectedFaults
from forebay.copier.pages import HostPages, gpu_numa_node
from forebay.copier.staged import FEW_WAIT_S, LOAD_STAGING_BYTES, STORE_STAGING_BYTES, StagedCopier
from forebay.ids import Rank

if TYPE_CHECKING:
    import torch


def cuda_copier(
    regions: Sequence[torch.Tensor],
    slots: int,
    *,
    rank: Rank = Rank(0),  # noqa: B008 - a number to everybody but the type checker
    verify: Verify = Verify.ALL,
    faults: InjectedFaults | None = None,
    few_wait_s: float = FEW_WAIT_S,
    load_staging_bytes: int = LOAD_STAGING_BYTES,
    store_staging_bytes: int = STORE_STAGING_BYTES,
    waits: bool = False,
) -> StagedCopier:
    """A copier for regions as `block_regions()` returns them, on a CUDA device, with slots of its own. `waits`: it
    keeps still, with few slots, until go_on() is called or an order is submitted."""
    from forebay.copier.cuda.gpu import CudaGpu

    gpu = CudaGpu(regions, slots)
    driver = gpu.driver
    pages = HostPages(
        slots,
        gpu.bytes_per_block,
        register=driver.register,
        unregister=driver.unregister,
        numa_node=gpu_numa_node(driver.pci_bus_id()),
        waits=waits,
    )
    gpu.is_host_pinned = lambda: pages.pinned
    return StagedCopier(
        gpu,
        pages,
        rank=rank,
        verify=verify,
        faults=faults,
        few_wait_s=few_wait_s,
        load_staging_bytes=load_staging_bytes,
        store_staging_bytes=store_staging_bytes,
        waits=waits,
    )
