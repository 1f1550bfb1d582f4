"""Memory of the caller's as bytes: numpy arrays, mx.arrays, bytearrays, memoryviews, never copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import Buffer

from kvpage_server.client.errors import BadBuffer


def readable(buffer: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer of any element type. Raises BadBuffer."""
    try:
        return memoryview(buffer).cast("B")
    except (TypeError, ValueError, BufferError):
        return _unusual(buffer)


def _unusual(buffer: Buffer) -> memoryview:
    """What memoryview can't cast: bfloat16, empty shapes, and what is no memory to be sent."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise BadBuffer(f"{type(buffer).__name__} gives no access to its memory: {error}") from error
    if not view.c_contiguous:
        raise BadBuffer(f"the memory must be C-contiguous, got shape {view.shape} with strides {view.strides}")
    return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(bytearray())


def places(buffers: Sequence[Buffer], count: int) -> list[memoryview]:
    """Writable memory for `count` values, as bytes. Raises BadBuffer naming the one that can't be used."""
    if len(buffers) != count:
        raise BadBuffer(f"{count} values need {count} buffers, got {len(buffers)}")
    views = []
    for i, buffer in enumerate(buffers):
        try:
            view = readable(buffer)
        except BadBuffer as error:
            raise BadBuffer(f"buffer {i}: {error}") from None
        if view.readonly:
            raise BadBuffer(f"buffer {i}: cannot receive into this {type(buffer).__name__}: it is read-only")
        views.append(view)
    return views
