"""Lossless code of arrays: floating-point values of a KV cache take 0.7 of their bytes (bfloat16), bit for bit.

docs/page-code.md describes the format and its source.
"""

from __future__ import annotations

import struct

import xxhash
from typing_extensions import Buffer

from kvpage_server.core import decode_matrix, encode_matrix
from kvpage_server.page import DType, PageError, check_dtype

_CODES = {DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FLOAT32: 3}
_VERSION = 1
_WIDTH = 3  # bits of the code of an exponent
# Code, version, width, 0, bytes of the array, XXH3-64 of the bytes after it with the eight bytes before it as the seed,
# channels.
_HEAD = struct.Struct("<BBBBIQI")
_HASHED_FROM = 16
_MOST = 2**32 - 1  # bytes of an array


def encode_lossless(array: Buffer, dtype: DType) -> bytes | None:
    """Return the code of an array ``[..., channels]`` of bfloat16, float16 or float32, or None.

    `array` is C-contiguous, and its items have the size of `dtype`: a view as uint16 will do for bfloat16. None means
    that the array stays as it is: it has another dtype, its channels are no multiple of 8, it has 4 GiB or more, or the
    code would save less than a tenth. Raises PageError if the size of its items is another, and TypeError or ValueError
    if it is no C-contiguous buffer.
    """
    view = memoryview(array)
    dtype = check_dtype(dtype)
    if view.itemsize != dtype.itemsize:
        raise PageError(f"an array of {dtype.name.lower()} has items of {dtype.itemsize} bytes, got {view.itemsize}")
    if not view.shape:
        raise PageError("an array has at least one dimension, got none")
    code, channels, nbytes = _CODES.get(dtype), view.shape[-1], view.nbytes
    room = nbytes - nbytes // 10
    if code is None or channels % 8 or not _HEAD.size < room or nbytes > _MOST:
        return None
    coded = bytearray(room)
    size = encode_matrix(code, channels, view.cast("B"), memoryview(coded)[_HEAD.size :])
    if not size:
        return None
    del coded[_HEAD.size + size :]
    _HEAD.pack_into(coded, 0, code, _VERSION, _WIDTH, 0, nbytes, 0, channels)
    digest = _digest_of(memoryview(coded))
    _HEAD.pack_into(coded, 0, code, _VERSION, _WIDTH, 0, nbytes, digest, channels)
    return bytes(coded)


def decode_lossless(coded: Buffer) -> bytearray:
    """Return the bytes of an array from its code.

    Raises PageError if the code is damaged, or of another version.
    """
    view = memoryview(coded).cast("B")
    if len(view) <= _HEAD.size:
        raise PageError(f"a coded array has more than {_HEAD.size} bytes, got {len(view)}")
    code, version, width, zero, size, digest, channels = _HEAD.unpack_from(view)
    if code not in _CODES.values() or (version, width, zero) != (_VERSION, _WIDTH, 0):
        raise PageError(
            f"a coded array begins with a code from 1 to 3, 1, 3 and 0, got {code}, {version}, {width}, {zero}"
        )
    if _digest_of(view) != digest:
        raise PageError("the coded array does not match its checksum")
    if size > 4 * len(view):  # before memory is allocated
        raise PageError(f"an array of {size} bytes does not have a code of {len(view)}")
    array = bytearray(size)
    try:
        fits = decode_matrix(code, channels, view[_HEAD.size :], array)
    except ValueError as error:
        raise PageError(f"the coded array is invalid: {error}") from None
    if not fits:
        raise PageError("the coded array has more or fewer bytes than its rows need")
    return array


def _digest_of(coded: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(coded[_HASHED_FROM:], int.from_bytes(coded[:8], "little"))
