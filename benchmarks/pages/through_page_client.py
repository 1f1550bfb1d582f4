"""The same work through `PageClient`'s public methods.

It speaks to Redis and Valkey as well: there pages go as values with MSET and MGET, each with its 64 bytes of header.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.pages.ordinary import Step, Way, Wrong, must_be
from benchmarks.pages.work import BlockWork, Work
from kvpage_server.client import Page, PageClient
from kvpage_server.page import DType

DEADLINE = 60.0  # seconds


def connect(url: str) -> PageClient:
    """A client that believes checksums, as the ordinary one does."""
    return PageClient(url, verify=False, deadline=DEADLINE)


def pages(client: PageClient, work: Work) -> Way:
    """`mset` and `mget_into`."""
    stored = [
        [Page(key, body, DType.UINT8, 1, len(body)) for key, body in zip(batch.keys, batch.bodies, strict=True)]
        for batch in work.batches
    ]
    places = _places([len(body) for body in work.batches[0].bodies])

    def writing(number: int) -> Step:
        return lambda: client.mset(stored[number])

    def reading(number: int) -> Step:
        keys = work.batches[number].keys
        return _finding_all(lambda: client.mget_into(keys, places))

    numbers = range(len(work.batches))
    check = _checking(places, [batch.bodies for batch in work.batches])
    return Way([*map(writing, numbers)], [*map(reading, numbers)], check)


def blocks(client: PageClient, work: BlockWork) -> Way:
    """`mset_blocks` and `mget_blocks_into`."""
    places = _places([len(body) for body in work.bodies[0]])

    def writing(number: int) -> Step:
        return lambda: client.mset_blocks(work.names[number], work.shape, work.bodies[number])

    def reading(number: int) -> Step:
        return _finding_all(lambda: client.mget_blocks_into(work.names[number], work.shape, places))

    numbers = range(len(work.names))
    return Way([*map(writing, numbers)], [*map(reading, numbers)], _checking(places, work.bodies))


def _places(lengths: Sequence[int]) -> list[memoryview]:
    return [memoryview(bytearray(nbytes)) for nbytes in lengths]


def _finding_all(read: Callable[[], list[bool]]) -> Step:
    def step() -> None:
        found = read()
        if not all(found):
            raise Wrong(f"{found.count(False)} of {len(found)} are not there")

    return step


def _checking(places: Sequence[memoryview], expected: Sequence[Sequence[memoryview]]) -> Callable[[int], None]:
    def check(number: int) -> None:
        for place, body in zip(places, expected[number], strict=True):
            must_be(place, body)

    return check
