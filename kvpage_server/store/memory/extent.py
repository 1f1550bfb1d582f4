"""A block's body in one piece of memory, from which its pages are computed.

It has one slot, one digest and one entry in the index, however many pages it has. A page is made when somebody asks for
it. Its header needs a checksum; those of all pages are computed together, when the first one is needed, from a body
that was checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvpage_server.core import Part, Slot
from kvpage_server.page import BlockShape, PageError, Plane, checksum, pack_header
from kvpage_server.store.memory.cold import Cold

_WRONG = 0xFFFF_FFFF_FFFF_FFFF


class Extent:
    """The body of a block, in `slot`, which may be on disk only. `digest` is its XXH3-64, 0 if not known.

    `created` and `expires` are in unix milliseconds, `ttl`, as it was given, in seconds; 0 for never.
    """

    __slots__ = ("_checksums", "created", "digest", "expires", "shape", "slot", "ttl")

    def __init__(self, shape: BlockShape, slot: Slot | Cold, digest: int, created: int, ttl: int) -> None:
        self.shape = shape
        self.slot = slot
        self.digest = digest
        self.created = created
        self.ttl = ttl
        self.expires = created + ttl * 1000 if ttl else 0
        self._checksums: array[int] | None = None  # of its pages, in the body's order

    def page(self, unit: object, page: int, layer: int, head: int, kv_type: int) -> ExtentPage | None:
        """One of its pages; None if it has no such page. `unit` is its block, and `page` the block's page id."""
        try:
            span = self.shape.page_span(layer, head, kv_type)
        except PageError:
            return None
        return ExtentPage(self, span, unit, page, (layer, head, kv_type))

    @property
    def is_intact(self) -> bool:
        """Whether the body is what was stored, as far as is known."""
        return not self.digest or checksum(self.slot.body) == self.digest

    @property
    def has_checksums(self) -> bool:
        """Whether `checksum_of` can answer now."""
        return self._checksums is not None or not self.digest or type(self.slot) is not Cold

    def checksum_of(self, layer: int, head: int, plane: Plane) -> int:
        """The XXH3-64 of a page. It is wrong if the body is damaged, so that no reader accepts the page."""
        if not self.digest:
            return 0
        if self._checksums is None:
            mask = 0 if self.is_intact else _WRONG
            body = self.slot.body
            self._checksums = array("Q", [checksum(body[span]) ^ mask for span in self.shape.page_spans()])
        planes = self.shape.planes
        return self._checksums[(layer * len(planes) + planes.index(plane)) * self.shape.heads + head]


class ExtentPage:
    """A page that lies in a block's body. `expires` is a unix time in milliseconds, 0 for never."""

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
        return self.extent.slot.body[self.start : self.start + self.size]

    def part(self, start: int, stop: int) -> Part:
        """The bytes of the body from `start` to before `stop`."""
        return self.extent.slot.part(self.start + start, self.start + stop)

    @property
    def footprint(self) -> int:
        """The page's share of the block's memory, in bytes."""
        return self.size

    @property
    def header(self) -> bytes:
        extent = self.extent
        return self.header_with(extent.checksum_of(self.layer, self.head, extent.shape.plane(self.kv_type)))

    def header_with(self, checksum: int) -> bytes:
        """The header with a given checksum."""
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
