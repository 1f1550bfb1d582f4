from __future__ import annotations


class MemoryObj:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def get_size(self) -> int:
        return len(self._memory)

    @property
    def byte_array(self) -> memoryview:
        return self._memory
