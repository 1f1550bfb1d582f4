from __future__ import annotations

from typing import Any


class MemoryObj:
    def __init__(self, memory: memoryview, shapes: list[Any] | None = None, dtypes: list[Any] | None = None) -> None:
        self._memory = memory
        self._layout = shapes or [], dtypes or []

    def get_size(self) -> int:
        return len(self._memory)

    def get_shapes(self) -> list[Any]:
        return self._layout[0]

    def get_dtypes(self) -> list[Any]:
        return self._layout[1]

    @property
    def byte_array(self) -> memoryview:
        return self._memory
