"""Count of unclear phrases in comments, docstrings and test names: a part of `make lint`.

    python tests/plain_words.py             compare the counts with the ceilings
    python tests/plain_words.py --list      print the phrases, with file and line

CONTRIBUTING.md explains the patterns with examples. A ceiling may only decrease: if a package has fewer phrases than
its ceiling, the ceiling has to be lowered. Names of tests have at most 60 characters.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
CEILINGS = {"kvpage_server": 0, "engine": 0, "connectors": 0, "tests": 0, "benchmarks": 0, "examples": 0}
LONGEST_NAME = 60

_CLAUSES = (
    r"\b[Ww]hat (?!if\b|about\b|does\b|do\b|did\b|can\b|should\b|to\b)[a-z]+|\b[Ww]hoever\b|\b[Tt]hose (?:who|that)\b"
    r"|\b(?:[Ww]ho|nobody who|one who) (?:is|are|was|has|had|may|asks?|reads?|uses?|waits?|gives?|wants?|needs?)\b"
)
PATTERNS = {
    "a clause used as a noun": re.compile(_CLAUSES),
    "told, for: notify, send, return": re.compile(r"\b(?:told|tells?|telling|hears?|heard|untold)\b"),
    "come, for: arrive, follow": re.compile(r"\b(?:come|comes|came|coming)\b(?! from| with)"),
    "gone, for: deleted, closed": re.compile(r"\b(?:gone|goes|went)\b(?! on| through)"),
    "an archaic word": re.compile(r"\b(?:nevertheless|perhaps|thereby|besides|beside|aside|hence|lies|lay|or some)\b"),
    "a docstring without verb or noun": re.compile(r"\A(?:What|Which|Whose|Of|Those|As)\b"),
}
_IN_NAMES = re.compile(r"_(?:what|who|whoever|whose|told|tells?|comes?|came|gone|goes|went|nobody|perhaps)(?=_|$)")


class Found(NamedTuple):
    """A phrase, its file and line, and the pattern that it matches."""

    path: Path
    line: int
    pattern: str
    phrase: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.phrase!r} is {self.pattern}"


def found_in(path: Path) -> Iterator[Found]:
    """Yield the phrases of a Python file."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _matches(path, getattr(node, "lineno", 1), ast.get_docstring(node) or "", is_docstring=True)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            if len(node.name) > LONGEST_NAME:
                yield Found(path, node.lineno, f"longer than {LONGEST_NAME} characters", node.name)
            if match := _IN_NAMES.search(node.name):
                yield Found(path, node.lineno, f"a test name with {match[0].strip('_')!r}", node.name)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield from _matches(path, token.start[0], token.string.lstrip("# "), is_docstring=False)


def _matches(path: Path, line: int, text: str, *, is_docstring: bool) -> Iterator[Found]:
    text = re.sub(r"(`+)[^`]+\1", "`code`", text)  # names are no phrases
    for name, pattern in PATTERNS.items():
        if is_docstring or not name.startswith("a docstring"):
            yield from (Found(path, line, name, match[0]) for match in pattern.finditer(text))


def main() -> int:
    found = [one for package in CEILINGS for path in sorted((ROOT / package).rglob("*.py")) for one in found_in(path)]
    counts = Counter(one.path.relative_to(ROOT).parts[0] for one in found)
    too_long = [one for one in found if one.pattern.startswith("longer")]
    above = {package for package, ceiling in CEILINGS.items() if counts[package] > ceiling}
    below = {package for package, ceiling in CEILINGS.items() if counts[package] < ceiling}
    shown = (
        found
        if "--list" in sys.argv
        else [*too_long, *(one for one in found if one.path.parts[len(ROOT.parts)] in above)]
    )
    print(*shown, sep="\n", end="\n" if shown else "")
    for package in sorted(above | below):
        advice = "rephrase" if package in above else f"set the ceiling to {counts[package]} in tests/plain_words.py"
        print(f"{package} has {counts[package]} unclear phrases, and the ceiling is {CEILINGS[package]}: {advice}")
    return int(bool(above | below or too_long))


if __name__ == "__main__":
    sys.exit(main())
