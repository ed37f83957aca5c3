"""Pages of docs whose tables are made from code. The text between the tables is written by hand.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent

_TABLE = re.compile(r"(?<=<!-- table: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


def fill(page: str, tables: Mapping[str, str]) -> str:
    """The page with every table as it should be. Raises ValueError if it has other tables than these."""
    if sorted(name for name, _ in _TABLE.findall(page)) != sorted(tables):
        raise ValueError(f"expected one table for each of {', '.join(tables)}")
    return _TABLE.sub(lambda found: f"{found[1]}{found[2]}{tables[found[1]]}", page)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines)


def main(page: Path, source: str, filled: Callable[[str], str]) -> int:
    """The command that writes `page` from `source`, or with --check only says whether it would change."""
    parser = argparse.ArgumentParser(description=f"Writes the tables of docs/{page.name}.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something would change")
    check = parser.parse_args().check
    before = page.read_text()
    after = filled(before)
    if before != after and check:
        print(f"docs/{page.name} is not what {source} says: run {sys.argv[0]}", file=sys.stderr)
        return 1
    if not check:
        page.write_text(after)
    return 0
