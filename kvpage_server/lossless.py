"""Lossless code of arrays: floating-point values of a KV cache take 0.7 of their bytes (bfloat16), bit for bit.

docs/page-code.md describes the format and its source.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import groupby

import numpy as np
import xxhash
from typing_extensions import Buffer

from kvpage_server.core import decode_matrix, encode_array, encode_matrix
from kvpage_server.page import BlockShape, DType, PageError, check_dtype

_CODES = {DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FLOAT32: 3}
CODED_DTYPES = frozenset(_CODES)
_ITEMSIZES = {code: dtype.itemsize for dtype, code in _CODES.items()}
_VERSION = 1
_WIDTH = 3  # bits of the code of an exponent
# Code, version, width, 0, bytes of the array or block, XXH3-64 of the bytes after it with the eight bytes before it as
# the seed.
_SEAL = struct.Struct("<BBBBIQ")
_HEAD = struct.Struct(_SEAL.format + "I")  # of an array: also its channels
HASHED_FROM = _SEAL.size  # offset of the bytes whose hash a coded array or block begins with
_MOST = 2**32 - 1  # bytes of an array or block

# A block consists of parts: consecutive pages with equal dtype and head_dim. A part is coded as one matrix, whose rows
# have the tokens of all its pages side by side.
_BLOCK = 4  # code
_PART = struct.Struct("<BBBBIIII")  # code, or 0 if it is not coded, 3 zeros, pages, rows, channels of a page, bytes
_LONGEST_PART = 1 << 17  # bytes, unless one page has more


def encode_lossless(array: Buffer, dtype: DType) -> bytes | None:
    """Return the code of an array ``[..., channels]`` of bfloat16, float16 or float32, or None.

    `array` is C-contiguous, and its items have the size of `dtype`: a view as uint16 will do for bfloat16. None means
    that the array stays as it is: it has another dtype, its channels are no multiple of 8, it has 4 GiB or more, or the
    code would save less than a tenth. Raises PageError if the size of its items is another, and TypeError or ValueError
    if it is no C-contiguous buffer.
    """
    view = memoryview(array)
    if type(dtype) is not DType:
        dtype = check_dtype(dtype)
    if view.itemsize != dtype.itemsize:
        raise PageError(f"an array of {dtype.name.lower()} has items of {dtype.itemsize} bytes, got {view.itemsize}")
    if not view.shape:
        raise PageError("an array has at least one dimension, got none")
    code, channels, nbytes = _CODES.get(dtype), view.shape[-1], view.nbytes
    room = nbytes - nbytes // 10
    if code is None or channels % 8 or not _HEAD.size < room or nbytes > _MOST:
        return None
    return encode_array(
        _HEAD.pack(code, _VERSION, _WIDTH, 0, nbytes, 0, channels), code, channels, view.cast("B"), room
    )


def decode_lossless(coded: Buffer) -> bytearray:
    """Return the bytes of an array from its code.

    Raises PageError if the code is damaged, or of another version.
    """
    view = memoryview(coded).cast("B")
    code, size = _checked(view, len(_CODES))
    if size > 4 * len(view):  # before memory is allocated
        raise PageError(f"an array of {size} bytes does not have a code of {len(view)}")
    array = bytearray(size)
    _decode_array(code, view, memoryview(array))
    return array


# -- Bodies of pages and blocks on disk --------------------------------------------------------------------------------


def encode_page_body(body: Buffer, dtype: DType, page_size: int, head_dim: int) -> bytes | None:
    """Return the code of a page's body, see `encode_lossless`; None also if its length does not match its shape."""
    view = memoryview(body)
    if dtype not in _CODES or not len(view) or len(view) != page_size * head_dim * dtype.itemsize:
        return None
    return encode_lossless(view.cast("I" if dtype.itemsize == 4 else "H", (page_size, head_dim)), dtype)


