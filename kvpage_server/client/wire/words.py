"""Commands as they go over the wire."""

from __future__ import annotations


def word(text: bytes | int) -> bytes:
    text = text if isinstance(text, bytes) else b"%d" % text
    return b"$%d\r\n%b\r\n" % (len(text), text)


def command(*words: bytes | int) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join(map(word, words)))
