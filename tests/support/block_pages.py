"""The pages of a block: where they lie in canonical order, their bytes, and a block's arrays from its bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import engine  # noqa: F401 - picks the BLAS before mlx is imported

# isort: split
import mlx.core as mx
import numpy as np

from engine.memory.blocks import Arrays, arrays_in
from engine.spec import Shapes
from kvpage_server.page import Plane


class PageAt(NamedTuple):
    """One head of one plane of one layer, ``[rows, plane.head_dim]``."""

    layer: int
    head: int
    plane: Plane
    rows: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.plane.head_dim * self.plane.dtype.itemsize


def pages(shapes: Shapes) -> list[PageAt]:
    """The pages that hold arrays of these shapes, in canonical order: layer, plane, head."""
    return [
        PageAt(i, head, kept.plane, kept.rows)
        for i, layer in enumerate(shapes)
        for kept in layer
        for head in range(kept.heads)
    ]


def page_bodies(arrays: Arrays) -> Iterator[memoryview]:
    """The bodies of the pages that hold `arrays`, in canonical order, as views of the arrays' own memory."""
    for layer in arrays:
        for array in layer:
            for rows in np.asarray(array.view(mx.uint8)):
                yield rows.data.cast("B")


def from_body(body: bytes, shapes: Shapes) -> Arrays:
    """The arrays of `shapes` whose pages, one after the other in canonical order, are `body`."""
    return arrays_in(mx.array(np.frombuffer(body, np.uint8)), shapes)
