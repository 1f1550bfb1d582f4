"""docs/scaling.md: its arithmetic comes to what it says, and its map of slots is one."""

from __future__ import annotations

from documents import blocks, check_program

from kvpage_server.slot_map import parse_map

DOCUMENT = "docs/scaling.md"


def test_the_arithmetic_comes_to_what_is_printed() -> None:
    [program] = [block for block in blocks(DOCUMENT, "python") if "def size(" in block]
    check_program(program)


def test_the_map_of_slots_is_one() -> None:
    [text] = blocks(DOCUMENT, "toml")
    assert len(parse_map(text).nodes) == 2
