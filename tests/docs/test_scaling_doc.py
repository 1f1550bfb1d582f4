"""docs/scaling.md: the output of the arithmetic equals its comments."""

from __future__ import annotations

from documents import blocks, check_program

DOCUMENT = "docs/scaling.md"


def test_the_arithmetic_has_the_documented_result() -> None:
    [program] = [block for block in blocks(DOCUMENT, "python") if "def size(" in block]
    check_program(program)
