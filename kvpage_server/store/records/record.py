"""The description of a value on disk: its name, its expiry, where its body is, and the digests of both.

A name is `k` and the key of a string or a page, or `b` and a block's request and page. LMDB takes keys of up to 511
bytes, so a longer name is stored under its hash, and is in the record.

    [8: XXH3-64 of all that follows and of the name][head][meta][name, if it is stored under its hash][body, if short]

All numbers are little-endian. `meta` is a page's 64-byte header, a block's shape, or empty.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from typing_extensions import Buffer

from kvpage_server.page import checksum

INLINE = 1024  # bytes of the longest body that is in its record
PIECE = 64 * 4096 - 16  # bytes of a piece; with LMDB's own 16 it fills its pages, which lie one after another
SHORT_PIECE = 4096 - 16  # where so many pages in a row are not free
_SHORT = 1 << 63  # in the number of the first piece: they are short
_LONGEST_KEY = 500
_DIGEST = struct.Struct("<Q")
_HEAD = struct.Struct("<HIQQQQQ")  # sizes of meta and name; expires, used, size, digest, first


class Damaged(Exception):
    """What is on disk is not what was stored; the message says how that shows."""


def name_of_key(key: bytes) -> bytes:
    """The name of a string or a page."""
    return b"k" + key


def name_of_block(req_id: bytes, page: int) -> bytes:
    """The name of a block that is stored whole."""
    return b"b%b:%d" % (req_id, page)


def database_key(name: bytes) -> bytes:
    """The key under which a name is stored."""
    return name if len(name) <= _LONGEST_KEY else b"h" + blake2b(name, digest_size=32).digest()


class Body(NamedTuple):
    """Where a body is: `inline`, or in pieces from number `first` on. `digest` is its XXH3-64.

    `first` also says whether the pieces are short ones, see `first_of`.
    """

    size: int
    digest: int
    first: int
    inline: bytes = b""

    @property
    def pieces(self) -> range:
        number = self.first & ~_SHORT
        return range(number, number - (-self.size // self.piece)) if self.first else range(0)

    @property
    def piece(self) -> int:
        """Bytes of each piece but the last."""
        return SHORT_PIECE if self.first & _SHORT else PIECE


def first_of(number: int, piece: int) -> int:
    """`Body.first` for pieces of so many bytes from that number on."""
    return number | _SHORT if piece == SHORT_PIECE else number


@dataclass(slots=True)
class Record:
    """A value on disk. `expires` and `used` (its last use, if known) are in unix milliseconds, 0 for never."""

    name: bytes
    meta: bytes
    expires: int
    used: int
    body: Body

    def __bytes__(self) -> bytes:
        stored_under, (size, digest, first, inline) = database_key(self.name), self.body
        name = b"" if stored_under == self.name else self.name
        head = _HEAD.pack(len(self.meta), len(name), self.expires, self.used, size, digest, first)
        rest = b"".join((head, self.meta, name, inline))
        return _DIGEST.pack(checksum(rest + stored_under)) + rest

    @classmethod
    def parse(cls, stored_under: bytes, data: Buffer) -> Record:
        """The record of a database key. Raises Damaged."""
        raw = bytes(data)
        start = _DIGEST.size + _HEAD.size
        if len(raw) < start or _DIGEST.unpack_from(raw)[0] != checksum(raw[_DIGEST.size :] + stored_under):
            raise Damaged("its record does not match the record's checksum")
        meta_size, name_size, expires, used, size, digest, first = _HEAD.unpack_from(raw, _DIGEST.size)
        after_meta = start + meta_size
        after_name = after_meta + name_size
        name = raw[after_meta:after_name] if name_size else stored_under
        return cls(name, raw[start:after_meta], expires, used, Body(size, digest, first, raw[after_name:]))


def footprint(name: bytes, size: int) -> int:
    """Roughly the bytes that a string or a block that is stored whole takes."""
    return room_for(64 + len(name), size)


def room_for(described: int, size: int) -> int:
    """Roughly the bytes that a body of this size and what describes it take.

    A long body has pages of LMDB, of 4 KiB, for itself. Short bodies, of strings and pages alike, share pages with
    others, and so do descriptions. Such pages are two thirds full. A commit that changes something in one writes all
    of it again, so one that changes values here and there needs room for each of these pages twice. So what shares
    pages counts three times. Bodies of 1 to 2 KiB lie by twos and threes, and count a page each, which is as much.
    """
    if size <= INLINE:
        return 3 * (described + size)
    whole, rest = divmod(size, PIECE)
    return 3 * described + 4096 * (64 * whole + -(-(rest + 16) // 4096 if rest else 0))
