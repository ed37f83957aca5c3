"""The parts that loads and stores share. The manager builds them, once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forebay.config import OffloadConfig
from forebay.engine import DevicePool
from forebay.groups import KVLayout
from forebay.journal import Journal
from forebay.pool import HostPool
from forebay.transfers import Ledger


@dataclass(frozen=True, slots=True)
class Books:
    layout: KVLayout
    config: OffloadConfig
    pool: HostPool
    device: DevicePool
    ledger: Ledger
    journal: Journal
    clock: Callable[[], float]
    max_batched_tokens: int
