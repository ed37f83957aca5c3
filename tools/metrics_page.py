"""Writes the tables of docs/metrics.md from the table in forebay/metrics.py. The text between them is written by hand.

    .venv/bin/python tools/metrics_page.py           # writes the page
    .venv/bin/python tools/metrics_page.py --check   # only says whether it would change

A table of the page stands between `<!-- table: SECTION -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from forebay.metrics import METRICS, Metric, Section  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the tables of docs/metrics.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    check = parser.parse_args().check
    before = PAGE.read_text()
    after = filled(before)
    if before != after and check:
        print("docs/metrics.md is not what forebay/metrics.py says: run tools/metrics_page.py", file=sys.stderr)
        return 1
    PAGE.write_text(after)
    return 0


def filled(page: str) -> str:
    """The page with every table as it should be."""
    sections = [Section(name) for name, _ in _TABLE.findall(page)]
    if sorted(sections, key=list(Section).index) != list(Section):
        raise ValueError(f"expected one table for each of {', '.join(each.value for each in Section)}")
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}{table(Section(found[1]))}", page)


def table(section: Section) -> str:
    metrics = [metric for metric in METRICS if metric.section is section]
    columns = ["name", "in Prometheus", "kind", "unit", "meaning"]
    looks = any(metric.look for metric in metrics)
    if looks:
        columns.append("look into it if")
    rows = [columns, ["---"] * len(columns), *(_row(metric)[: len(columns)] for metric in metrics)]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in rows)


def _row(metric: Metric) -> list[str]:
    name = metric.key if metric.source is None else metric.source.rpartition(".")[2]
    return [f"`{name}`", f"`{metric.name}`", metric.kind.value, metric.unit, metric.help, metric.look]


if __name__ == "__main__":
    sys.exit(main())
