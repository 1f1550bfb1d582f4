"""docs/client.md: its program runs against a server and prints the values in its comments; its tables are complete."""

from __future__ import annotations

import re

import kvpage
from documents import ROOT, blocks, check_program
from servers import RunningServer

from kvpage_server import layouts
from kvpage_server.page import MAX_BLOCK_PAGES, MAX_HEAD, MAX_LAYER, MAX_PAGE, MAX_REQ_ID

DOCUMENT = "docs/client.md"


def test_the_program_prints_its_comments(server: RunningServer) -> None:
    check_program("\n".join(blocks(DOCUMENT, "python")).replace("9221", str(server.port)))


def test_its_tables_have_every_error_and_every_layout() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    kinds = {name: kind for name in kvpage.__all__ if isinstance(kind := getattr(kvpage, name), type)}
    errors = {name for name, kind in kinds.items() if issubclass(kind, Exception)}
    assert len(errors) == 9
    assert {name for name in errors if f"`{name}`" not in text} == set()
    functions = {name for name in vars(layouts) if re.search(r"(to|from)_(mlx|vllm)$", name)}
    assert len(functions) == 6
    assert {name for name in functions if f"`{name}`" not in text} == set()


def test_documented_limits_match_the_contract() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    assert f"`req_id` is 1 to {MAX_REQ_ID} bytes" in text
    assert f"1 to {MAX_HEAD + 1:,}; `heads`" in text
    assert f"At most {MAX_BLOCK_PAGES:,}" in text
    assert (MAX_LAYER, MAX_PAGE) == (MAX_HEAD, 2**32 - 1)


def test_the_program_of_the_lossless_code_prints_its_comments() -> None:
    check_program("\n".join(blocks("docs/page-code.md", "python")))
