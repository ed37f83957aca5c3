"""What our pages for a browser have in common. One file each, and nothing in it has to be fetched."""

from __future__ import annotations

from collections.abc import Container, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1c2126; --faint: #5b6670; --line: #d9dee3;
  --none: #8a949e; --eager: #1f6fd0; --lazy: #0f8a6a; }
@media (prefers-color-scheme: dark) { :root { --ground: #14181c; --ink: #e8ecef; --faint: #a3adb6; --line: #333b43;
  --none: #86919b; --eager: #5fa8f5; --lazy: #3fc39a; } }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 46rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; }
.big { font-size: 1.15rem; }
.faint { color: var(--faint); font-size: .875rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem 0 .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  vertical-align: bottom; }
th:first-child { padding-left: 0; text-align: left; font-weight: normal; }
thead th { font-weight: 600; }
td { white-space: nowrap; }
svg { display: block; width: 100%; max-width: 40rem; height: auto; fill: var(--ink); font-size: 12px; }
svg .faint { fill: var(--faint); font-size: 11px; }
.grid { stroke: var(--line); }
@media (max-width: 30rem) { table { font-size: .8125rem; } th, td { padding-left: .4rem; } }
"""


def document(title: str, body: str, style: str = "") -> str:
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def table(rows: Sequence[Sequence[str]], marked: Container[int] = ()) -> str:
    """The first row and the first column are headings. Rows with these numbers stand out."""
    names, *others = rows
    lines = ["<table>", "<thead><tr>" + "".join(f'<th scope="col">{escape(name)}</th>' for name in names)]
    lines.append("</tr></thead>\n<tbody>")
    for number, (label, *values) in enumerate(others, start=1):
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        kind = ' class="marked"' if number in marked else ""
        lines.append(f'<tr{kind}><th scope="row">{escape(label)}</th>{cells}</tr>')
    return "\n".join([*lines, "</tbody>", "</table>"])


def round_step(longest: float, least: float = 0.001) -> float:
    """1, 2 or 5 of some unit, so that there are at most five."""
    step = least
    for factor in (2, 2.5, 2) * 6:
        if longest / step <= 5:
            break
        step *= factor
    return round(step, 6)
