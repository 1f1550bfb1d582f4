"""Parsers of the words that name and describe a page in `KVPAGE` commands, and their error messages.

The Python core parses every page with these functions. The native core has its own parser, and calls these functions
only for words that it rejects. So both cores have the same error messages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvpage_server.page import (
    ALLOWED_DTYPES,
    MAX_HEAD,
    MAX_KV_TYPE,
    MAX_LAYER,
    MAX_PAGE,
    MAX_TTL,
    MAX_U32,
    DType,
    PageError,
    check_range,
    check_req_id,
)

NAME_WORDS = 5  # words of a name: req_id layer head page_id kv_type
PAGE_WORDS = 10  # words of a page to store: its name, and dtype page_size head_dim ttl body
LONGEST_WORD = 4 * 1024 * 1024  # bytes of a word that is not a value
LONGEST_TOGETHER = LONGEST_WORD  # bytes of all names of a command: each is copied, hashed and compared in one step

Word = Any  # bytes, or a slot for a long word

_INTEGER = re.compile(rb"-?(?:0|[1-9]\d{0,18})\Z")
I64 = (-(2**63), 2**63 - 1)  # the smallest and the largest signed 64-bit integer


class BadPage(PageError):
    """Error: the words of a page in a batch are invalid. `place` is the index of the page in the batch, from 0."""

    def __init__(self, text: str, place: int) -> None:
        super().__init__(text)
        self.place = place


class PageName(NamedTuple):
    """A page's key and its parts."""

    key: bytes
    req_id: bytes
    layer: int
    head: int
    page: int
    kv_type: int


class Shape(NamedTuple):
    """The tensor of a page, and its TTL, from the command's words."""

    dtype: int
    page_size: int
    head_dim: int
    ttl: int  # seconds


def as_integer(word: Word) -> int | None:
    """Return a word as a signed 64-bit integer, or None for any other word: '+1', ' 1', '01', '-0', or a `Slot`."""
    if type(word) is not bytes:
        return None
    # The usual numbers, without the regular expression.
    if word.isdigit() and len(word) < 19 and (word[0] != 0x30 or len(word) == 1):
        return int(word)
    if not _INTEGER.match(word) or word == b"-0":
        return None
    value = int(word)
    return value if I64[0] <= value <= I64[1] else None


def integer_in(name: str, word: Word, low: int, high: int) -> int:
    """Return a word as an integer from `low` to `high`, both included.

    Raise PageError otherwise, with the argument's `name`, the range and the word.
    """
    value = as_integer(word)
    if value is None or not low <= value <= high:
        shown = shorten(plain(word))
        raise PageError(f"{name} must be an integer between {low} and {high}, got '{shown}'")
    return value


def plain(word: Word) -> bytes:
    """Return the bytes of a word. They are copied if it is a `Slot`.

    Raise PageError for a `Slot` of more than LONGEST_WORD bytes.
    """
    if isinstance(word, bytes):
        return word
    if word.size > LONGEST_WORD:
        raise PageError(f"only a value may be longer than {LONGEST_WORD} bytes, got {word.size}")
    return bytes(word.body)


def shorten(raw: bytes, most: int = 32) -> str:
    """Return bytes of a client as text for an error message, cut after `most` bytes or before the first NUL.

    Bytes that are no UTF-8 become surrogate escapes.
    """
    return raw[:most].split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def page_name(words: Sequence[Word]) -> PageName:
    """Return the page that five words name: req_id, layer, head, page id, kv_type.

    Raise PageError for the first invalid word.
    """
    req_id = check_req_id(plain(words[0]))
    layer = integer_in("layer_idx", words[1], 0, MAX_LAYER)
    head = integer_in("head_idx", words[2], 0, MAX_HEAD)
    page = integer_in("page_id", words[3], 0, MAX_PAGE)
    kv_type = integer_in("kv_type", words[4], 0, MAX_KV_TYPE)
    return PageName(b"kv:%b:%b" % (req_id, b":".join(words[1:NAME_WORDS])), req_id, layer, head, page, kv_type)


def page_shape(words: Sequence[Word], nbytes: int, *, strict: bool) -> Shape:
    """Return the shape from the four words before a body of `nbytes` bytes: dtype, page_size, head_dim, ttl in seconds.

    Raise PageError for the first invalid word, or if `nbytes` exceeds 2^32 - 1. With `strict`, `nbytes` must be
    page_size x head_dim x bytes of the dtype.
    """
    check_range("body length", nbytes, 0, MAX_U32)
    dtype = integer_in("dtype", words[0], 0, 255)
    if dtype not in DType.__members__.values():
        raise PageError(f"dtype must be one of {ALLOWED_DTYPES}, got {dtype}")
    rows = integer_in("page_size", words[1], 1, MAX_U32)
    columns = integer_in("head_dim", words[2], 1, MAX_U32)
    ttl = integer_in("ttl", words[3], 0, MAX_TTL)
    if strict and nbytes != (full := rows * columns * DType(dtype).itemsize):
        raise PageError(f"body must be page_size x head_dim x itemsize = {full} bytes, got {nbytes}")
    return Shape(dtype, rows, columns, ttl)
