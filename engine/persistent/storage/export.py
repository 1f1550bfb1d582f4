"""Persistent memory as a safetensors file, for any tool."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from engine.formats.tensor_file import Tensor, write
from engine.persistent.dtypes import named
from kvpage_server.system.durable import replacing


def body(array: mx.array) -> NDArray[np.uint8]:
    """An array's bytes, in row-major order."""
    flat = mx.contiguous(array).reshape(-1)
    return np.asarray(flat.view(mx.uint8)) if flat.size else np.empty(0, np.uint8)


def export(path: Path, tensors: Mapping[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write `tensors` to `path`, all of them or none. Raises OSError."""
    described = {name: Tensor(named(array.dtype).upper(), array.shape) for name, array in tensors.items()}
    bodies: list[NDArray[Any]] = [body(array) for array in tensors.values()]
    with replacing(path) as file:
        write(file, described, metadata, bodies)
