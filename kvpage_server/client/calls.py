"""The methods of a client for one server, without I/O: each checks its arguments, builds its requests, and decodes the
replies.

PageClient and AsyncPageClient share them, and differ only in how they wait.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Generic, TypeVar

from typing_extensions import Buffer

from kvpage_server import tracing
from kvpage_server.client.commands import BlobCommands, Missed, PageCommands
from kvpage_server.client.mapped import LEAST_MAPPED, LEAST_PAGE, Dialogue, Maps, read_mapped, read_mapped_pages
from kvpage_server.client.page import (
    BlockBody,
    BlockName,
    BlockPages,
    Page,
    StateName,
    check_block_sizes,
    check_names,
    check_states,
    page_keys,
    places,
    sized,
    sized_blocks,
)
from kvpage_server.client.raw_commands import Kept
from kvpage_server.client.wire.exchange import Request
from kvpage_server.page import BlockShape, PageKey

# -- Batches, cut into a part for each connection ----------------------------------------------------------------------

_LEAST_PART = 1024 * 1024  # mean size of a part, at least: a further connection is not faster for less


def cut(sizes: Sequence[int], connections: int) -> list[slice]:
    """Divide a batch into at most `connections` consecutive slices with about the same number of bytes.

    `sizes` has the bytes of each item. No slice is empty.
    """
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    parts = max(1, min(connections, total // _LEAST_PART))
    bounds = [0, *(bisect_right(ends, total * i // parts) for i in range(1, parts)), len(ends)]
    return [slice(start, stop) for start, stop in pairwise(bounds) if start < stop]


def _in_order(parts: list[slice], names: Sequence[Hashable]) -> list[slice]:
    """Return the slices of a batch that writes `names`: a single one if a name occurs twice, as the last value counts,
    and parts on several connections have no order.
    """
    return parts if len(parts) < 2 or len(set(names)) == len(names) else [slice(0, parts[-1].stop)]


T = TypeVar("T")
_WHOLE = [slice(None)]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a client's method.

    `parts` are slices of the batch, one for each connection. `ask` builds the request or the dialogue of a slice, and
    `read` makes the method's result from the list of the decoded replies.
    """

    what: str  # the name of the method
    parts: Sequence[slice]
    ask: Callable[[BlobCommands, slice], Request[Any] | Dialogue[Any]]
    read: Callable[[list[Any]], T]


def _are_large(sizes: Sequence[int]) -> bool:
    """Return whether pages of these sizes are read sooner in the server's memory, if the client can map it."""
    return sum(sizes) >= max(LEAST_MAPPED, LEAST_PAGE * len(sizes))


Sizes = Callable[[], Sequence[int]]  # bytes of each body, computed only if needed


def count_sent(sizes: Sizes) -> None:
    """Add the bytes of sent bodies to the current tracing span. `sizes` is called only if the span is recorded."""
    if tracing.is_seen(seen := tracing.current()):
        seen.add(bytes=sum(sizes()))


def count_misses(misses: Counter[str], reasons: Collection[str], found_bytes: Callable[[], Iterable[int]]) -> None:
    """Add missed values to `misses`, by reason. `found_bytes` returns the bytes of each found body, for the current
    tracing span; it is called only if the span is recorded.
    """
    misses.update(reasons)
    if tracing.is_seen(seen := tracing.current()):
        seen.add(bytes=sum(found_bytes()), missed=len(reasons))
        seen.set(reason=next(iter(reasons), None))


