"""Files of bench are scripts that import each other by name, as Python does when one of them is run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "bench"))
