"""Forebay keeps the KV cache of LLM prompts in host memory and brings it back.

This package is the engine-agnostic core: it decides what is stored, loaded, evicted and forgotten. It imports
neither torch nor any engine.
"""

from forebay.config import Mode, OffloadConfig
from forebay.ends import Outcomes
from forebay.engine import DevicePool, Progress, Request
from forebay.errors import (
    CapacityError,
    ConfigError,
    ForebayError,
    InvariantError,
    LayoutError,
    LostLoadError,
    PolicyError,
    TraceError,
    TransitionError,
    UnknownKeyError,
)
from forebay.events import Cleared, Event, Removed, Stored
from forebay.groups import (
    ChunkedLocal,
    FullAttention,
    Group,
    KVLayout,
    Recurrent,
    SlidingWindow,
    host_slots,
)
from forebay.ids import BlockId, Key, Rank, RequestId, Slot, TransferId, make_key
from forebay.manager import OffloadManager, Step
from forebay.requests import Answer, Hit, NotYet
from forebay.stats import Stats
from forebay.transfers import CopyOrder, Direction, Outcome, Report

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "BlockId",
    "CapacityError",
    "ChunkedLocal",
    "Cleared",
    "ConfigError",
    "CopyOrder",
    "DevicePool",
    "Direction",
    "Event",
    "ForebayError",
    "FullAttention",
    "Group",
    "Hit",
    "InvariantError",
    "KVLayout",
    "Key",
    "LayoutError",
    "LostLoadError",
    "Mode",
    "NotYet",
    "OffloadConfig",
    "OffloadManager",
    "Outcome",
    "Outcomes",
    "PolicyError",
    "Progress",
    "Rank",
    "Recurrent",
    "Removed",
    "Report",
    "Request",
    "RequestId",
    "SlidingWindow",
    "Slot",
    "Stats",
    "Step",
    "Stored",
    "TraceError",
    "TransferId",
    "TransitionError",
    "UnknownKeyError",
    "host_slots",
    "make_key",
]
