"""`python tests/fuzz [libFuzzer options] FOLDER`: noise guided by coverage, until something does not hold.

New behaviour of the Python core leads to the next inputs; the compiled core has to behave identically. FOLDER keeps
interesting inputs, so that the next run continues from there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
with atheris.instrument_imports(include=["kvpage_server"]):
    from fuzz.both import differ
    from fuzz.invariants import SEEDS, WORDS, check


def _quoted(word: str) -> str:
    """Quote bytes as in libFuzzer's dictionaries."""
    return '"' + "".join(f"\\x{ord(letter):02x}" for letter in word) + '"'


def _hold(data: bytes) -> None:
    check(data)
    differ(data)


def main() -> None:
    """Run until -max_total_time is over, or for ever."""
    corpus = Path(sys.argv[-1])
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(SEEDS):
        (corpus / f"seed-{number}").write_bytes(seed)
    dictionary = corpus.with_suffix(".dict")
    dictionary.write_text("".join(f"{_quoted(word)}\n" for word in WORDS), encoding="utf-8")
    atheris.Setup([sys.argv[0], f"-dict={dictionary}", *sys.argv[1:]], _hold)
    atheris.Fuzz()


main()