def encode_block_body(body: Buffer, shape: BlockShape) -> memoryview | None:
    """Return the code of a block's body; None if it stays as it is, because the code would save less than a tenth."""
    view, nbytes = memoryview(body), shape.nbytes
    if not nbytes or len(view) != nbytes or nbytes > _MOST or not any(plane.dtype in _CODES for plane in shape.planes):
        return None
    coded = np.empty(nbytes - nbytes // 10, np.uint8).data
    start, at, rows = 0, HASHED_FROM, shape.page_size
    for dtype, channels, pages in _parts(shape):
        part = view[start : (start := start + pages * rows * channels * dtype.itemsize)]
        code, room = _CODES.get(dtype, 0), coded[at + _PART.size :]
        size = _encode_part(code, pages, rows, part, room) if code and not pages * channels % 8 else 0
        if not size:
            if len(part) > len(room):
                return None
            code, size = 0, len(part)
            np.copyto(np.frombuffer(room[:size], np.uint8), np.frombuffer(part, np.uint8))
        _PART.pack_into(coded, at, code, 0, 0, 0, pages, rows, channels, size)
        at += _PART.size + size
    coded = coded[:at]
    _SEAL.pack_into(coded, 0, _BLOCK, _VERSION, _WIDTH, 0, nbytes, 0)
    coded[8:HASHED_FROM] = _digest_of(coded).to_bytes(8, "little")
    return coded


def decode_body(coded: Buffer, into: memoryview, shape: BlockShape | None = None) -> None:
    """Decode the body of a page or a block into memory of its size.

    Raises PageError if the code is damaged, of another version, or of a body of another size. `into` is undefined then.
    With `shape`, the code must be that of a block, and have the pages, page_size, head_dim and dtypes of this shape.
    """
    view = memoryview(coded).cast("B")
    code, size = _checked(view, _BLOCK)
    if size != len(into):
        raise PageError(f"the code is that of {size} bytes, not of {len(into)}")
    if shape is not None and not (code == _BLOCK and _has_shape(view, shape)):
        raise PageError("the code is that of a block with another shape or dtype")
    if code == _BLOCK:
        _decode_parts(view, into)
    else:
        _decode_array(code, view, into)


def seal_of(coded: Buffer) -> tuple[int, int]:
    """Return the seed and the XXH3-64 of the bytes from `HASHED_FROM` on, as a coded array or block has them.

    Raises PageError if it is too short.
    """
    view = memoryview(coded)
    if len(view) < HASHED_FROM:
        raise PageError(f"coded bytes begin with {HASHED_FROM} bytes, got {len(view)}")
    return int.from_bytes(view[:8], "little"), int.from_bytes(view[8:HASHED_FROM], "little")


def _parts(shape: BlockShape) -> Iterator[tuple[DType, int, int]]:
    """Yield dtype, head_dim and number of pages of the parts of a block's body, in order."""
    for dtype, channels, left in _runs(shape):
        most = max(_LONGEST_PART // (shape.page_size * channels * dtype.itemsize), 1)
        while left:
            pages = min(left, most)
            left -= pages
            yield dtype, channels, pages


def _runs(shape: BlockShape) -> Iterator[tuple[DType, int, int]]:
    """Yield dtype, head_dim and number of consecutive pages of a block with equal ones, in order."""
    kinds = ((plane.dtype, plane.head_dim) for _ in range(shape.layers) for plane in shape.planes)
    for (dtype, channels), same in groupby(kinds):
        yield dtype, channels, shape.heads * sum(1 for _ in same)


def _has_shape(view: memoryview, shape: BlockShape) -> bool:
    """Return whether the parts of a coded block describe the pages of a block of this shape, however they are cut."""
    at = HASHED_FROM
    for dtype, channels, left in _runs(shape):
        while left > 0:
            if len(view) - at < _PART.size:
                return False
            code, *_, pages, rows, columns, length = _PART.unpack_from(view, at)
            at += _PART.size + length
            kept = code in (0, _CODES.get(dtype)) and (rows, columns) == (shape.page_size, channels)
            if not kept or not 0 < pages <= left or (not code and length != pages * rows * columns * dtype.itemsize):
                return False
            left -= pages
    return at == len(view)


def _encode_part(code: int, pages: int, rows: int, part: memoryview, room: memoryview) -> int:
    """Code pages that follow each other. Return the bytes in `room`, or 0 if the code would save less than a tenth."""
    most = len(part) - len(part) // 10
    return encode_matrix(code, len(part) // rows // _ITEMSIZES[code], part, room[:most], pages)


def _decode_parts(view: memoryview, into: memoryview) -> None:
    at, start = HASHED_FROM, 0
    while at < len(view):
        if len(view) - at < _PART.size:
            raise PageError("the coded block ends within the description of a part")
        code, *zeros, pages, rows, channels, length = _PART.unpack_from(view, at)
        at += _PART.size
        size = pages * rows * channels * _ITEMSIZES[code] if code in _ITEMSIZES else length
        if any(zeros) or (code and code not in _ITEMSIZES) or length > len(view) - at or size > len(into) - start:
            raise PageError("the coded block has an invalid part")
        part, target = view[at : at + length], into[start : start + size]
        if not code:
            target[:] = part
        elif size:
            _decode_matrix(code, pages * channels, part, target, pages)
        at, start = at + length, start + size
    if start != len(into):
        raise PageError(f"the coded block has parts of {start} bytes, not of {len(into)}")


def _decode_array(code: int, view: memoryview, into: memoryview) -> None:
    if len(view) <= _HEAD.size:
        raise PageError(f"a coded array has more than {_HEAD.size} bytes, got {len(view)}")
    channels = _HEAD.unpack_from(view)[-1]
    _decode_matrix(code, channels, view[_HEAD.size :], into)


def _decode_matrix(code: int, channels: int, coded: memoryview, into: memoryview, pages: int = 1) -> None:
    try:
        fits = decode_matrix(code, channels, coded, into, pages)
    except ValueError as error:
        raise PageError(f"the coded array is invalid: {error}") from None
    if not fits:
        raise PageError("the coded array has more or fewer bytes than its rows need")


# -- The first bytes of coded arrays and blocks ------------------------------------------------------------------------


def _checked(view: memoryview, most: int) -> tuple[int, int]:
    """Return code and size of an array or a block, after a check of version and hash.

    Raises PageError, also if the code is above `most`.
    """
    if len(view) <= HASHED_FROM:
        raise PageError(f"a coded array has more than {HASHED_FROM} bytes, got {len(view)}")
    code, version, width, zero, size, digest = _SEAL.unpack_from(view)
    if not 1 <= code <= most or (version, width, zero) != (_VERSION, _WIDTH, 0):
        raise PageError(
            f"a coded array begins with a code from 1 to {most}, 1, 3 and 0, got {code}, {version}, {width}, {zero}"
        )
    if _digest_of(view) != digest:
        raise PageError("the coded array does not match its checksum")
    return code, size


def _digest_of(coded: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(coded[HASHED_FROM:], int.from_bytes(coded[:8], "little"))
