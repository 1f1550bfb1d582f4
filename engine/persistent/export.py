"""Persistent memory as a safetensors file, for any tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import serialize_file

from engine.persistent.dtypes import DTYPES, named


def body(array: mx.array) -> memoryview:
    """An array's bytes, in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    return np.asarray(flat.view(mx.uint8)).data.cast("B") if flat.size else memoryview(b"")


def export(path: str, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write `tensors` to `path`. Raises OSError."""
    described: Any = {
        name: {"dtype": _NAMES[named(array.dtype)], "shape": list(array.shape), "data": bytes(body(array))}
        for name, array in tensors.items()
    }
    serialize_file(described, path, dict(metadata))


_NAMES = {name: str(dtype.mlx).removeprefix("mlx.core.") for name, dtype in DTYPES.items()}
