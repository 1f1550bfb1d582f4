"""Standard streams of a terminal whose encoding is not UTF-8, such as ASCII or Latin-1."""

from __future__ import annotations

import codecs
import json
import sys
from io import TextIOWrapper

_ERRORS = "kvpage-terminal"
_SIMILAR = {**dict(zip("▁▂▃▄▅▆▇█", ".:-=+*%#", strict=True)), "…": "~"}  # as wide, so that columns stay in line


def fit_streams() -> None:
    """Make every character printable, and let ASCII input be UTF-8, which contains it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)
    if isinstance(sys.stdin, TextIOWrapper) and _codec(sys.stdin) == "ascii":
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def prints_every_character() -> bool:
    """Whether standard output encodes in one of the UTFs."""
    return not isinstance(sys.stdout, TextIOWrapper) or _codec(sys.stdout).startswith("utf")


def _codec(stream: TextIOWrapper) -> str:
    return codecs.lookup(stream.encoding).name


def _similar(error: UnicodeError) -> tuple[str, int]:
    """ASCII for characters that the encoding lacks: a similar one for a decoration, and JSON's escape for others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_SIMILAR.get(letter) or json.dumps(letter)[1:-1] for letter in lacking), error.end


codecs.register_error(_ERRORS, _similar)
