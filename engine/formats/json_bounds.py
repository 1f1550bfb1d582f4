"""Counts what a JSON text holds before it is parsed.

A parser makes all objects in one call that cannot be interrupted. So what it would make is counted first, a piece of
the text at a time: lists and objects, strings, and values between commas.
"""

from __future__ import annotations

PIECE_BYTES = 64 << 10
LONG_NUMBER = b"0" * 400  # takes as long as thousands of others
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)


class TooMuchError(ValueError):
    """The text holds too much; the message says of what."""


def check(raw: bytes, *, containers: int, strings: int, values: int) -> None:
    """Raise TooMuchError for more than so many lists and objects, strings (names included), or values.

    What is no JSON may pass.
    """
    found_containers = quotes = commas = 0
    inside = False  # a string
    rest = b""  # of an escape that the last piece has begun
    for start in range(0, len(raw), PIECE_BYTES):
        piece = (rest + raw[start : start + PIECE_BYTES]).replace(b"\\\\", b"")
        rest = b"\\" if piece.endswith(b"\\") else b""
        parts = piece[: len(piece) - len(rest)].replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1::2] if inside else parts[::2])
        inside ^= len(parts) % 2 == 0
        quotes += len(parts) - 1
        found_containers += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
        if LONG_NUMBER in outside.translate(ZEROS):
            raise TooMuchError("a number of more than 400 digits")
        for found, most, what in (
            (found_containers, containers, "lists and objects"),
            (quotes // 2, strings, "strings, names included"),
            (commas, values, "values"),
        ):
            if found > most:
                raise TooMuchError(f"more than {most} {what}")
