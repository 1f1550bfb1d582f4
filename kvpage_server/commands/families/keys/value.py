"""Values as strings: the reply of GET, and the value that SET stores.

A page is the string of its header and body. A valid page blob, stored under the key that its header names, becomes that
page; any other value is a plain string.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.commands.steps import IN_THREAD_FROM, wait_for_thread
from kvpage_server.core import Argument, Slot
from kvpage_server.core.arguments import PageName
from kvpage_server.core.pieces import Piece
from kvpage_server.page import (
    HEADER_SIZE,
    MAGIC,
    MAX_BLOCK_PAGES,
    PageError,
    PageHeader,
    PageKey,
    checksum,
    decode_page,
)
from kvpage_server.resp import Reply, ReplyError
from kvpage_server.store.evict import PendingWrite
from kvpage_server.store.eviction.quotas import text_size
from kvpage_server.store.memory.entry import Entry, Text, is_page
from kvpage_server.store.memory.index import Block, OnDisk

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
    if page is not None or keyspace.is_limited:
        admit(client, [(key, value, page)])
    if page is None:
        keyspace.contents.set_string(key, value, expires)
    else:
        keyspace.contents.set_page(*page, expires)


def check_splits(client: Client, keys: Sequence[bytes]) -> None:
    """Raise ReplyError if a change of these keys would split blocks that were stored whole, and that have more than
    MAX_BLOCK_PAGES pages in all: other clients would wait for seconds.
    """
    catalogue = client.keyspace.contents.catalogue
    if len(keys) < 2 or not catalogue.in_extents:
        return
    found = (catalogue.page_in_extent(key) for key in keys if key not in catalogue.entries)
    blocks = {cast(Block, page.unit) for page in found if page is not None}
    pages = sum(block.pages for block in blocks if block.pages > 1)
    if len(blocks) > 1 and pages > MAX_BLOCK_PAGES:
        raise ReplyError(
            f"ERR these keys are in blocks of {pages} pages, of which at most {MAX_BLOCK_PAGES} can be split at once: "
            "name fewer keys"
        )


def put(client: Client, key: bytes, value: Argument, page: PageParts | None) -> None:
    """Store a value without an expiry, after `pages_of` has returned `page` for it, and `admit` has made space."""
    if page is None:
        client.keyspace.contents.set_string(key, value, 0)
    else:
        client.keyspace.contents.set_page(*page)


def admit(client: Client, values: Iterable[tuple[bytes, Argument, PageParts | None]]) -> None:
    """Evict values until disk and quotas have space for values that are stored together. Each is a key, a value, and
    the result of `pages_of` for them. Raises OverLimit if not enough may be evicted.
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
    """
    if key[:3] != b"kv:":
        return None
    blob = value if isinstance(value, bytes) else value.body
    if blob[:4] != MAGIC:
        return None
    try:
        name = PageKey.parse(key)
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
