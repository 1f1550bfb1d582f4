"""The page index: requests, their blocks, and in each block the pages of every layer, head and plane.

A block of single pages that no command has used since the server's start is *unloaded*: the index has only the rows of
its sheets (see `records`), which take less memory than a `Block` and its entries. The first lookup of the block creates
the `Block`.

A `Block` has a bit for each single page, in rows (see `core.pieces`). The pages of an extent are computed from its
shape. Costs: O(1) to add or discard a page; O(pages) to list pages.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from typing import Generic, TypeVar

from kvpage_server.core import BlockChanges, PageSet, Part, Slot
from kvpage_server.core.pieces import GROUPS, ROW_HEADS, TYPES, bit_of, row_of
from kvpage_server.page import BlockShape, PageError, PageKey, Plane, checksum, pack_header
from kvpage_server.store.records import ROW

# -- Placeholders of values on disk only -------------------------------------------------------------------------------


class NotLoaded(Exception):
    """Error in the server: a command uses the bytes of a value that is on disk only. Its `needs` should load it."""

    def __init__(self, name: bytes) -> None:
        super().__init__(f"{name!r} lies on disk")


class CodeCounts:
    """Counts of the codes in memory, and bytes of their bodies and of the codes."""

    values = 0
    raw = 0
    stored = 0


class Code:
    """The lossless code of a body in memory, in the bodies of `slots`. `digest` is the XXH3-64 of the body.

    `size` has the bytes of the code, `footprint` those of the slots.
    """

    __slots__ = ("_counts", "_raw", "digest", "footprint", "size", "slots")

    def __init__(self, slots: Sequence[Slot], digest: int, raw: int, counts: CodeCounts) -> None:
        self.slots = slots
        self.digest = digest
        self.size = sum(slot.size for slot in slots)
        self.footprint = sum(slot.footprint for slot in slots)
        self._raw = raw
        self._counts = counts
        counts.values += 1
        counts.raw += raw
        counts.stored += self.size

    def __del__(self) -> None:
        self._counts.values -= 1
        self._counts.raw -= self._raw
        self._counts.stored -= self.size


class OnDisk:
    """Placeholder of the slot of a page, a long string, or a block's body that is on disk only, or coded in memory.

    `code` is the code of a body that is on disk and, coded, in memory. A load decodes it, and does not read the disk.

    `name` is the value's name on disk, `size` the bytes of its body. `stored` is its size for its quota: the bytes of
    its code if it is coded in memory, or on disk only and coded there; else `size`. `header` is a page's 64-byte
    header, empty for other values. `unit` is the block of a page or a body, None for a string. `expires` is in unix
    milliseconds, 0 for never; `used`, the last use, in monotonic seconds. `borrowed_at` is the number of bytes that all
    replies had borrowed from disk when a reply last borrowed this value; -1 if none has. `failing` is the error of the
    last attempt to read it from disk, empty after a success. `temporary_slot` has the bytes as long as a client with
    CLIENT NO-TOUCH holds the value: its reads must not change the order of eviction.
    """

    __slots__ = (
        "__weakref__",
        *("borrowed_at", "code", "expires", "failing", "header", "name", "size", "stored", "temporary_slot", "unit"),
        "used",
    )

    def __init__(
        self,
        name: bytes,
        size: int,
        *,
        expires: int = 0,
        header: bytes = b"",
        unit: object = None,
        used: int = 0,
        stored: int = 0,
    ) -> None:
        self.name = name
        self.size = size
        self.stored = stored or size
        self.expires = expires
        self.header = header
        self.unit = unit
        self.used = used
        self.borrowed_at = -1
        self.failing = ""
        self.temporary_slot: Slot | None = None
        self.code: Code | None = None

    @property
    def footprint(self) -> int:
        """Bytes of memory in the arena."""
        return 0 if self.code is None else self.code.footprint

    @property
    def slot(self) -> Slot:
        """The temporary slot. This and all properties and methods below raise NotLoaded without one."""
        if self.temporary_slot is None:
            raise NotLoaded(self.name)
        return self.temporary_slot

    @property
    def body(self) -> memoryview:
        return self.slot.body

    def part(self, start: int, stop: int) -> Part:
        return self.slot.part(start, stop)


# -- scan --------------------------------------------------------------------------------------------------------------
#
# The order in which keys are scanned: a list of keys. SCAN's cursors are positions in it, and RANDOMKEY draws from it.
# It exists only while clients scan.
#
# The list has the keys that existed when it was created, followed by newer ones. A scan starts at the end of the list
# and moves to its beginning. So the scan ends however many keys are added, and it finds every key that exists during
# the whole scan, because positions do not change. It also finds deleted keys, which the caller filters out. A key that
# was deleted and set again is in the list twice. So is a page that was stored by itself, and later in an extent.
#
# When more than half of a list's keys are deleted, or the list got many bytes of new keys, the list gets no more keys,
# and the next scan creates a new one. Cursors into the last few lists stay valid. Any other cursor starts a new scan,
# which repeats keys but skips none.
#
# Costs: O(keys) to create a list, which happens at most once in as many deletions, or after REST_AFTER without a scan;
# O(1) for each key that is added or returned.

_PLACE_BITS = 40  # low bits of a cursor: the number of positions left; the bits above are the list's generation
_OLD_LISTS = 2  # lists before the current one whose cursors stay valid
_SLACK = 1024  # deleted keys that a list may have in any case
_SLACK_KIB = 4096  # KiB of long new keys that a list may get in any case
REST_AFTER = 300_000  # milliseconds without a scan after which the lists are dropped


T = TypeVar("T")


class ScanOrder(Generic[T]):
    """The lists of keys for scans. `everything()` returns all existing keys, and `count()` their number."""

    def __init__(self, everything: Callable[[], list[T]], count: Callable[[], int]) -> None:
        self._everything = everything
        self._count = count
        self._lists: dict[int, list[T]] = {}  # by generation: the current list and up to _OLD_LISTS before it
        self._generation = random.randrange(1, 1 << 22)  # random, so that cursors of an earlier process are invalid
        self.current: list[T] | None = None  # the list that gets new keys; None while no client scans
        self._kib = 0  # KiB of the long keys that the current list got since its creation
        self._last_used = 0  # the last scan, in monotonic milliseconds

    def add(self, name: T) -> None:
        """Add a new key to the current list, which must exist."""
        assert self.current is not None
        self.current.append(name)
        self._kib += len(name) >> 10 if isinstance(name, bytes) else 0
        if len(self.current) > 2 * self._count() + _SLACK or self._kib > self._count() + _SLACK_KIB:
            self.current = None

    def visit(self, cursor: int, count: int, now: int) -> tuple[int, list[T]]:
        """Return the next cursor, 0 at the end, and up to `count` keys, some of which may be deleted.

        `now` is in monotonic milliseconds.
        """
        self._last_used = now
        generation, left = cursor >> _PLACE_BITS, cursor & ((1 << _PLACE_BITS) - 1)
        if generation not in self._lists:
            generation, left = self._begin()
        order = self._lists[generation]
        left = min(left, len(order))
        names = order[max(left - count, 0) : left]
        left -= len(names)
        return (generation << _PLACE_BITS | left if left else 0), names[::-1]

    def draw(self, now: int) -> T | None:
        """Return a random key, which exists in at least about half of the calls; None if the list is empty."""
        self._last_used = now
        generation, places = self._begin()
        return random.choice(self._lists[generation]) if places else None

    def _begin(self) -> tuple[int, int]:
        """Return the generation and the length of the list for a new scan, which is created if necessary."""
        if self.current is None or len(self.current) > 2 * self._count() + _SLACK:
            self.current, self._kib = self._everything(), 0
            self._generation += 1
            self._lists[self._generation] = self.current
            for old in list(self._lists)[: -1 - _OLD_LISTS]:
                del self._lists[old]
        return self._generation, len(self.current)

    def drop_idle_scans(self, now: int) -> None:
        """Drop the lists if no client has scanned for REST_AFTER. `now` is in monotonic milliseconds."""
        if self._lists and now - self._last_used > REST_AFTER:
            self.clear()

    def clear(self) -> None:
        """Drop all lists, so that the next scan creates a new one."""
        self.current = None
        self._lists.clear()


# -- extent ------------------------------------------------------------------------------------------------------------
#
# A block in one slot, with one digest and one entry in the index, however many pages it has.
#
# Each lookup of a page creates an object. The page's header contains a checksum of its bytes. The checksums of all
# pages are computed together when the first one is needed, after the whole body was compared with its digest.

_WRONG = 0xFFFF_FFFF_FFFF_FFFF  # XOR mask that makes the checksums of a damaged body wrong


class Extent:
    """The body of a whole block, in `slot`. `digest` is its XXH3-64, 0 if it is not known.

    `slot` is an `OnDisk` if the body is on disk only. `created` and `expires` are in unix milliseconds, `ttl` is in
    seconds; `expires` and `ttl` are 0 for never.
    """

    __slots__ = ("_checksums", "created", "digest", "expires", "shape", "slot", "ttl")

    def __init__(self, shape: BlockShape, slot: Slot | OnDisk, digest: int, created: int, ttl: int) -> None:
        self.shape = shape
        self.slot = slot
        self.digest = digest
        self.created = created
        self.ttl = ttl
        self.expires = created + ttl * 1000 if ttl else 0
        self._checksums: array[int] | None = None  # XXH3-64 of each page in the body's order; None until one is needed

    def page(self, unit: object, page: int, layer: int, head: int, kv_type: int) -> ExtentPage | None:
        """Return a page of the extent; None if its shape has no such page. `unit` is the block, `page` its page id."""
        try:
            span = self.shape.page_span(layer, head, kv_type)
        except PageError:
            return None
        return ExtentPage(self, span, unit, page, (layer, head, kv_type))

    @property
    def has_checksums(self) -> bool:
        """Whether `checksum_of` needs no bytes from disk."""
        return self._checksums is not None or not self.digest or type(self.slot) is not OnDisk

    @property
    def is_not_hashed(self) -> bool:
        """Whether `checksum_of` would hash the whole body, which is in memory."""
        return self._checksums is None and self.digest != 0 and type(self.slot) is not OnDisk

    def checksum_of(self, layer: int, head: int, plane: Plane) -> int:
        """Return the XXH3-64 of a page, 0 if the body has no digest.

        The result is wrong on purpose if the body is damaged, so that no reader accepts the page. The first call for an
        extent hashes its whole body.
        """
        if not self.digest:
            return 0
        checksums = self._checksums or self.hash_pages(self.slot.body)
        planes = self.shape.planes
        return checksums[(layer * len(planes) + planes.index(plane)) * self.shape.heads + head]

    def hash_pages(self, body: memoryview) -> array[int]:
        """Compute the checksums of all pages of the block, unless they are known. It may run on a thread.

        `body` is the block's. The results are wrong on purpose if it does not match the digest.
        """
        if self._checksums is None:
            mask = 0 if checksum(body) == self.digest else _WRONG
            self._checksums = array("Q", [checksum(body[span]) ^ mask for span in self.shape.page_spans()])
        return self._checksums


class ExtentPage:
    """A page of an extent: `size` bytes of its body from offset `start` on.

    `unit` is its block, `page` the block's page id. `expires` is in unix milliseconds, 0 for never; it may differ from
    the extent's after a split.
    """

    __slots__ = ("expires", "extent", "head", "kv_type", "layer", "page", "size", "start", "unit")

    def __init__(self, extent: Extent, span: slice, unit: object, page: int, spot: Sequence[int]) -> None:
        self.extent = extent
        self.start: int = span.start
        self.size: int = span.stop - span.start
        self.expires = extent.expires
        self.unit = unit
        self.page = page
        self.layer, self.head, self.kv_type = spot

    @property
    def body(self) -> memoryview:
        """The page's bytes."""
        return self.extent.slot.body[self.start : self.start + self.size]

    def part(self, start: int, stop: int) -> Part:
        """Return the bytes of the page from `start` to before `stop`, as a piece of a reply."""
        return self.extent.slot.part(self.start + start, self.start + stop)

    @property
    def footprint(self) -> int:
        """The page's share of the block's memory, in bytes."""
        return self.size

    @property
    def header(self) -> bytes:
        """The page's 64-byte header, with its checksum."""
        extent = self.extent
        return self.header_with(extent.checksum_of(self.layer, self.head, extent.shape.plane(self.kv_type)))

    def header_with(self, checksum: int) -> bytes:
        """Return the page's 64-byte header with a given checksum."""
        extent = self.extent
        plane = extent.shape.plane(self.kv_type)
        return pack_header(
            plane.dtype,
            self.kv_type,
            extent.shape.page_size,
            plane.head_dim,
            self.layer,
            self.head,
            self.page,
            extent.created,
            extent.ttl,
            self.size,
            checksum,
        )


