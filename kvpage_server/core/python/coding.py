"""Loops over bytes: rows of the lossless code of docs/page-code.md, which stores exponents in three bits; and the
search for a sequence of byte classes, the part of a glob pattern between two stars.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
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


def check_matrix(code: int, channels: int, nbytes: int) -> int:
    """Return the rows of a matrix. Raises ValueError for an invalid code or number of channels, or incomplete rows."""
    if code not in CODES:
        raise ValueError(f"the code must be 1 (bfloat16), 2 (float16) or 3 (float32), got {code}")
    if channels < 8 or channels % 8:
        raise ValueError(f"the number of channels must be a multiple of 8, got {channels}")
    rows, left = divmod(nbytes, channels * np.dtype(CODES[code].word).itemsize)
    if left:
        raise ValueError(f"a matrix of {nbytes} bytes has no whole rows of {channels} channels")
    return rows


def encode_matrix(code: int, channels: int, body: Buffer, out: Buffer) -> int:
    """Code a matrix ``[rows, channels]`` of elements of `code`.

    Return the bytes that were written to `out`, which are the bases and the rows, or 0 if `out` is too small.

    Raises ValueError for another code, another number of channels than a multiple of 8, or a body without whole rows.
    """
    view, room = memoryview(body).cast("B"), memoryview(out).cast("B")
    rows, kind = check_matrix(code, channels, len(view)), CODES[code]
    if rows == 0:
        return 0
    words = np.frombuffer(view, kind.word).reshape(rows, channels).astype(np.uint32)
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


def decode_matrix(code: int, channels: int, coded: Buffer, out: Buffer) -> bool:
    """Decode a matrix into `out`. Return whether `coded` has exactly its bytes; if not, `out` is undefined.

    Raises ValueError for another code, another number of channels than a multiple of 8, or an `out` without whole rows.
    """
    view, values = np.frombuffer(memoryview(coded), np.uint8), memoryview(out).cast("B")
    rows, kind = check_matrix(code, channels, len(values)), CODES[code]
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
    values[:] = words.astype(kind.word).tobytes()
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


# -- Search for byte classes ------------------------------------------------------------------------------------------


def find_classes(masks: bytes, bit: int, size: int, string: bytes, start: int, end: int) -> int:
    """Return the first position from `start` at which `size` successive bytes of a string, up to `end`, are each in
    their class; -1 if there is none. `masks` has 256 uint64 in the order of the machine: bit `bit` + i of a byte's mask
    says whether it is in class i. The other bits are for other searches.
    """
    if len(masks) != 2048 or not (0 <= bit < bit + size <= 64 and 0 <= start <= end <= len(string)):
        raise ValueError("masks are 256 words of 64 bits, and the positions are within the string")
    mask_of, matched, first, whole = array("Q", masks), 0, 1 << bit, 1 << (bit + size - 1)
    within = (whole << 1) - first
    for i in range(start, end):
        matched = (matched << 1 | first) & mask_of[string[i]] & within
        if matched & whole:
            return i - size + 1
    return -1
