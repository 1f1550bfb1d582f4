"""The caller's memory, buffer after buffer."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import Buffer

from kvpage_server.core.buffers import as_bytes


class Memory:
    """Held as long as this is."""

    def __init__(self, buffers: Sequence[Buffer], *, writable: bool = False) -> None:
        """Raises Unusable for one that can't be sent from or, with `writable`, received into."""
        self._views = [as_bytes(buffer, i, writable=writable) for i, buffer in enumerate(buffers)]

    def __len__(self) -> int:
        return len(self._views)

    def __getitem__(self, part: slice) -> Memory:
        """Neighbours, still held together with all the others."""
        some = Memory(())
        some._views = self._views[part]
        return some

    def sizes(self) -> list[int]:
        """The bytes of each."""
        return list(map(len, self._views))

    def views(self) -> list[memoryview]:
        """Each as bytes."""
        return self._views
