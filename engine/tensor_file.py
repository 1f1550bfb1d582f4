"""Reader and writer of safetensors files, one tensor at a time. The reader has limits for files of untrusted sources.

It reads and writes bytes only, without MLX, models or agents.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvpage_server import bounded

# -- tensor file -------------------------------------------------------------------------------------------------------
# A file has the length of a header (u64, little-endian), the header (JSON: dtype, shape and the range of bytes of every
# tensor, and the metadata of the file) and the tensors' bytes, https://github.com/huggingface/safetensors. Any reader
# of safetensors reads these files. The library's own reader and writer for numpy lack bfloat16 and need all tensors in
# memory; this module needs one. The digest, in the metadata, is the XXH3-64 of everything after the length, with zeros
# in place of the digest.

ITEMSIZES = {"BOOL": 1, "I8": 1, "U8": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4}
ITEMSIZES |= {"F64": 8, "I64": 8, "U64": 8}  # bytes
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 16 << 20  # the format permits more; the header of a million tokens has half of this
_MAX_TENSORS = 16_384
_MAX_DIMENSIONS = 8
_NO_DIGEST = "0" * 16
_DIGEST = re.compile(r"[0-9a-f]{16}")


class DamagedFileError(ValueError):
    """Error: a file is incomplete, malformed or damaged. The message says which."""


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Number of bytes of its values."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def write(
    file: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], bodies: Iterable[NDArray[Any]]
) -> int:
    """Write tensors to an empty, seekable `file`, and return its size in bytes. `bodies` are the values of `tensors` as
    contiguous arrays, in the same order.

    Raises ValueError for a body of another size than its tensor.
    """
    described: dict[str, object] = {"__metadata__": {"digest": _NO_DIGEST, **metadata}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        described[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    header = json.dumps(described, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)  # to align the following data
    file.write(len(header).to_bytes(_LENGTH_BYTES, "little"))
    file.write(header)
    digest = xxhash.xxh3_64(header)
    for (name, tensor), body in zip(tensors.items(), bodies, strict=True):
        if body.nbytes != tensor.nbytes:
            raise ValueError(f"{name} has {tensor.nbytes} bytes, got {body.nbytes}")
        digest.update(body.data)
        file.write(body.data)
    file.seek(_LENGTH_BYTES + header.index(_NO_DIGEST.encode()))
    file.write(digest.hexdigest().encode())
    return _LENGTH_BYTES + len(header) + end


class TensorReader:
    """Reader of an open safetensors file. The constructor checks the header.

    The constructor and the methods raise DamagedFileError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DamagedFileError("it is no file")
        self._left = status.st_size
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        if length > _MAX_HEADER_BYTES:
            raise DamagedFileError(f"a header has at most {_MAX_HEADER_BYTES} bytes, this one {length}")
        self._header = self._read(length).tobytes()
        try:
            self.metadata, placed = _described(self._header)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedFileError(f"the header is malformed: {error!r}") from error
        self.tensors = {name: tensor for _, name, tensor in placed}
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        ends = [0, *accumulate(sizes)]
        if [offsets for offsets, _, _ in placed] != list(pairwise(ends)):
            raise DamagedFileError("the tensors do not lie one after the other, each as long as its shape")
        if ends[-1] != self._left:
            raise DamagedFileError(f"the tensors have {ends[-1]} bytes, {self._left} are there")

    def bodies(self) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of each tensor, as a uint8 array, in the order of `tensors`.

        Raises DamagedFileError if the file is cut off, and after the last tensor if the digest is wrong. So the caller
        must not use a tensor before the end.
        """
        written = str(self.metadata.get("digest"))
        digest = xxhash.xxh3_64(self._header.replace(written.encode(), _NO_DIGEST.encode(), 1))
        for tensor in self.tensors.values():
            body = self._read(tensor.nbytes)
            digest.update(body.data)
            yield body
        if digest.hexdigest() != written:
            raise DamagedFileError(f"the digest is {digest.hexdigest()}, {written} was written")

    def _read(self, count: int) -> NDArray[np.uint8]:
        found = np.fromfile(self._file, np.uint8, min(count, self._left))
        if len(found) != count:
            raise DamagedFileError(f"the file is cut off: {count} bytes expected, {len(found)} are there")
        self._left -= count
        return found


def _described(header: bytes) -> tuple[dict[str, str], list[tuple[tuple[int, ...], str, Tensor]]]:
    """Return the file's metadata, and for each tensor its byte range in the file's data, its name and its description,
    in the order of the ranges. Raises ValueError, TypeError, KeyError, AttributeError or RecursionError for a malformed
    header.
    """
    bounded.check(header, containers=3 * _MAX_TENSORS, strings=6 * _MAX_TENSORS, values=12 * _MAX_TENSORS)
    described = json.loads(header)
    metadata = described.pop("__metadata__", {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise TypeError("metadata is text")
    if not _DIGEST.fullmatch(metadata.get("digest", _NO_DIGEST)):
        raise ValueError("the digest is none")
    tensors = (
        (_numbers(one["data_offsets"]), name, Tensor(str(one["dtype"]), _numbers(one["shape"])))
        for name, one in described.items()
    )
    placed = sorted(tensors)
    for _, _, tensor in placed:
        if tensor.dtype not in ITEMSIZES:
            raise ValueError(f"dtype {tensor.dtype[:20]!r}")
    return metadata, placed


def _numbers(listed: Any) -> tuple[int, ...]:
    if len(listed) > _MAX_DIMENSIONS or not all(type(number) is int and 0 <= number < 1 << 63 for number in listed):
        raise ValueError(f"sizes and places are numbers, {_MAX_DIMENSIONS} at most")
    return tuple(listed)
