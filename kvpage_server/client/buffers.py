"""The caller's memory as bytes, without a copy: numpy arrays, mx.arrays, bytearrays, memoryviews."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

from kvpage_server.client.errors import BadBuffer
from kvpage_server.core import Memory
from kvpage_server.core.buffers import Unusable, as_bytes


def readable(buffer: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer of any element type. Raises BadBuffer."""
    try:
        return as_bytes(buffer)
    except Unusable as error:
        raise BadBuffer(error.why) from None


def places(buffers: Sequence[Buffer], count: int) -> Memory:
    """Writable memory for `count` values. Raises BadBuffer, which names the buffer that can't be used."""
    if len(buffers) != count:
        raise BadBuffer(f"{count} values need {count} buffers, got {len(buffers)}")
    try:
        return Memory(buffers, writable=True)
    except Unusable as error:
        raise BadBuffer(str(error)) from None
