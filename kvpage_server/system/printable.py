"""Text of others, such as names that clients chose, made harmless for terminals, logs and formats of lines."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with escapes for what cannot be printed: control characters, ends of lines, invisible characters, those
    that reverse the direction of writing, and bytes that are not UTF-8."""
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(letter: str) -> str:
    if letter.isprintable():
        return letter
    if "\udc80" <= letter <= "\udcff":  # a byte, as `surrogateescape` decodes it
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()
