"""What may come instead of bodies."""

from __future__ import annotations

MAX_LINE = 64 * 1024  # bytes of an error
MAX_FRAME = 24  # and of a line before a body, CRLF included
MAX_BULK = 0xFFFF_FFFF + 64  # the longest blob


class WrongAnswer(ValueError):
    """Bytes that are no answer to what was asked."""


class ErrorAnswer(Exception):
    """An error line, without its '-'."""

    def __init__(self, line: bytes) -> None:
        super().__init__(line)
        self.line = line


def wrong_answer(item: int, count: int, found: bytes) -> WrongAnswer:
    """The error for what came where `item`, or behind the last of `count` what nothing, should have come."""
    if item < 0:
        return WrongAnswer(f"instead of {count} pages came {found[:40]!r}")
    if item == count:
        return WrongAnswer(f"behind the last of {count} pages came {found[:40]!r}")
    return WrongAnswer(f"instead of page {item} of {count} came {found[:40]!r}")
