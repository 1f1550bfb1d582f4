"""The element types of the graph language, their dtypes in MLX and in pages, and wrapping integers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvpage_server.page import DType as PageDType


@dataclass(frozen=True, slots=True)
class DType:
    """An element type."""

    name: str
    mlx: mx.Dtype
    range: tuple[int, int] | None = None  # of an integer type, both ends included
    page: PageDType = PageDType.UINT8  # other types are stored as bytes, as before the header had numbers for them

    @property
    def is_float(self) -> bool:
        return self.range is None and self.name != "bool"

    @property
    def itemsize(self) -> int:
        return int(self.mlx.size)

    def wrap(self, value: int) -> int:
        """Return `value` modulo the number of values of this integer type, within the range of the type."""
        assert self.range
        low, high = self.range
        return (value - low) % (high - low + 1) + low

    def literal(self, value: bool | int | float) -> bool | int | float | None:
        """Convert a literal of the graph's text to this type. Return None if the type does not permit it, or it is out
        of range.

        A literal with a point or an exponent, inf and nan are floats, other numbers integers. 0 and 1 are also bools.
        """
        if self.name == "bool":
            return bool(value) if value in (0, 1) and not isinstance(value, float) else None
        if self.range is None:
            return value if isinstance(value, float) else None
        fits = isinstance(value, int) and not isinstance(value, bool) and self.range[0] <= value <= self.range[1]
        return value if fits else None

    def full(self, shape: tuple[int, ...], value: bool | int | float | None) -> mx.array:
        """Return an array of `shape` in which every element is `value`, or zero if `value` is None."""
        if value is None:
            return mx.zeros(shape, dtype=self.mlx)
        return mx.full(shape, self.number(value), dtype=self.mlx)

    def number(self, value: bool | int | float) -> mx.array:
        """Return `value` as an array without dimensions."""
        if self.range and not -(2**31) <= value < 2**31:  # mx.array accepts such integers only from numpy
            return mx.array(np.array(value, dtype=str(self.mlx).removeprefix("mlx.core.")))
        return mx.array(value, dtype=self.mlx)


def _integer(bits: int, mlx: mx.Dtype, signed: bool, page: PageDType = PageDType.UINT8) -> DType:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return DType(f"{'i' if signed else 'u'}{bits}", mlx, (low, high), page)


DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("f16", mx.float16, page=PageDType.FLOAT16),
        DType("bf16", mx.bfloat16, page=PageDType.BFLOAT16),
        DType("f32", mx.float32, page=PageDType.FLOAT32),
        DType("f64", mx.float64),  # only on the CPU
        _integer(8, mx.int8, True, PageDType.INT8),
        _integer(16, mx.int16, True),
        _integer(32, mx.int32, True),
        _integer(64, mx.int64, True),
        _integer(8, mx.uint8, False),
        _integer(16, mx.uint16, False),
        _integer(32, mx.uint32, False, PageDType.UINT32),
        _integer(64, mx.uint64, False),
        DType("bool", mx.bool_),
    )
}
WORDS: dict[str, Any] = {"true": True, "false": False, "inf": math.inf, "nan": math.nan}


def named(mlx: mx.Dtype) -> str:
    """Return the graph language's name of an MLX dtype, or MLX's name if the language has none."""
    return next((dtype.name for dtype in DTYPES.values() if dtype.mlx == mlx), str(mlx).removeprefix("mlx.core."))
