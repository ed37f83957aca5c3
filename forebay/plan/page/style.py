"""How the page looks, beyond what all our pages have in common."""

from __future__ import annotations

STYLE = """
main { max-width: 80rem; } p, li { max-width: 52rem; }
:root { --knee: #b4540a; --soft: #f2f5f7; }
@media (prefers-color-scheme: dark) { :root { --knee: #f0a35c; --soft: #1d2329; } }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: 4px; padding: .6rem .8rem;
  margin: .5rem 0 1rem; font: .875rem/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.big { font-size: 1.3rem; line-height: 1.4; margin: 1rem 0; }
ul { padding-left: 1.2rem; } li { margin: .3rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1rem 0; }
.tiles div { border: 1px solid var(--line); border-radius: 6px; padding: .6rem .8rem; }
.tiles dt { color: var(--faint); font-size: .875rem; }
.tiles dd { margin: 0; white-space: nowrap; font-size: .875rem; }
.tiles strong { font-size: 1.25rem; } .tiles dd + dd { color: var(--faint); }
svg.wide, svg.narrow { max-width: none; } svg.narrow { display: none; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.3rem; padding: 0; margin: .25rem 0 .5rem;
  font-size: .875rem; }
.legend li { display: flex; align-items: center; gap: .45rem; margin: 0; }
.legend svg { width: 26px; height: 16px; flex: none; }
.axis, .tick { stroke: var(--faint); fill: none; }
.lru, .bound, .unbounded, .filled, .drop { fill: none; }
.lru { stroke: var(--ink); stroke-width: 2.25; stroke-linejoin: round; }
.bound { stroke: var(--faint); stroke-width: 1.75; stroke-dasharray: 6 4; }
.unbounded { stroke: var(--faint); stroke-dasharray: 1 4; stroke-linecap: round; stroke-width: 1.5; }
.drop { stroke: var(--knee); stroke-width: 1.25; }
.named { fill: none; stroke: var(--knee); stroke-width: 2.5; }
svg .name { fill: var(--knee); font-weight: 600; }
svg .over { paint-order: stroke; stroke: var(--ground); stroke-width: 4px; stroke-linejoin: round; }
.device { fill: var(--soft); }
.mark { stroke: var(--ground); stroke-width: 1; }
.mark.eager, .on-host { fill: var(--eager); } .mark.lazy { fill: var(--lazy); }
.on-device { fill: var(--none); } .filled { stroke: var(--knee); stroke-width: 1.75; stroke-dasharray: 5 3; }
.scroll { overflow-x: auto; } .scroll:focus-visible, pre:focus-visible { outline: 2px solid var(--eager); }
.scroll th, .scroll td { white-space: nowrap; font-size: .875rem; }
.scroll th:first-child { position: sticky; left: 0; background: var(--ground); }
tr.marked th, tr.marked td { background: var(--soft); font-weight: 600; }
.scroll tr.marked th:first-child { background: var(--soft); }
summary { cursor: pointer; font-size: .875rem; color: var(--faint); margin: .5rem 0; }
@media (max-width: 46rem) { svg.wide { display: none; } svg.narrow { display: block; }
  .big { font-size: 1.15rem; } }
code { font: inherit; white-space: nowrap; }
@media print { svg.wide, details { display: none; } svg.narrow { display: block; max-width: 34rem; }
  .scroll { overflow: visible; } .scroll th, .scroll td { font-size: .5rem; padding-left: .2rem; }
  .scroll th { white-space: normal; }
  h2, svg, tr { break-inside: avoid; } h2 { break-after: avoid; } }
"""
