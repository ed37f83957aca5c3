"""Shipped test doubles: a tiny engine with real bytes and copiers that fail on demand.

The reference for anyone who writes an adapter, and what Forebay's own tests run on.
"""

from forebay.testing.copier import ByteCopier, Faults, Memory
from forebay.testing.device import NULL, TinyDevicePool
from forebay.testing.engine import TinyEngine
from forebay.testing.request import ManualClock, TinyRequest

__all__ = ["NULL", "ByteCopier", "Faults", "ManualClock", "Memory", "TinyDevicePool", "TinyEngine", "TinyRequest"]
