from __future__ import annotations

from collections.abc import Sequence


class Bitmap:
    def __init__(self, size: int) -> None:
        self._bits = [False] * size

    def batched_set(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._bits[index] = True

    def test(self, index: int) -> bool:
        return self._bits[index]

    def __len__(self) -> int:
        return len(self._bits)
