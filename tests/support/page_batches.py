"""Pages and blocks for the tests of the page clients, with bytes of their own, and memory to receive them into."""

from __future__ import annotations

from typing import Any

import numpy as np
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvpage_server.client import Page
from kvpage_server.page import BlockShape, DType, KVType, PageKey, Plane

Array = np.ndarray[Any, Any]

NO_RETRY = Retry(NoBackoff(), 0)
SHAPE = BlockShape(3, 2, 16, (Plane(KVType.K, DType.FLOAT16, 64), Plane(KVType.V, DType.FLOAT16, 32)))


def key(i: int, req_id: bytes = b"req") -> PageKey:
    return PageKey(req_id, i % 7, i % 3, i, i % 2)


def batch(count: int, rows: int = 32, columns: int = 64, seed: int = 0, req_id: bytes = b"req") -> list[Page]:
    bodies = np.random.default_rng(seed).integers(-128, 127, (count, rows, columns), np.int8)
    return [Page(key(i, req_id), body, DType.INT8, rows, columns) for i, body in enumerate(bodies)]


def block_body(seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 255, SHAPE.nbytes, np.uint8)


def room(pages: list[Page]) -> list[Array]:
    return [np.zeros(memoryview(page.body).nbytes, np.uint8) for page in pages]


def same(buffer: Any, page: Page) -> bool:
    """Whether memory holds the bytes of a page."""
    return bytes(memoryview(buffer)) == bytes(memoryview(page.body))
