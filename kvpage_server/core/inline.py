"""Words of a line as Redis splits them: inline commands and configuration files."""

from __future__ import annotations

import re

# White space, and what stands before the next: bare letters, and perhaps something in quotes. Redis skips \v and \f
# before a word, but they do not end one.
_WORD = re.compile(
    rb"""[\ \t\n\r\0\v\f]* ([^\ \t\n\r\0"']*) (?: "((?:[^"\\]|\\.)*)" | '((?:[^'\\]|\\'|\\(?!'))*)' )?""",
    re.DOTALL | re.VERBOSE,
)
_SPACE = b" \t\n\r\0\v\f"
_NOT_PLAIN = re.compile(rb"[\"'\v\f]")
_ESCAPED = re.compile(rb"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_LETTERS = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def split_words(line: bytes) -> list[bytes] | None:
    r"""Words of an inline command or a configuration line; None for unbalanced quotes. O(bytes).

    As Redis's sdssplitargs: white space separates words; "..." knows \n \r \t \b \a \\ \" and \xHH, '...' only \'.
    """
    if not _NOT_PLAIN.search(line):
        return line.replace(b"\0", b" ").split()
    words: list[bytes] = []
    pos = 0
    while pos < len(line):
        found = _WORD.match(line, pos)
        assert found is not None  # it may match nothing, but it does match
        bare, double, single = found.groups()
        pos = found.end()
        if pos < len(line) and line[pos] not in _SPACE:  # a quote that never closes, or a letter behind one that does
            return None
        quoted = _ESCAPED.sub(_meant, double) if double else (single or b"").replace(b"\\'", b"'")
        if bare or double is not None or single is not None:
            words.append(bare + quoted)
    return words


def _meant(found: re.Match[bytes]) -> bytes:
    """What an escape in double quotes stands for."""
    letter: bytes = found[1]
    return bytes.fromhex(letter[1:].decode()) if len(letter) == 3 else _LETTERS.get(letter, letter)
