"""The documentation as a site: links, anchors and navigation, with and without its generator."""

from __future__ import annotations

import inspect
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import kvpage
import pytest
from documents import FENCE, ROOT

DOCS = ROOT / "docs"
MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]*))?\)")
INTERNAL = {"carry_out", "nodes"}  # methods of AsyncPageClient for the engine and the gateway
DRAWINGS = ("page_way", "context_way", "tiers", "arena")


def text_of(path: Path) -> str:
    """Return a page's text without its code."""
    return re.sub(r"`[^`\n]*`", "code", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path: Path) -> set[str]:
    """Return the anchors that a forge and the site make of a page's headings."""
    found: Counter[str] = Counter()
    result = set()
    for heading in re.findall(r"^#{1,6} +(.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        result.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return result


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(path: Path) -> None:
    for link, anchor in LINK.findall(text_of(path)):
        if "://" in link:
            continue
        target = path.parent / link if link else path
        assert target.exists(), f"{link} does not exist"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}#{anchor}: there is no such heading"


def test_paths_of_the_project_in_code_exist() -> None:
    named = re.compile(r"`((?:tests|benchmarks|conf|connectors|kvpage_server|engine)/[\w./-]+)`")
    found = {name for path in MARKDOWN for name in named.findall(FENCE.sub("", path.read_text(encoding="utf-8")))}
    made = set(re.findall(r"(?:Write|Its test is) `([^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    assert len(found) > 50
    absent = {name for name in found - made if "PATH" not in name and not (ROOT / name).exists()}
    assert absent == set()


def listed(index: Path) -> Counter[Path]:
    """Return the pages in a page's lists, which are the navigation of the site."""
    links = re.findall(r"^- \[[^]]*\]\(([\w./-]+\.md)\)", index.read_text(encoding="utf-8"), re.MULTILINE)
    return Counter((index.parent / link).resolve() for link in links)


def test_every_page_is_once_in_the_navigation() -> None:
    pages = {path for path in DOCS.rglob("*.md") if path not in (DOCS / "README.md", DOCS / "index.md")}
    assert listed(DOCS / "README.md") + listed(DOCS / "decisions" / "README.md") == Counter(pages)


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_has_a_title_and_no_foreign_parts(name: str) -> None:
    text = (DOCS / "images" / f"{name}.svg").read_text(encoding="utf-8")
    drawing = ElementTree.fromstring(text)
    assert [child.tag.rpartition("}")[2] for child in drawing][:2] == ["title", "desc"]
    assert text.count("://") == 1, "only the namespace is an address"
    assert f"images/{name}.svg" in (DOCS / "how-it-works.md").read_text(encoding="utf-8")


def test_the_python_reference_has_every_public_name() -> None:
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    assert {*re.findall(r"auto\w+:: kvpage\.(\w+)$", text, re.MULTILINE)} - {"layouts"} == {*kvpage.__all__} - {
        "__version__"
    }


def types_in(annotation: str) -> set[str]:
    """Return the capitalised names in an annotation, without those of Python."""
    elsewhere = {
        "Any",
        "AsyncIterator",
        "Buffer",
        "Callable",
        "Hashable",
        "Iterator",
        "Literal",
        "None",
        "Self",
        "Sequence",
    }
    return {*re.findall(r"[A-Z]\w+", annotation)} - elsewhere


@pytest.mark.parametrize("client", [kvpage.PageClient, kvpage.AsyncPageClient])
def test_types_of_the_client_s_methods_are_public(client: type) -> None:
    methods = [method for name, method in vars(client).items() if not name.startswith("_") or name == "__init__"]
    functions = [method for method in methods if inspect.isfunction(method) and method.__name__ not in INTERNAL]
    used = set[str]().union(*(types_in(str(each)) for one in functions for each in one.__annotations__.values()))
    assert {"RawCommand", "Word", "BlockShape"} <= used
    assert used <= {*kvpage.__all__}