def rows_in(shape: BlockShape) -> Iterator[tuple[int, int]]:
    """Return the number and the bits of each row of a block that has every page of a shape, in order."""
    of_first_layer = [
        (row_of(0, first, plane.kv_type), (1 << min(shape.heads - first, ROW_HEADS)) - 1)
        for plane in shape.planes
        for first in range(0, shape.heads, ROW_HEADS)
    ]
    layers = range(0, row_of(shape.layers, 0, 0), row_of(1, 0, 0))
    return ((layer + row, heads) for layer in layers for row, heads in of_first_layer)


@lru_cache(maxsize=64)
def rows_of(shape: BlockShape) -> Mapping[int, int]:
    """Return the bits of each row of a block that has every page of a shape, by the row's number."""
    return dict(rows_in(shape))  # no MappingProxyType, because a copy of that takes ten times as long


@lru_cache(maxsize=256)  # most rows of a model have the same heads
def _heads_of(group: int, heads: int) -> tuple[tuple[int, bytes], ...]:
    """Return the heads in a row's bits, each as a number and as text."""
    first = group * ROW_HEADS
    return tuple((first + bit, b"%d" % (first + bit)) for bit in range(ROW_HEADS) if heads >> bit & 1)


def page_names(req_id: bytes, page: int, rows: Iterable[tuple[int, int]]) -> Iterator[tuple[bytes, int, int, int]]:
    """Yield the key, layer, head and kv_type of each page in `rows`: pairs of a row's number and its bits of heads."""
    for row, heads in rows:
        plane, group = divmod(row, GROUPS)
        layer, kv_type = divmod(plane, TYPES)
        prefix = b"kv:%b:%d:" % (req_id, layer)
        suffix = b":%d:%d" % (page, kv_type)
        for head, text in _heads_of(group, heads):
            yield prefix + text + suffix, layer, head, kv_type


