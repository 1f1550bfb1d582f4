"""Settings of Sphinx for the site: `make site`. README.md is its first page, and its lists are the navigation."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "connectors")]

project = "kvpage"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["README.md"]
html_theme = "furo"
html_title = "kvpage"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}
pygments_dark_style = "github-dark"

myst_heading_anchors = 4
default_role = "code"  # docstrings have names in single backquotes
autodoc_default_options = {
    "members": True,
    "inherited-members": "Counter,Exception,tuple,int,dict",
    "undoc-members": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"


def navigation(markdown: str) -> str:
    """Return hidden tables of contents: for each heading of a page of lists, the pages that its items link to."""
    parts = []
    for section in re.split(r"^#+ ", markdown, flags=re.MULTILINE):
        if pages := re.findall(r"^- \[[^]]*\]\(([\w./-]+\.md)\)", section, re.MULTILINE):
            caption = section.partition("\n")[0]
            parts.append("\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```"]))
    return "\n\n".join(parts)


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put README.md in the place of index.md, and add the navigation to pages of lists.

    A link to a page outside of this folder becomes one to a copy of the file.
    """
    if docname == "index":
        source[0] = (DOCS / "README.md").read_text(encoding="utf-8")
    if docname == "index" or docname.endswith("/README"):
        source[0] += "\n\n" + navigation(source[0])
    folder = (DOCS / docname).parent
    for link in set(re.findall(r"\]\((\.\./[^)#]+\.md)\)", source[0])):
        if not (folder / link).resolve().is_relative_to(DOCS):
            source[0] = source[0].replace(f"]({link})", f"](path:{link})")


def add_accessibility(app: Sphinx, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    """Give the captions of the navigation a level, and make wide code and tables scrollable by keys."""
    for name, before, after in (
        ("furo_navigation_tree", ' role="heading"', ' role="heading" aria-level="2"'),
        ("body", "<pre>", '<pre tabindex="0">'),
        ("body", '<div class="table-wrapper ', '<div tabindex="0" class="table-wrapper '),
    ):
        if name in context:
            context[name] = context[name].replace(before, after)


def setup(app: Sphinx) -> None:
    app.add_lexer("conf", TextLexer)
    app.connect("html-page-context", add_accessibility, priority=900)  # after the theme
    app.connect("source-read", read_source)
