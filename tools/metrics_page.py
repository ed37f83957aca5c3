"""Writes the tables of docs/metrics.md from the table in forebay/metrics.py.

.venv/bin/python tools/metrics_page.py           # writes the page
.venv/bin/python tools/metrics_page.py --check   # only says whether it would change
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from forebay.metrics import METRICS, Metric, Section
from tools import pages

PAGE = pages.ROOT / "docs" / "metrics.md"


def filled(page: str) -> str:
    """The page with every table as it should be."""
    return pages.fill(page, {section.value: table(section) for section in Section})


def table(section: Section) -> str:
    metrics = [metric for metric in METRICS if metric.section is section]
    columns = ["name", "in Prometheus", "kind", "unit", "meaning"]
    if any(metric.look for metric in metrics):
        columns.append("look into it if")
    return pages.table(columns, (_row(metric)[: len(columns)] for metric in metrics))


def _row(metric: Metric) -> list[str]:
    name = metric.key if metric.source is None else metric.source.rpartition(".")[2]
    return [f"`{name}`", f"`{metric.name}`", metric.kind.value, metric.unit, metric.help, metric.look]


if __name__ == "__main__":
    sys.exit(pages.main(PAGE, "forebay/metrics.py", filled))