class Calls:
    """The methods of a client, as functions that return a `Call`. `misses` counts misses by reason.

    With `maps`, blocks are read from the server's memory, which the client maps.
    """

    def __init__(self, *, connections: int, verify: bool, maps: Maps | None = None) -> None:
        self.misses: Counter[str] = Counter()
        self._maps = maps
        self._connections = connections
        self._verify = verify

    def mset(self, pages: Sequence[Page], ttl: int) -> Call[None]:
        found = sized(pages, ttl)
        sizes = found.bodies.sizes
        parts = self._parts(len(found), sizes)
        if len(parts) > 1:
            names = pages.keys.names if isinstance(pages, BlockPages) else [bytes(page.key) for page in pages]
            parts = _in_order(parts, names)
        return Call("mset", parts, lambda to, part: to.set_pages(found[part], ttl), lambda _: count_sent(sizes))

    def mget(self, keys: Sequence[PageKey]) -> Call[list[Page | None]]:
        def read(answers: list[tuple[list[Page | None], Missed]]) -> list[Page | None]:
            if not answers:
                return []
            pages, missed = answers[0]
            count_misses(self.misses, missed.values(), lambda: (memoryview(page.body).nbytes for page in pages if page))
            return pages

        return Call("mget", _WHOLE if keys else [], lambda to, _: to.fetch_pages(keys, self._verify), read)

    def mget_into(self, keys: Sequence[PageKey], buffers: Sequence[Buffer]) -> Call[list[bool]]:
        into, names = places(buffers, len(keys)), page_keys(keys)
        parts = self._parts(len(keys), into.sizes)
        maps = self._maps if self._maps and not self._maps.refused and _are_large(into.sizes()) else None

        def ask(to: BlobCommands, part: slice) -> Request[Missed] | Dialogue[Missed]:
            """Return the request for a part, or the dialogue if the server's memory may be mapped."""
            if maps and isinstance(to, PageCommands):
                first = part.start
                return read_mapped_pages(maps, to, names[part], lambda i: keys[first + i], into[part], self._verify)
            return to.read_pages(names[part], into[part], self._verify)

        return Call(
            "mget_into",
            parts,
            ask,
            lambda missed: [why is None for why in self._reasons(into.sizes, len(keys), parts, missed)],
        )

    def mexists(self, keys: Sequence[PageKey]) -> Call[list[bool]]:
        return Call("mexists", _WHOLE if keys else [], lambda to, _: to.exists(keys), lambda found: [*chain(*found)])

    def delete(self, keys: Sequence[PageKey]) -> Call[int]:
        return Call("delete", _WHOLE if keys else [], lambda to, _: to.delete(keys), sum)

    def delete_request(self, req_id: bytes, pages: Sequence[int]) -> Call[int]:
        check_names([(req_id, page) for page in pages or (0,)])
        return Call("delete_request", _WHOLE, lambda to, _: to.delete_request(req_id, pages), sum)

    def mset_blocks(
        self, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[BlockBody], ttl: int
    ) -> Call[None]:
        found = sized_blocks(names, shape, bodies, ttl)

        def sizes() -> Sequence[int]:
            return [shape.nbytes] * len(found)

        parts = _in_order(self._parts(len(found), sizes), names)
        return Call(
            "mset_blocks",
            parts,
            lambda to, part: to.set_blocks(names[part], shape, found[part], ttl),
            lambda _: count_sent(sizes),
        )

    def fetch_blocks_into(
        self, names: Sequence[BlockName], shape: BlockShape, buffers: Sequence[Buffer]
    ) -> Call[list[str | None]]:
        """Receive blocks into buffers. The result lists the reason for each miss, and None for each found block."""
        check_names(names)
        into = places(buffers, len(names))
        check_block_sizes(into.sizes(), shape)
        parts = self._parts(len(names), into.sizes)
        maps = self._maps if shape.nbytes * len(names) >= LEAST_MAPPED else None

        def ask(to: BlobCommands, part: slice) -> Request[Missed] | Dialogue[Missed]:
            """Return the request for a part, or the dialogue if the server's memory may be mapped."""
            if maps and not maps.refused and isinstance(to, PageCommands) and to.code is None:
                return read_mapped(maps, to, names[part], shape, into[part], self._verify)
            return to.read_blocks(names[part], shape, into[part], self._verify)

        return Call(
            "fetch_blocks_into",
            parts,
            ask,
            lambda missed: self._reasons(into.sizes, len(names), parts, missed),
        )

    def prefix(self, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Call[int]:
        """Count the complete blocks before the first incomplete one."""
        check_names(names)
        asked = _WHOLE if names else []
        return Call("prefix", asked, lambda to, _: to.prefix(names, pages_per_block, lease_ms), sum)

    def lengths(
        self, names: Sequence[BlockName], states: Sequence[StateName], pages_per_block: int, lease_ms: int
    ) -> Call[list[int]]:
        """Find the lengths of which all blocks and states are complete."""
        check_states(names, states)
        return Call(
            "lengths",
            _WHOLE if names and states else [],
            lambda to, _: to.lengths(names, states, pages_per_block, lease_ms),
            lambda found: [*chain(*found)],
        )

    def lease(self, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Call[int]:
        check_names([(req_id, page) for page in pages or (0,)])
        return Call("lease", _WHOLE, lambda to, _: to.lease(req_id, lease_ms, pages), sum)

    def keep(self, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Call[Kept]:
        return Call(
            "keep",
            _WHOLE if keys else [],
            lambda to, _: to.keep(keys, seconds, tenant, tenants),
            lambda found: next(iter(found), Kept(0, 0, "")),
        )

    def _parts(self, count: int, sizes: Sizes) -> list[slice]:
        """Return the slices of a batch of `count` items, one for each connection. With one connection, `sizes` is not
        called.
        """
        if self._connections > 1:
            return cut(sizes(), self._connections)
        return [slice(0, count)] if count else []

    def _reasons(self, sizes: Sizes, count: int, parts: Sequence[slice], missed: Sequence[Missed]) -> list[str | None]:
        found = {part.start + i: why for part, some in zip(parts, missed, strict=True) for i, why in some.items()}
        count_misses(self.misses, found.values(), lambda: (n for i, n in enumerate(sizes()) if i not in found))
        reasons: list[str | None] = [None] * count
        for i, why in found.items():
            reasons[i] = why
        return reasons
