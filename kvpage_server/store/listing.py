"""Which keys and requests there are: in the order of scans, at random, all of them."""

from __future__ import annotations

from collections.abc import Iterable

from kvpage_server.page import unix_ms
from kvpage_server.store.contents import Contents
from kvpage_server.store.memory.catalogue import Place
from kvpage_server.store.memory.index import Block
from kvpage_server.system.durations import monotonic_ms


class Listing:
    """Lists what there is, without counting that as a use."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._catalogue = contents.catalogue

    def keys(self) -> list[bytes]:
        return self.living(self.places())

    def names(self) -> list[bytes]:
        """Every key, including overdue ones."""
        return [name for place in self.places() for name in self._catalogue.names_at(place)]

    def places(self) -> list[Place]:
        """Where keys are: see `living`."""
        return self._catalogue.places()

    def living(self, places: Iterable[Place]) -> list[bytes]:
        """The keys at some places that exist."""
        now, living_at = unix_ms(), self._catalogue.living_at
        return [name for place in places for name in living_at(place, now)]

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the living keys in the next places of the order of scans.

        There are `count` places, or fewer if they have many keys: a block stored whole is one place.
        """
        found: list[bytes] = []
        for _ in range(count):
            cursor, places = self._catalogue.scan(cursor, 1)
            found += self.living(places)
            found += self.living(stray for place in places for stray in self._catalogue.strays_at(place))
            if not cursor or len(found) >= count:
                break
        return cursor, found

    def random_key(self) -> bytes | None:
        """A living key; None if there is none."""
        while len(self._catalogue):
            key = self._catalogue.draw()
            if key is not None and self._contents.find(key) is not None:
                return key
        return None

    def blocks_of(self, req_id: bytes) -> list[Block]:
        """The blocks of a request with their living pages, by page id."""
        return [block for block in self._contents.index.of(req_id) if self._contents.living(block)]

    def scan_requests(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """The next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self._contents.index.scan(cursor, count, monotonic_ms())
        return cursor, list(filter(self.has_pages, req_ids))

    def has_pages(self, req_id: bytes) -> bool:
        """Whether a request has a living page."""
        index = self._contents.index
        blocks = (index.block(req_id, page) for page in index.page_ids(req_id))
        return any(block is not None and self._contents.living(block) for block in blocks)
