"""Bounded readers of files and JSON from other programs, and batches of bounded size."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from io import BufferedReader
from math import isinf
from pathlib import Path
from typing import Any, TypeVar

# -- Files from other programs, such as configurations and dumps. Opening one never waits for a writer -----------------


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file to read, without waiting. Raises OSError, also for a directory, pipe, socket or device."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_regular(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most `most` bytes. Raises OSError, also for a larger file."""
    with open_regular(path) as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


# -- JSON from other programs, such as requests, dumps and traces ------------------------------------------------------
#
# The parser creates all objects in one call that cannot be interrupted. So `check` counts lists and objects, strings
# and commas first, one piece of the text at a time.

PIECE_BYTES = 64 << 10
LONG_NUMBER = b"0" * 400  # refused, because it takes as long to parse as thousands of short ones
ZEROS = bytes.maketrans(b"123456789", b"0" * 9)  # replaces digits, to find a long number


class TooMuchError(ValueError):
    """Error: a text exceeds a bound of `check`, which the message names."""


def parse(raw: bytes, *, containers: int, strings: int, values: int) -> Any:
    """Return the value of a JSON text in UTF-8, after it has passed `check` with these bounds.

    Raises ValueError with the reason for other text, and also for a number that is not finite, a name that an object
    has twice, and lists or objects that are nested too deeply for Python's parser.
    """
    check(raw, containers=containers, strings=strings, values=values)
    try:
        return json.loads(raw.decode(), object_pairs_hook=_object, parse_float=_finite, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply") from None


def check(raw: bytes, *, containers: int, strings: int, values: int) -> None:
    """Raise TooMuchError for a JSON text with more lists and objects, strings (names included) or commas than these
    bounds.

    Also raise it for a number of 400 digits or more. The text is not parsed, so invalid JSON may pass.
    """
    found_containers = quotes = commas = 0
    inside = False  # whether the next piece begins in a string
    rest = b""  # the backslash of an escape at the end of the last piece
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


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(members)
    if len(made) < len(members):
        twice, _ = Counter(name for name, _ in members).most_common(1)[0]
        raise ValueError(f"an object has the name {twice!r:.60} twice")
    return made


def _finite(text: str) -> float:
    value = float(text)
    if isinf(value):
        raise ValueError(f"the number {text:.40} is too large")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


# -- Batches of bounded size -------------------------------------------------------------------------------------------

T = TypeVar("T")


def batches(sized: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Group items into lists of at most `most` bytes, in order. `sized` yields pairs of an item and its bytes.

    An item of more than `most` bytes is in a list of its own.
    """
    some: list[T] = []
    total = 0
    for thing, nbytes in sized:
        if some and total + nbytes > most:
            yield some
            some, total = [], 0
        some.append(thing)
        total += nbytes
    if some:
        yield some
