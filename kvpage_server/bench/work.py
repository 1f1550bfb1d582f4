"""What is moved: batches of pages or of blocks, in generations of keys, so that none is found in the CPU's cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpage_server.client import BlockName, Page
from kvpage_server.client.page import pages_of_block
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane

Array = np.ndarray[Any, np.dtype[np.uint8]]

REQ_ID = b"kvpage-bench"


class BatchMemory:
    """The memory of one batch: where it is written from, and where it is read into. Both ``[count, nbytes]``."""

    def __init__(self, count: int, nbytes: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.written: Array = np.frombuffer(rng.bytes(count * nbytes), np.uint8).reshape(count, nbytes)
        self.read: Array = np.zeros_like(self.written)

    def spoil(self) -> None:
        """Make every item of `read` wrong, at both ends."""
        self.read[:, 0] = ~self.written[:, 0]
        self.read[:, -1] = ~self.written[:, -1]

    def check(self) -> None:
        """Raises AssertionError if the bytes read differ from those written."""
        if not np.array_equal(self.written, self.read):
            raise AssertionError("the bytes that were read are not those that were written")


class Work:
    """`count` items of `nbytes` each, again under other keys for each of `generations`."""

    def __init__(self, kind: str, count: int, nbytes: int, generations: int) -> None:
        self.name = f"{count} {kind} of {spell(nbytes)}"
        self.count = count
        self.nbytes = nbytes
        self.batches = [BatchMemory(count, nbytes, seed) for seed in range(generations)]

    @property
    def total(self) -> int:
        return self.count * self.nbytes

    def page_keys(self, generation: int) -> list[PageKey]:
        """What a batch is stored under, page by page."""
        raise NotImplementedError


class PageWork(Work):
    """Pages of bytes: eight heads and two planes, in as many layers as there must be."""

    def __init__(self, count: int, nbytes: int, generations: int) -> None:
        super().__init__("pages", count, nbytes, generations)
        rows = 128
        self.pages = [
            [
                Page(PageKey(REQ_ID, i // 16, i // 2 % 8, generation, i % 2), body, DType.UINT8, rows, nbytes // rows)
                for i, body in enumerate(batch.written)
            ]
            for generation, batch in enumerate(self.batches)
        ]
        self.keys = [[page.key for page in pages] for pages in self.pages]

    def page_keys(self, generation: int) -> list[PageKey]:
        """What a batch is stored under."""
        return self.keys[generation]


class Blocks(Work):
    """Blocks of one shape."""

    def __init__(self, count: int, shape: BlockShape, generations: int) -> None:
        super().__init__("blocks", count, shape.nbytes, generations)
        self.shape = shape
        self.names: list[list[BlockName]] = [
            [(REQ_ID, generation * count + i) for i in range(count)] for generation in range(generations)
        ]

    def page_keys(self, generation: int) -> list[PageKey]:
        """What a batch is stored under, page by page."""
        return [key for name in self.names[generation] for key, _, _ in pages_of_block(name, self.shape)]


def spell(nbytes: int) -> str:
    """Bytes for people: 64 KiB, 5.6 MiB."""
    return f"{nbytes / (1 << 10):.4g} KiB" if nbytes < 1 << 20 else f"{nbytes / (1 << 20):.2g} MiB"


def _model(layers: int, heads: int, head_dim: int, tokens: int) -> BlockShape:
    """A block of K and V in bfloat16."""
    planes = tuple(Plane(kv_type, DType.BFLOAT16, head_dim) for kv_type in (KVType.K, KVType.V))
    return BlockShape(layers, heads, tokens, planes)


SMOLLM2_16 = _model(30, 3, 64, 16)  # 360 KiB
LLAMA3_16 = _model(32, 8, 128, 16)  # the 8B: 2 MiB, 512 pages of 4 KiB
SMOLLM2_256 = _model(30, 3, 64, 256)  # 5.6 MiB
LLAMA3_256 = _model(32, 8, 128, 256)  # 32 MiB
