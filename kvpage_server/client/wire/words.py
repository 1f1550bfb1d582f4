"""Commands as they go over the wire."""

from __future__ import annotations


def word(text: bytes | int) -> bytes:
    text = text if isinstance(text, bytes) else b"%d" % text
    return b"$%d\r\n%b\r\n" % (len(text), text)


def command(*words: bytes | int) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join(map(word, words)))


def around_set(ttl: int) -> tuple[bytes, bytes]:
    """The bytes before the key and after the value of a SET; `ttl` in seconds, 0 for none."""
    if ttl:
        return b"*5\r\n" + word(b"SET"), b"\r\n" + word(b"EX") + word(ttl)
    return b"*3\r\n" + word(b"SET"), b"\r\n"