def page_keys(req_id: bytes, page: int, rows: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Return the keys of the pages in `rows`, as `page_names` does. A row's keys are created together."""
    return chain.from_iterable(_keys_of_row(req_id, page, row, heads) for row, heads in rows)


def _keys_of_row(req_id: bytes, page: int, row: int, heads: int) -> list[bytes]:
    plane, group = divmod(row, GROUPS)
    layer, kv_type = divmod(plane, TYPES)
    prefix, suffix = b"kv:%b:%d:" % (req_id, layer), b":%d:%d" % (page, kv_type)
    return [prefix + text + suffix for _, text in _heads_of(group, heads)]


class Block(PageSet):
    """A block: the pages of one (req_id, page_id), which are evicted together, as an extent or as bits of single pages.

    `pages` is their number. `soonest` is the first expiry of a page in unix milliseconds, 0 for never.
    """

    __slots__ = ()

    extent: Extent | None
    shape: BlockShape | None

    @property
    def rows(self) -> Mapping[int, int]:
        """The bits of its pages, by row; see `core.pieces`."""
        return self.bits if self.extent is None else rows_of(self.extent.shape)

    @property
    def code(self) -> Code | None:
        """The code of an extent that is coded in memory."""
        body = None if self.extent is None else self.extent.slot
        return body.code if isinstance(body, OnDisk) else None

    def fill(self, extent: Extent) -> None:
        """Replace the block's pages by an extent."""
        self.bits = {}
        self.extent = extent
        self.pages = extent.shape.pages
        self.soonest = extent.expires
        self.shape, self.shape_known = extent.shape, True

    def split(self) -> None:
        """Replace the extent by bits of its pages. The caller creates their entries."""
        self.bits = self.rows
        self.extent = None

    def page_keys(self) -> Iterator[bytes]:
        """Yield the keys of its pages in the order of a block's body: layer, plane, head."""
        return page_keys(self.req_id, self.page, self._rows_in_order())

    def page_names(self) -> Iterator[tuple[bytes, int, int, int]]:
        """Return the key, layer, head and kv_type of each page in the order of a block's body."""
        return page_names(self.req_id, self.page, self._rows_in_order())

    def _rows_in_order(self) -> Iterator[tuple[int, int]]:
        return self.each_row() if self.extent is None else rows_in(self.extent.shape)

    def random_key(self) -> bytes:
        """Return the key of a random page.

        The block must have pages. O(1) for an extent, otherwise O(rows log rows).
        """
        if self.extent is not None:
            shape = self.extent.shape
            layer, head = random.randrange(shape.layers), random.randrange(shape.heads)
            return bytes(PageKey(self.req_id, layer, head, self.page, random.choice(shape.planes).kv_type))
        row = random.choice([*self.each_row()])
        return random.choice([*page_keys(self.req_id, self.page, [row])])

    def expires_at(self, expires: int) -> None:
        """Lower `soonest` to the expiry of one of its pages, which is in unix milliseconds, 0 for never."""
        if expires and (not self.soonest or expires < self.soonest):
            self.soonest = expires

    def measure(self) -> tuple[int, int, list[int]]:
        """Return its last layer plus one, its last head plus one, and its kv_types."""
        if self.extent is not None:
            shape = self.extent.shape
            return shape.layers, shape.heads, [plane.kv_type for plane in shape.planes]
        layers, heads, planes = self.outline()
        return layers, heads, [kind for kind in range(TYPES) if planes >> kind & 1]

    @property
    def is_full(self) -> bool:
        """Whether every layer up to the last has every plane and head up to the last."""
        layers, heads, planes = self.measure()
        return self.pages == layers * heads * len(planes)


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """The keys of some pages of a block, in the order of a block's body: every page of a shape, or rows of bits.

    The iterator creates each key when it is needed, because there may be 131,072.
    """

    req_id: bytes
    page: int
    pages: int  # their number
    shape: BlockShape | None
    rows: Mapping[int, int]  # bits by row; empty with a shape

    @classmethod
    def of(cls, block: Block) -> BlockKeys:
        """Return the keys of a block as it is now."""
        shape, rows = (block.extent.shape, {}) if block.extent is not None else (None, block.rows)
        return cls(block.req_id, block.page, block.pages, shape, rows)

    def __len__(self) -> int:
        return self.pages

    def __iter__(self) -> Iterator[bytes]:
        rows = rows_in(self.shape) if self.shape is not None else self.rows.items()
        return page_keys(self.req_id, self.page, rows)

    def __contains__(self, key: bytes) -> bool:
        """Return whether it has a key, which must be the key of a page of this block."""
        _, _, *numbers = key.split(b":")
        layer, head, _, kv_type = map(int, numbers)
        if self.shape is None:
            return bool(self.rows.get(row_of(layer, head, kv_type), 0) & bit_of(head))
        has_plane = any(plane.kv_type == kv_type for plane in self.shape.planes)
        return has_plane and layer < self.shape.layers and head < self.shape.heads

    @property
    def prefix(self) -> bytes:
        """The prefix of its keys, and of those of every page of the request: `kv:{req}:`."""
        return b"kv:%b:" % self.req_id


class PageIndex:
    """The blocks of every request, by page id."""

    def __init__(self) -> None:
        # By request and page id: a block, or the rows of its sheets while it is unloaded. A request has at least one
        # block. The core adds blocks, too; its caller then calls `note_made`.
        self.requests: dict[bytes, dict[int, Block | bytes]] = {}
        # While a client scans, `open` creates new blocks, and not the core.
        self.scans = ScanOrder(lambda: list(self.requests), lambda: len(self.requests))
        self._order: tuple[bytes, list[int]] | None = None  # the last listed request, and its page ids in order
        self.blocks = 0  # number of all blocks
        self.unloaded_pages = 0  # number of pages in unloaded blocks
        self.name_bytes = 0  # sum of the lengths of `req_id` of all blocks
        self.on_load: Callable[[Block, bytes], None] | None = None  # adds the pages of such rows to a new block
        self.changes: BlockChanges | None = None  # gets the blocks that are added and removed from now on

    def __len__(self) -> int:
        return len(self.requests)

    def open(self, req_id: bytes, page: int) -> Block:
        """Return the block of a request with this page id, loaded. It is created if it does not exist."""
        request = self.requests.get(req_id)
        if request is None:
            request = self.requests[req_id] = {}
            if self.scans.current is not None:
                self.scans.add(req_id)
        block = request.get(page)
        if block is None:
            if self._order is not None and self._order[0] == req_id:
                self._order = None
            block = request[page] = Block(req_id, page)
            self.blocks += 1
            self.name_bytes += len(req_id)
            if self.changes is not None:
                self.changes.note(req_id, page, True)
        elif type(block) is not Block:
            block = self._load_block(req_id, page)
        return block

    def __iter__(self) -> Iterator[Block]:
        """Yield every loaded block."""
        return (block for request in self.requests.values() for block in request.values() if type(block) is Block)

    def note_on_disk(self, req_id: bytes, page: int, rows: bytes) -> None:
        """Add an unloaded block, or more pages of one. `rows` are the rows of a sheet."""
        request = self.requests.get(req_id)
        if request is None:
            request = self.requests[req_id] = {}
        self.unloaded_pages += len(rows) // ROW
        known = request.get(page)
        if known is None:
            self.blocks += 1
            self.name_bytes += len(req_id)
            request[page] = rows
        else:
            assert isinstance(known, bytes)
            request[page] = known + rows

    def _load_block(self, req_id: bytes, page: int) -> Block:
        """Create the `Block` of an unloaded block, and the entries of its pages. O(pages)."""
        request = self.requests[req_id]
        rows, block = request[page], Block(req_id, page)
        assert isinstance(rows, bytes)
        assert self.on_load is not None
        request[page] = block
        self.unloaded_pages -= len(rows) // ROW
        self.on_load(block, rows)
        return block

    def rows(self, req_id: bytes, page: int) -> bytes | None:
        """Return the rows of an unloaded block; None if the block is loaded or does not exist."""
        found = self.requests.get(req_id, {}).get(page)
        return found if isinstance(found, bytes) else None

    def blocks_on_disk(self) -> list[tuple[bytes, int]]:
        """Return the request and page id of every unloaded block. O(blocks)."""
        if not self.unloaded_pages:
            return []
        every = self.requests.items()
        return [(req_id, page) for req_id, request in every for page, rows in request.items() if type(rows) is bytes]

    def remove(self, block: Block) -> None:
        """Remove a block from the index. The object keeps its pages."""
        request = self.requests[block.req_id]
        del request[block.page]
        self.blocks -= 1
        self.name_bytes -= len(block.req_id)
        if not request:
            del self.requests[block.req_id]
        if self.changes is not None:
            self.changes.note(block.req_id, block.page, False)

    def scan(self, cursor: int, count: int, now: int) -> tuple[int, list[bytes]]:
        """Return the next cursor, 0 at the end, and the requests in the next `count` places of the order of scans."""
        cursor, req_ids = self.scans.visit(cursor, count, now)
        return cursor, [req_id for req_id in req_ids if req_id in self.requests]

    def page_ids(self, req_id: bytes) -> list[int]:
        """Return the page ids of a request's blocks, in no particular order."""
        return list(self.requests.get(req_id, ()))

    def count(self, req_id: bytes) -> int:
        """Return the number of a request's blocks, including unloaded ones."""
        return len(self.requests.get(req_id, ()))

    def pages_from(self, req_id: bytes, first: int) -> Iterator[int]:
        """Return the page ids of a request's blocks in order, from `first` on.

        The sorted list of the last request is kept, so that a request is listed in several calls with one sort.
        """
        order = self._order
        if order is None or order[0] != req_id:
            order = self._order = req_id, sorted(self.requests.get(req_id, ()))
        return islice(order[1], bisect_left(order[1], first), None)

    def note_made(self, blocks: list[Block], count: int, name_bytes: int) -> None:
        """Count blocks that the core has added to `requests`. `name_bytes` is the sum of the lengths of `req_id`. Of
        `blocks`, at least `count` are new.
        """
        self.blocks += count
        self.name_bytes += name_bytes
        self._order = None
        if self.changes is not None:
            self.changes.add_all(blocks)

    def of(self, req_id: bytes) -> list[Block]:
        """Return the blocks of a request in the order of their page ids, loaded."""
        pages = sorted(self.requests.get(req_id, ()))
        return [block for page in pages if (block := self.block(req_id, page))]

    def block(self, req_id: bytes, page: int) -> Block | None:
        """Return a block; None if it does not exist. An unloaded block gets its `Block` and its entries."""
        request = self.requests.get(req_id)
        block = request.get(page) if request is not None else None
        return block if block is None or type(block) is Block else self._load_block(req_id, page)

    def has(self, req_id: bytes, page: int) -> bool:
        """Return whether a request has a block. Loads no block."""
        return page in self.requests.get(req_id, ())

    def still_has(self, block: Block) -> bool:
        """Return whether a block from an earlier step is still in the index."""
        return self.requests.get(block.req_id, {}).get(block.page) is block

    def around(self, block: Block) -> list[Block]:
        """Return the blocks with the page ids before, of and after a block, as far as they exist."""
        request, req_id, page = self.requests[block.req_id], block.req_id, block.page
        found = [block]
        if (before := request.get(page - 1)) is not None:
            found.insert(0, before if type(before) is Block else self._load_block(req_id, page - 1))
        if (after := request.get(page + 1)) is not None:
            found.append(after if type(after) is Block else self._load_block(req_id, page + 1))
        return found

    def clear(self) -> dict[bytes, dict[int, Block | bytes]]:
        """Remove all blocks. Return the former requests."""
        old, self.requests = self.requests, {}
        self.scans.clear()
        self._order = None
        self.blocks = self.unloaded_pages = self.name_bytes = 0
        if self.changes is not None:
            self.changes.clear()
        return old
