"""Loops over bytes: rows of the lossless code of docs/page-code.md, which stores exponents in three bits; and
glob patterns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash
from typing_extensions import Buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BITS = 3  # of the code of an exponent, and of the other bits of a float16
_ESCAPE = 7
_GROUP = 8  # rows
_TRIED = 4  # bases that are tried for each channel
_SAMPLES = 32  # the most rows that are examined for a base


class _Kind(NamedTuple):
    """The bits of an element: sign, exponent, mantissa, from the highest to the lowest."""

    word: str  # of numpy
    mantissa: int  # bits
    exponent: int  # the largest exponent
    plain: int  # bytes that are stored unchanged


CODES = {1: _Kind("<u2", 7, 255, 1), 2: _Kind("<u2", 10, 31, 1), 3: _Kind("<u4", 23, 255, 3)}


def check_matrix(code: int, channels: int, nbytes: int, pages: int) -> int:
    """Return the rows of a matrix, or of each of `pages` matrices that have `channels` together.

    Raises ValueError for an invalid code, number of channels or number of pages, or incomplete rows.
    """
    if code not in CODES:
        raise ValueError(f"the code must be 1 (bfloat16), 2 (float16) or 3 (float32), got {code}")
    if channels < 8 or channels % 8:
        raise ValueError(f"the number of channels must be a multiple of 8, got {channels}")
    if pages < 1 or channels % pages:
        raise ValueError(f"{channels} channels cannot be those of {pages} pages")
    rows, left = divmod(nbytes, channels * np.dtype(CODES[code].word).itemsize)
    if left:
        raise ValueError(f"a matrix of {nbytes} bytes has no whole rows of {channels} channels")
    return rows


def encode_matrix(code: int, channels: int, body: Buffer, out: Buffer, pages: int = 1) -> int:
    """Code a matrix ``[rows, channels]`` of elements of `code`, or `pages` matrices ``[rows, channels / pages]`` that
    follow each other, side by side as one.

    Return the bytes that were written to `out`, which are the bases and the rows, or 0 if `out` is too small.

    Raises ValueError for another code, another number of channels than a multiple of 8 and of `pages`, or a body
    without whole rows.
    """
    view, room = memoryview(body).cast("B"), memoryview(out).cast("B")
    rows, kind = check_matrix(code, channels, len(view), pages), CODES[code]
    if rows == 0:
        return 0
    by_page = np.frombuffer(view, kind.word).reshape(pages, rows, -1)
    words = by_page.swapaxes(0, 1).reshape(rows, channels).astype(np.uint32)
    exponents = (words >> kind.mantissa & kind.exponent).astype(np.uint8)
    base = _bases(exponents)
    below = base - exponents  # modulo 256: an exponent above the base is an escape, too
    codes = np.minimum(below, _ESCAPE)
    pieces = [base.tobytes()]
    for start in range(0, rows, _GROUP):
        group = slice(start, start + _GROUP)
        pieces += [plain.tobytes() for plain in _plain(kind, words[group])]
        pieces.append(_pack(codes[group]))
        if kind.exponent == 31:
            pieces.append(_pack((words[group] >> 8 & 3 | words[group] >> 13 & 4).astype(np.uint8)))
    pieces.append(exponents[codes == _ESCAPE].tobytes())
    coded = b"".join(pieces)
    if len(coded) > len(room):
        return 0
    room[: len(coded)] = coded
    return len(coded)


def encode_array(head: bytes, code: int, channels: int, body: Buffer, most: int) -> bytes | None:
    """Return `head` and then the code of a matrix, see `encode_matrix`, or None if both have more than `most` bytes.

    `head` has at least 16 bytes. Bytes 8 to 15 are replaced by the XXH3-64 of all bytes after them, with the eight
    bytes before them as the seed.

    Raises ValueError as `encode_matrix`.
    """
    coded = bytearray(max(most - len(head), 0))
    size = encode_matrix(code, channels, body, coded)
    if not size:
        return None
    hashed = head[16:] + coded[:size]
    digest = xxhash.xxh3_64_intdigest(hashed, int.from_bytes(head[:8], "little"))
    return head[:8] + digest.to_bytes(8, "little") + hashed


def decode_matrix(code: int, channels: int, coded: Buffer, out: Buffer, pages: int = 1) -> bool:
    """Decode a matrix into `out`, or as `pages` matrices that follow each other, see `encode_matrix`. Return whether
    `coded` has exactly its bytes; if not, `out` is undefined.

    Raises ValueError for another code, another number of channels than a multiple of 8 and of `pages`, or an `out`
    without whole rows.
    """
    view, values = np.frombuffer(memoryview(coded), np.uint8), memoryview(out).cast("B")
    rows, kind = check_matrix(code, channels, len(values), pages), CODES[code]
    packed = rows // _GROUP * _BITS + (rows % _GROUP * _BITS + 7) // 8
    fixed = channels * (1 + rows * kind.plain + packed * (2 if kind.exponent == 31 else 1))
    if len(view) < fixed:
        return False
    base, at = view[:channels], channels
    words = np.zeros((rows, channels), np.uint32)
    codes = np.zeros((rows, channels), np.uint8)
    for start in range(0, rows, _GROUP):
        group = slice(start, min(start + _GROUP, rows))
        count = group.stop - start
        plain = view[at : at + count * channels * kind.plain].reshape(kind.plain, count, channels).astype(np.uint32)
        at += plain.size
        size = (count * _BITS + 7) // 8 * channels
        codes[group] = _unpack(view[at : at + size], count, channels)
        at += size
        if kind.exponent == 31:
            other = _unpack(view[at : at + size], count, channels).astype(np.uint32)
            at += size
            words[group] = (other & 4) << 13 | (other & 3) << 8 | plain[0]
        else:
            high = (plain[-1] & 0x80) << 8 | plain[-1] & 0x7F
            words[group] = high if kind.plain == 1 else high << 16 | plain[1] << 8 | plain[0]
    escaped = codes == _ESCAPE
    if np.count_nonzero(escaped) != len(view) - at:
        return False
    exponents = base - codes
    exponents[escaped] = view[at:]
    words |= (exponents & kind.exponent).astype(np.uint32) << kind.mantissa
    values[:] = words.reshape(rows, pages, channels // pages).swapaxes(0, 1).astype(kind.word).tobytes()
    return True


def _bases(exponents: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the base of each channel: the largest exponent of the examined rows, or one of the next three if fewer of
    these exponents are then escapes.
    """
    examined = exponents[:: -(-len(exponents) // _SAMPLES)]
    top = examined.max(axis=0)
    bases = [top - down for down in range(_TRIED)]
    escapes = [np.count_nonzero(base - examined >= _ESCAPE, axis=0) for base in bases]
    best: NDArray[np.uint8] = np.choose(np.argmin(escapes, axis=0), bases)
    return best


def _plain(kind: _Kind, words: NDArray[np.uint32]) -> list[NDArray[np.uint8]]:
    """Return the bytes of elements that are stored unchanged. The highest one has the sign and bits of the mantissa."""
    if kind.exponent == 31:
        return [words.astype(np.uint8)]
    shift = kind.mantissa - 7
    high = (words >> (shift + 8) & 0x80 | words >> shift & 0x7F).astype(np.uint8)
    return [(words >> 8 * i).astype(np.uint8) for i in range(kind.plain - 1)] + [high]


def _pack(numbers: NDArray[np.uint8]) -> bytes:
    """Pack rows of numbers of three bits. Bit b of the number in row r is bit 3 * r + b of the bytes of its column."""
    bits = numbers[:, None, :] >> np.arange(_BITS, dtype=np.uint8)[None, :, None] & 1
    return np.packbits(bits.reshape(-1, numbers.shape[1]), axis=0, bitorder="little").tobytes()


def _unpack(packed: NDArray[np.uint8], rows: int, channels: int) -> NDArray[np.uint8]:
    bits = np.unpackbits(packed.reshape(-1, channels), axis=0, bitorder="little")[: rows * _BITS]
    weights = (1 << np.arange(_BITS, dtype=np.uint8))[None, :, None]
    numbers: NDArray[np.uint8] = (bits.reshape(rows, _BITS, channels) * weights).sum(axis=1, dtype=np.uint8)
    return numbers


# -- Glob patterns ----------------------------------------------------------------------------------------------------

LONGEST_PATTERN = 1024  # bytes
LONGEST_PART = 64  # bytes that a part between two stars matches, if it has a ? or a class

_STAR = b""  # a star from `_elements`; any other element is the regular expression of one byte
_EVERY = bytes(range(256))


class Glob:
    """A compiled pattern. Stars divide it into parts of a fixed length. The first and the last part are compared at the
    two ends of a name, and each part between them at its first occurrence, without backtracking.
    """

    def __init__(self, pattern: bytes, ignore_case: bool = False) -> None:
        """Compile a pattern. Raises ValueError for a long pattern, or a long part with wildcards."""
        if len(pattern) > LONGEST_PATTERN:
            raise ValueError(f"a pattern has at most {LONGEST_PATTERN} bytes, got {len(pattern)}")
        parts: list[list[bytes]] = [[]]
        for element in _elements(pattern, ignore_case):
            if element == _STAR:
                parts.append([])
            else:
                parts[-1].append(element)
        self._has_star, self._only_stars = len(parts) > 1, len(parts) > 1 and not any(parts)
        first, *middle, last = parts if self._has_star else (*parts, [])
        self._first, self._last = (re.compile(b"".join(part), re.DOTALL) for part in (first, last))
        self._sizes = len(first), len(last)
        self._middle = [(_finder(part), len(part)) for part in middle if part]
        self.nbytes = 512 + 80 * len(pattern)  # the memory that the pattern takes at most, in bytes

    def matches(self, name: bytes) -> bool:
        """Return whether the pattern matches a whole name."""
        start, end = self._sizes[0], len(name) - self._sizes[1]
        if not self._has_star:
            return start == end and self._first.match(name) is not None
        if self._only_stars:
            return len(name) > 0
        if start > end or not self._first.match(name) or not self._last.match(name, end):
            return False
        for find, size in self._middle:
            at = find(name, start, end)
            if at < 0:
                return False
            start = at + size
        return True


def _finder(part: list[bytes]) -> Callable[[bytes, int, int], int]:
    """Return a function that searches a name, from a position up to another, for the first occurrence of a part. It
    returns the position, or -1. Raises ValueError for a long part with wildcards.
    """
    plain = [element[-1:] for element in part]
    if part == [re.escape(byte) for byte in plain]:
        return partial(_find, b"".join(plain))
    if len(part) > LONGEST_PART:
        raise ValueError(
            f"a part of a pattern between two stars that has a ? or [ matches at most {LONGEST_PART} bytes, "
            f"got {len(part)}"
        )
    return partial(_search, re.compile(b"".join(part), re.DOTALL))


def _find(part: bytes, name: bytes, start: int, end: int) -> int:
    return name.find(part, start, end)


def _search(part: re.Pattern[bytes], name: bytes, start: int, end: int) -> int:
    found = part.search(name, start, end)
    return -1 if found is None else found.start()


def literal(pattern: bytes) -> bytes | None:
    """Return the only name that a pattern matches; None if it has wildcards. A backslash quotes the next byte."""
    plain = re.sub(rb"\\(.)", b"", pattern, flags=re.DOTALL)
    return None if re.search(rb"[*?[\\]", plain) else re.sub(rb"\\(.)", rb"\1", pattern, flags=re.DOTALL)


def _elements(pattern: bytes, ignore_case: bool) -> Iterator[bytes]:
    """Yield the elements of a pattern in order: `_STAR`, or the regular expression of one byte."""
    pos, size = 0, len(pattern)
    while pos < size:
        char = pattern[pos : pos + 1]
        if char == b"*":
            yield _STAR
        elif char == b"?":
            yield b"."
        elif char == b"[":
            element, pos = _class(pattern, pos + 1, ignore_case)
            yield element
            continue
        else:
            if char == b"\\" and pos + 1 < size:
                pos += 1
                char = pattern[pos : pos + 1]
            yield _one_of({char[0]} if not ignore_case else {char.lower()[0], char.upper()[0]})
        pos += 1


def _class(pattern: bytes, pos: int, ignore_case: bool) -> tuple[bytes, int]:
    """Return the regular expression of the class, such as [a-z], whose members begin at `pos`, and the position after
    it.
    """
    size = len(pattern)
    negated = pattern[pos : pos + 1] == b"^"
    pos += negated
    members: set[int] = set()
    while pos < size and pattern[pos] != 0x5D:  # ']'
        if pattern[pos] == 0x5C and size - pos >= 2:  # '\'
            members.add(pattern[pos + 1])
            pos += 2
        elif size - pos >= 3 and pattern[pos + 1] == 0x2D:  # '-'
            members |= _range(pattern[pos], pattern[pos + 2], ignore_case)
            pos += 3
        else:
            members |= _range(pattern[pos], pattern[pos], ignore_case)
            pos += 1
    if negated:
        members = set(_EVERY) - members
    return _one_of(members), pos + 1


def _range(start: int, end: int, ignore_case: bool) -> set[int]:
    low, high = min(start, end), max(start, end)
    if not ignore_case:
        return set(range(low, high + 1))
    folded = _EVERY.lower()
    return {byte for byte in _EVERY if folded[low] <= folded[byte] <= folded[high]}


def _one_of(members: set[int]) -> bytes:
    if len(members) == 1:
        return re.escape(bytes(members))
    if not members:
        return b"(?!)"
    negated = len(members) > len(_EVERY) // 2
    ranges: list[list[int]] = []
    for byte in sorted(set(_EVERY) - members if negated else members):
        if ranges and ranges[-1][1] == byte - 1:
            ranges[-1][1] = byte
        else:
            ranges.append([byte, byte])
    text = b"".join(b"\\x%02x-\\x%02x" % (first, last) for first, last in ranges)
    return b"[^%b]" % text if negated and text else b"[%b]" % text if text else b"."
