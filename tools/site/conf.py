"""How `make docs` builds the site: Sphinx over the Markdown files as they are, with links and anchors checked.

Pages have no directives, so that they read the same without being built. The menu is here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Forebay"
project_copyright = "Forebay's authors, Apache 2.0"
html_title = "Forebay"

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/LOG.md", "docs/*.md"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "none"  # indented blocks are pictures and output
smartquotes = False  # what is quoted is what the log says
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_show_sphinx = False
html_copy_source = False

MENU = {
    "Use": (
        "Quick start <self>",
        "how-it-works",
        "configuration",
        "cli",
        "how-much-memory",
        "traces",
        "metrics",
        "troubleshooting",
        "migration",
        "security",
    ),
    "Facts": ("benchmarks", "tested-versions", "differences", "dependencies"),
    "Build on it": (
        "design",
        "proofs",
        "adding-an-engine",
        "adding-a-policy",
        "Contributing </CONTRIBUTING>",
        "Changes </CHANGELOG>",
        "Log of measurements </bench/LOG>",
        "Read me </README>",
    ),
}
"""Pages of docs by caption, in their order. One that is in no menu is a warning, which is an error."""


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_menu)
    app.connect("build-finished", _send_to_first_page)


def _add_menu(_: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        for caption, pages in MENU.items():
            entries = "\n".join(pages)
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def _send_to_first_page(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        to = f'<meta http-equiv="refresh" content="0; url={root_doc}.html"><a href="{root_doc}.html">{project}</a>'
        Path(app.outdir, "index.html").write_text(f"<!doctype html><title>{project}</title>{to}\n")
