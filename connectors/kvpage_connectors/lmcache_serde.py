"""Serde of LMCache: objects in the lossless code of docs/page-code.md. Tried with LMCache 0.5.6.

`lmcache_l2` registers it. LMCache loads an object into a buffer of the size that `estimate_serialized_size` returns, so
all objects of a layout have this size: three quarters of bfloat16 arrays. An object whose code is longer is not stored.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
from kvpage import DType, PageError, decode_lossless, encode_lossless
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.serde import (
    AsyncSerdeProcessor,
    Deserializer,
    SerdeProcessor,
    Serializer,
    get_registered_serde_types,
    register_serde_factory,
)
from lmcache.v1.memory_management import MemoryObj

NAME = "kvpage_lossless"

_DTYPES = {"bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16, "float32": DType.FLOAT32}
_SHARES = {DType.BFLOAT16: 0.75, DType.FLOAT16: 0.9, DType.FLOAT32: 0.9}  # of an array's bytes that its code may have
_LENGTH = struct.Struct("<Q")  # bytes of the code of an array, before it


class _Array:
    """An array of an object, `nbytes` from `start` on, and its `room` in the serialized object."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, start: int) -> None:
        self.dtype = _DTYPES.get(str(dtype).removeprefix("torch."))
        self.nbytes = prod(shape) * dtype.itemsize
        self.span = slice(start, start + self.nbytes)
        # LMCache's arrays end with tokens and channels. The code has a base for each column, so the others are columns.
        self.tokens, self.channels = shape[-2:] if len(shape) > 1 else (1, 1)
        coded = int(self.nbytes * _SHARES[self.dtype]) if self.dtype is not None else self.nbytes
        self.room = _LENGTH.size + coded

    def encode(self, body: memoryview, room: memoryview) -> None:
        """Write the array to its room. Raises PageError if its code is longer."""
        if self.dtype is None:
            room[_LENGTH.size :] = body
            return
        array = self._by_array(body).swapaxes(0, 1).reshape(self.tokens, -1)
        code = encode_lossless(np.ascontiguousarray(array).data, self.dtype)
        if code is None or len(code) > len(room) - _LENGTH.size:
            raise PageError(f"the code of an array of {self.nbytes} bytes has more than {len(room) - _LENGTH.size}")
        end = _LENGTH.size + len(code)
        _LENGTH.pack_into(room, 0, len(code))
        room[_LENGTH.size : end] = code
        room[end:] = bytes(len(room) - end)  # else an object would contain bytes of others

    def decode(self, room: memoryview, body: memoryview) -> None:
        """Write the array to its object. Raises PageError if the code is damaged, or that of another size."""
        if self.dtype is None:
            body[:] = room[_LENGTH.size :]
            return
        (length,) = _LENGTH.unpack_from(room)
        decoded = decode_lossless(room[_LENGTH.size :][:length])
        if len(decoded) != self.nbytes:
            raise PageError(f"the code is that of {len(decoded)} bytes, not of {self.nbytes}")
        to = self._by_array(body)
        to[:] = np.frombuffer(decoded, to.dtype).reshape(self.tokens, -1, self.channels).swapaxes(0, 1)

    def _by_array(self, body: memoryview) -> Any:
        assert self.dtype is not None
        return np.frombuffer(body, f"u{self.dtype.itemsize}").reshape(-1, self.tokens, self.channels)


def _arrays(layout: MemoryLayoutDesc) -> Iterator[tuple[_Array, slice]]:
    """Yield the arrays of an object, and the span of each in the serialized object."""
    start = at = 0
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        array = _Array(tuple(shape), dtype, start)
        yield array, slice(at, at + array.room)
        start, at = start + array.nbytes, at + array.room


def _layout_of(one: MemoryObj) -> MemoryLayoutDesc:
    return MemoryLayoutDesc(shapes=one.get_shapes(), dtypes=one.get_dtypes())


class LosslessSerializer(Serializer):
    """Encoder of objects. Methods have LMCache's documentation."""

    def serialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> int:
        """Raises PageError if a code is longer than its share: LMCache logs it, and does not store the object."""
        body, room, end = src.byte_array.cast("B"), dst.byte_array.cast("B"), 0
        for array, span in _arrays(_layout_of(src)):
            array.encode(body[array.span], room[span])
            end = span.stop
        return end

    def estimate_serialized_size(self, layout_desc: MemoryLayoutDesc) -> int:
        return sum(array.room for array, _ in _arrays(layout_desc))


class LosslessDeserializer(Deserializer):
    """Decoder of objects. Methods have LMCache's documentation."""

    def deserialize(self, src: MemoryObj, dst: MemoryObj, key: ObjectKey) -> None:
        """Raises PageError if a code is damaged: LMCache logs it, and the object is a miss."""
        room, body = src.byte_array.cast("B"), dst.byte_array.cast("B")
        for array, span in _arrays(_layout_of(dst)):
            array.decode(room[span], body[array.span])


def _processor(options: Mapping[str, Any]) -> SerdeProcessor:
    return AsyncSerdeProcessor(
        LosslessSerializer(), LosslessDeserializer(), max_workers=int(options.get("max_workers", 1))
    )


def register() -> None:
    """Register the serde, so that the configuration of an adapter may name it."""
    if NAME not in get_registered_serde_types():
        register_serde_factory(NAME, _processor)
