"""Memory of the caller's as bytes: numpy arrays, mx.arrays, bytearrays, memoryviews, never copied."""

from __future__ import annotations

import numpy as np
from typing_extensions import Buffer


class Unusable(ValueError):
    """A buffer can't be sent from or received into: which one of several, and why not."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"buffer {index}: {why}")
        self.index = index
        self.why = why


def as_bytes(buffer: Buffer, index: int = 0, *, writable: bool = False) -> memoryview:
    """The bytes of a C-contiguous buffer of any element type. Raises Unusable."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise Unusable(index, f"{type(buffer).__name__} gives no access to its memory: {error}") from None
    if not view.c_contiguous:
        raise Unusable(index, f"the memory must be C-contiguous, got shape {view.shape} with strides {view.strides}")
    if writable and view.readonly:
        raise Unusable(index, f"cannot receive into this {type(buffer).__name__}: it is read-only")
    try:
        return view.cast("B")
    except (TypeError, ValueError):  # bfloat16, empty shapes
        return np.frombuffer(view, np.uint8).data if view.nbytes else memoryview(bytearray())
