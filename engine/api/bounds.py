"""How much a body may hold, seen before it is parsed.

A parser makes an object of everything it is told, in one call that nobody can interrupt, whether the field exists or
not. So what is counted is what it would make: lists and objects, strings, and what lies between commas. Counting looks
at a piece of the body at a time.
"""

from __future__ import annotations

from engine.api.errors import invalid

MAX_CONTAINERS = 8_192  # lists and objects
MAX_STRINGS = 16_384  # names of fields included; a conversation of 4,096 messages has as many
MAX_VALUES = 131_072  # so that a prompt can be given as token ids
PIECE = 64 << 10  # bytes
LONG_NUMBER = b"0" * 400  # takes as long as thousands of others
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


def check(raw: bytes) -> None:
    """Raise ApiError for JSON that holds too much. What is no JSON may pass."""
    containers = quotes = values = 0
    inside = False  # a string
    rest = b""  # of an escape that the last piece has begun
    for start in range(0, len(raw), PIECE):
        piece = (rest + raw[start : start + PIECE]).replace(b"\\\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece[: len(piece) - len(rest)].replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1::2] if inside else parts[::2])
        inside ^= len(parts) % 2 == 0
        quotes += len(parts) - 1
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        if LONG_NUMBER in outside.translate(ZEROS):
            raise invalid("a number has at most 400 digits", code="body_too_large")
        for found, most, what in (
            (containers, MAX_CONTAINERS, "lists and objects"),
            (quotes // 2, MAX_STRINGS, "strings, names of fields included"),
            (values, MAX_VALUES, "values"),
        ):
            if found > most:
                raise invalid(f"the body holds more than {most} {what}", code="body_too_large")
