"""Words of a line as Redis splits them: inline commands and configuration files."""

from __future__ import annotations

_ESCAPES = {0x6E: 0x0A, 0x72: 0x0D, 0x74: 0x09, 0x62: 0x08, 0x61: 0x07}  # \n \r \t \b \a
_BREAK = b" \t\n\r\0"  # ends a word
_SPACE = _BREAK + b"\v\f"  # is skipped before one


def split_words(line: bytes) -> list[bytes] | None:
    r"""Words of an inline command or a configuration line; None for unbalanced quotes.

    As Redis's sdssplitargs: white space separates words; "..." knows \n \r \t \b \a \\ \" and \xHH, '...' only \'.
    """
    words: list[bytes] = []
    pos, size = 0, len(line)
    while True:
        while pos < size and line[pos] in _SPACE:
            pos += 1
        if pos == size:
            return words
        word = bytearray()
        while pos < size and line[pos] not in _BREAK:
            if line[pos] not in b"\"'":
                word.append(line[pos])
                pos += 1
                continue
            end = _quoted(line, pos, word)
            if end is None or (end < size and line[end] not in _SPACE):
                return None
            pos = end
            break
        words.append(bytes(word))


def _quoted(line: bytes, pos: int, word: bytearray) -> int | None:
    """Append the quoted string that opens at `pos` to `word`; the position after it, None when it never closes."""
    quote = line[pos]
    pos += 1
    while pos < len(line):
        char = line[pos]
        if char == quote:
            return pos + 1
        after = line[pos + 1 : pos + 2]
        if char == 0x5C and after and (quote == 0x22 or after == b"'"):
            if quote == 0x22 and after == b"x" and _is_hex(line[pos + 2 : pos + 4]):
                word.append(int(line[pos + 2 : pos + 4], 16))
                pos += 4
                continue
            word.append(_ESCAPES.get(after[0], after[0]) if quote == 0x22 else after[0])
            pos += 2
            continue
        word.append(char)
        pos += 1
    return None


def _is_hex(pair: bytes) -> bool:
    return len(pair) == 2 and all(c in b"0123456789abcdefABCDEF" for c in pair)
