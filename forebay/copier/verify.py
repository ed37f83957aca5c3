"""Which loads have to bring what was stored. A file of its own: settings are read where there is no numpy."""

from __future__ import annotations

from enum import Enum


class Verify(Enum):
    ALL = "all"  # every block
    SAMPLED = "sampled"  # one in eight, by its key
    OFF = "off"
