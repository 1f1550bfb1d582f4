"""The count of unclear phrases finds each pattern, and ignores code."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import plain_words


@pytest.mark.parametrize(
    ("source", "phrases"),
    [
        ('"""What was found is told."""', ["What was", "told", "What"]),
        ("x = 1  # the one who asks has gone, and perhaps comes again", ["one who asks", "comes", "gone", "perhaps"]),
        ('"""Return the value, which comes from memory. `gone`: a reason."""', []),
        ("text = 'what was told'", []),
        ("def test_who_is_gone() -> None: ...", ["test_who_is_gone"]),
        (f"def test_{'a' * 60}() -> None: ...", [f"test_{'a' * 60}"]),
    ],
)
def test_phrases_are_found_in_comments_docstrings_and_names(tmp_path: Path, source: str, phrases: list[str]) -> None:
    path = tmp_path / "example.py"
    path.write_text(source, encoding="utf-8")
    assert [found.phrase for found in plain_words.found_in(path)] == phrases
