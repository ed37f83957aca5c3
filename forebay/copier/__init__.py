"""The worker's room: what moves the bytes.

What needs torch is not imported here: `forebay.copier.regions` and `forebay.copier.torch_copier`.
"""

from forebay.copier.base import Copier
from forebay.copier.faults import InjectedFaults

__all__ = ["Copier", "InjectedFaults"]
