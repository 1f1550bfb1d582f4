"""A fixture for the tests of the engine: a block pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.pool import BlockPool


def pool_of(blocks: int) -> Any:
    """The fixture `pool`: a pool that every test has to leave empty."""

    @pytest.fixture(name="pool")
    def pool() -> Iterator[BlockPool]:
        pool = BlockPool(blocks)
        yield pool
        pool.check_empty()

    return pool
