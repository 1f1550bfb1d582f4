"""Values as strings: the reply of GET, and the value that SET stores.

A page is the string of its header and body. A valid page blob, stored under the key that its header names, becomes that
page; any other value is a plain string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse

import numpy as np

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.commands.steps import IN_THREAD_FROM, STEP, another_step, wait_for_thread
from kvpage_server.core import Argument, NewPages, Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.core.pieces import Piece
from kvpage_server.page import (
    FIELD_AT,
    HEADER_SIZE,
    MAGIC,
    MAX_SINGLE_PAGES,
    VERSION,
    PageError,
    PageHeader,
    PageKey,
    checksum,
    decode_page,
    page_named,
)
from kvpage_server.resp import Reply, ReplyError
from kvpage_server.store.contents import BlockGrowth, check_split
from kvpage_server.store.evict import PendingWrite
from kvpage_server.store.eviction.quotas import text_size
from kvpage_server.store.memory.entry import Entry, Text, is_page
from kvpage_server.store.memory.index import Block, OnDisk

_VERSION_AT, _FLAGS_AT = FIELD_AT["version"], FIELD_AT["flags"]

PageParts = tuple[PageName, bytes, Slot]  # name, header and body: the arguments of Keyspace.set_page


def string_of(entry: Entry | None) -> Reply:
    """Return a value as the reply of GET; null without an entry. Long values are borrowed, not copied. Raises NotLoaded
    for a value on disk only.
    """
    if entry is None:
        return None
    if type(entry) is Slot:
        return entry.blob if type(entry.unit) is Block else (entry,)
    if isinstance(entry, Text):
        return entry.data
    if type(entry) is OnDisk:
        return string_of(entry.slot)  # raises NotLoaded here, and not when the reply is sent
    return (b"$%d\r\n%b" % (HEADER_SIZE + entry.size, bytes(entry.header)), entry.part(0, entry.size), b"\r\n")


def length_of(entry: Entry) -> int:
    """Return the length in bytes of the string that GET returns for a value."""
    return entry.size + (HEADER_SIZE if is_page(entry) else 0)


def part_of(entry: Entry, start: int, stop: int) -> Reply:
    """Return the bytes from `start` to before `stop` of the string that GET returns, as a reply. Both must be within
    the string. Raises NotLoaded for a value on disk only.
    """
    if isinstance(entry, Text):
        return entry.data[start:stop]
    pieces: list[Piece] = [b"$%d\r\n" % (stop - start)]
    if is_page(entry):
        pieces.append(bytes(entry.header[start:stop]))
        start, stop = max(start - HEADER_SIZE, 0), max(stop - HEADER_SIZE, 0)
    return (*pieces, entry.part(start, stop), b"\r\n")


def store(client: Client, key: bytes, value: Argument, expires: int = 0) -> None:
    """Store SET's value, which expires at `expires` (unix milliseconds, 0 for never). If limits apply, space is made
    first.

    A valid page blob under its own key becomes that page. Raises ReplyError for a page with a damaged body, OverLimit
    if there is no space.
    """
    keyspace = client.keyspace
    page = pages_of(client, [(key, value)])[0] if key[:3] == b"kv:" else None
    if page is not None:
        check_growth(client, [page])
    if page is not None or keyspace.is_limited:
        admit(client, [(key, value, page)])
    if page is None:
        keyspace.contents.set_string(key, value, expires)
    else:
        keyspace.contents.set_page(*page, expires)


def admit_one(client: Client, key: bytes, value: Argument) -> None:
    """Make space for SET's value before the command counts a read, because it may be called again. Raises as
    `pages_of` and `admit`.
    """
    (page,) = pages_of(client, [(key, value)])
    admit(client, [(key, value, page)])


def split_before(client: Client, keys: Sequence[bytes], *, stores: bool = False) -> None:
    """Prepare a change of several keys, of which some may not exist if it `stores`: raise Postponed after the split of
    a block that was stored whole, until the remaining ones have at most MAX_SINGLE_PAGES pages in all, which one step
    can split. Raise TooManyPages if one of them has more.
    """
    catalogue = client.keyspace.contents.catalogue
    if not catalogue.in_extents:
        return
    blocks = dict[Block, None]()
    for name in map(page_named, filterfalse(catalogue.entries.__contains__, keys)):
        block = client.keyspace.index.block(name.req_id, name.page) if name is not None else None
        if name is None or block is None or block.extent is None:
            continue
        if stores or (block.pages > 1 and block.extent.page(block, name.page, name.layer, name.head, name.kv_type)):
            check_split(block)
            blocks[block] = None
    if sum(block.pages for block in blocks) > MAX_SINGLE_PAGES:
        first = next(iter(blocks))
        client.keyspace.split_block(first.req_id, first.page)
        if first.extent is None:  # otherwise it is on disk only, and the change raises NotLoaded
            raise Postponed(another_step())


def check_growth(client: Client, pages: Sequence[PageParts | None]) -> None:
    """Raise TooManyPages if pages that are stored together would let a block get too many single pages."""
    contents = client.keyspace.contents
    if contents.has_large_blocks or len(pages) > STEP:
        growth = BlockGrowth(contents)
        for page in pages:
            if page is not None:
                growth.add(NewPages.one(page[0], page[2], 0))


def put(client: Client, key: bytes, value: Argument, page: PageParts | None) -> None:
    """Store a value without an expiry, after `pages_of` has returned `page` for it, and `admit` has made space."""
    if page is None:
        client.keyspace.contents.set_string(key, value, 0)
    else:
        client.keyspace.contents.set_page(*page)


def admit(client: Client, values: Iterable[tuple[bytes, Argument, PageParts | None]]) -> None:
    """Evict values until disk and quotas have space for values that are stored together. Each is a key, a value, and
    the result of `pages_of` for them. Raises OverLimit if not enough may be evicted, MoreRoom if the command has to be
    called again.
    """
    keyspace = client.server.keyspace
    if keyspace.is_limited or keyspace.leases.by_unit:
        keyspace.admit(_pending_write(key, value, page) for key, value, page in values)


def _pending_write(key: bytes, value: Argument, page: PageParts | None) -> PendingWrite:
    """Return the amount of space that a value of `admit` will take."""
    size = len(value) if isinstance(value, bytes) else value.size
    if page is not None:
        return PendingWrite(key, size, (page[0].req_id, page[0].page))
    return PendingWrite(key, text_size(key, size))


def pages_of(client: Client, values: Sequence[tuple[bytes, Argument]]) -> list[PageParts | None]:
    """Return for each key and value of a command the page's name, header and body, which is copied to a new slot; None
    if the value is not the blob of the page that the key names. Raises as `checked_page`.

    Raises Postponed as `copy_large`.
    """
    copy_large(client, values)
    return [_page_of(client, key, value) for key, value in values]


def copy_large(client: Client, values: Sequence[tuple[bytes, Argument]]) -> None:
    """Raise Postponed while a thread copies and checks the bodies of large page blobs among a command's values.

    The command is then called again, so it counts no read before this call.
    """
    large = [(key, value) for key, value in values if isinstance(value, Slot) and key[:3] == b"kv:"]
    if sum([value.size for _, value in large]) >= IN_THREAD_FROM:
        _prepare(client, large)


class _Prepared:
    """The copy of a page's body, made for a command that waits. It is the `unit` of the command's word."""

    def __init__(self, client: Client, header: PageHeader, body: memoryview) -> None:
        self.slot = client.keyspace.arena.allocate(len(body))
        self.is_intact = False
        self._checksum = header.checksum
        self._body = body  # refers to the word, so it is dropped after the copy

    def copy(self) -> None:
        """Copy and check the body. It may run on a thread."""
        np.copyto(np.frombuffer(self.slot.body, np.uint8), np.frombuffer(self._body, np.uint8))
        self.is_intact = not self._checksum or checksum(self.slot.body) == self._checksum
        del self._body


def _prepare(client: Client, values: Iterable[tuple[bytes, Slot]]) -> None:
    """Raise Postponed if page blobs are among the values that are not prepared. Raises as `checked_page`, except for a
    body that does not match its checksum.
    """
    found = [
        (value, _Prepared(client, *checked[1:]))
        for key, value in values
        if value.unit is None and (checked := checked_page(client, key, value, verify=False)) is not None
    ]
    if not found:
        return

    def copy() -> None:
        for _, prepared in found:
            prepared.copy()

    def done() -> None:
        for value, prepared in found:
            value.unit = prepared

    raise Postponed(wait_for_thread(copy, done))


def _page_of(client: Client, key: bytes, value: Argument) -> PageParts | None:
    prepared = value.unit if isinstance(value, Slot) else None
    checked = checked_page(client, key, value, verify=prepared is None)
    if checked is None:
        return None
    name, header, body = checked
    if isinstance(prepared, _Prepared):
        if not prepared.is_intact:
            raise ReplyError("ERR the body does not match the checksum in its header")
        slot = prepared.slot
    else:
        slot = client.server.keyspace.arena.allocate(len(body))
        slot.body[:] = body
    return PageName(key, name.req_id, name.layer, name.head, name.page, name.kv_type), bytes(header), slot


def checked_page(
    client: Client, key: bytes, value: Argument, *, verify: bool = True
) -> tuple[PageKey, PageHeader, memoryview] | None:
    """Return a page's name, header and body, without a copy; None if `value` is not the blob of the page that `key`
    names. Without `verify`, the body's checksum is not compared.

    Raises ReplyError for a damaged body, and with strict-page-shape for a body whose length differs from its shape's.
    Raises ReplyError also for a header with flags, because the body may be in a format that this server cannot read.
    """
    if key[:3] != b"kv:":
        return None
    blob = value if isinstance(value, bytes) else value.body
    if blob[:4] != MAGIC:
        return None
    try:
        name = PageKey.parse(key)
        if len(blob) >= HEADER_SIZE and blob[_VERSION_AT] == VERSION and (flags := blob[_FLAGS_AT]):
            raise ReplyError(f"ERR flags must be 0, got {flags:#x}")
        header = PageHeader.parse(blob)
    except PageError:
        return None
    if not header.names(name) or header.body_size != len(blob) - HEADER_SIZE:
        return None
    try:
        _, body = decode_page(blob, verify=verify)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None
    if client.server.config.strict_page_shape and len(body) != header.tensor_size:
        raise ReplyError(
            f"ERR body must be page_size x head_dim x itemsize = {header.tensor_size} bytes, got {len(body)}"
        )
    return name, header, body
