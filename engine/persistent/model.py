"""What a graph is run with: the sizes that its dimensions name, and the tensors that its constants name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import xxhash

from engine.persistent.errors import ModelError
from engine.persistent.storage.export import body

MAX_SIZE = 2**31 - 1  # as MLX counts
_SIZE = re.compile("[0-9]{1,18}")


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Sizes and tensors by name."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, mx.array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            if not 0 <= size <= MAX_SIZE:
                raise ModelError(f"the size {name} must be between 0 and {MAX_SIZE}, got {size}")

    @classmethod
    def load(cls, path: Path, sizes: Mapping[str, int] | None = None) -> Self:
        """The tensors of a safetensors file. Its metadata gives sizes as decimal numbers; `sizes` go before those.

        Raises ModelError for what is no such file or has tensors of dtypes that MLX can't load, such as f64.
        """
        try:
            loaded: Any = mx.load(str(path), format="safetensors", return_metadata=True)
        except (RuntimeError, ValueError) as error:
            raise ModelError(f"{path}: {error}") from None
        tensors, metadata = loaded
        named = {name: int(value) for name, value in metadata.items() if _SIZE.fullmatch(value)}
        return cls(named | dict(sizes or {}), tensors)

    def digest(self) -> str:
        """128 bits, in hex, of the names, dtypes, shapes and bytes of all tensors."""
        digest = xxhash.xxh3_128()
        for name, array in sorted(self.tensors.items()):
            digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
            digest.update(body(array).data)
        return digest.hexdigest()
