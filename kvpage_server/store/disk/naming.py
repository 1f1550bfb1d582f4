"""Names of values and units on disk, see `records`, and lookup of values and units by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvpage_server.page import page_named
from kvpage_server.store.contents import Contents
from kvpage_server.store.eviction.queues import Unit
from kvpage_server.store.memory.entry import Entry, is_page
from kvpage_server.store.memory.index import Block, Extent, OnDisk
from kvpage_server.store.records import name_of_block, name_of_key
from kvpage_server.system.text import printable

_MOST_SHOWN = 256  # bytes of a key in a log line


def name_of_unit(unit: Unit) -> bytes:
    """Return the name of a unit: of a string or a block. A block of single pages has a name, too."""
    return name_of_key(unit) if isinstance(unit, bytes) else name_of_block(unit.req_id, unit.page)


def each_name_in(unit: Unit) -> Iterator[bytes]:
    """Yield the names of a unit's values: of a string, an extent, or each single page of a block."""
    if isinstance(unit, bytes):
        yield name_of_key(unit)
    elif unit.extent is not None:
        yield name_of_block(unit.req_id, unit.page)
    else:
        yield from map(b"k".__add__, unit.page_keys())  # as `name_of_key`, without the cost of a call


def names_in(unit: Unit) -> Sequence[bytes]:
    """Return the names of a unit's values as a list, see `each_name_in`."""
    return [*each_name_in(unit)]


def parse_block(name: bytes) -> tuple[bytes, int]:
    """Return the request id and page id in a block's name."""
    req_id, _, page = name[1:].rpartition(b":")
    return req_id, int(page)


def described(name: bytes) -> str:
    """Return the description of a value for the log: request id and page id of a block, the key of another value."""
    if name[:1] == b"b":
        req_id, page = parse_block(name)
        return f"block {page} of request {printable(req_id.decode('utf-8', 'surrogateescape'))}"
    key = name[1 : _MOST_SHOWN + 1].decode("utf-8", "surrogateescape")
    return f"key {printable(key)}{'...' if len(name) > _MOST_SHOWN + 1 else ''}"


def block_name_of(name: bytes) -> bytes | None:
    """Return the name of the block that a page with this name belongs to; None if it is no name of a page."""
    page = page_named(name[1:]) if name[:4] == b"kkv:" else None
    return name_of_block(page.req_id, page.page) if page is not None else None


def value_named(contents: Contents, name: bytes) -> Entry | Extent:
    """Return the value with this name, which must exist: an entry of the index, or an extent."""
    if name[:1] == b"k":
        return contents.catalogue.entries[name[1:]]
    block = contents.index.block(*parse_block(name))
    assert block is not None
    assert block.extent is not None
    return block.extent


def unit_named(contents: Contents, name: bytes) -> Unit | None:
    """Return the unit with this name; None if there is none, or if a page has replaced the string with this key."""
    if name[:1] == b"b":
        return contents.index.block(*parse_block(name))
    entry = contents.catalogue.entries.get(name[1:])
    return None if entry is None or is_page(entry) else name[1:]


def is_there(contents: Contents, unit: Unit) -> bool:
    """Return whether a unit exists, without creating the entries of a block's pages."""
    if isinstance(unit, Block):
        return contents.index.has(unit.req_id, unit.page)
    return unit in contents.catalogue.entries


def is_removed(contents: Contents, name: bytes) -> bool:
    """Return whether no value has this name. A page counts as existing as long as its block exists."""
    if name[:1] == b"b":
        return not contents.index.has(*parse_block(name))
    return is_key_removed(contents, name[1:])


def is_key_removed(contents: Contents, key: bytes) -> bool:
    """Return whether a key has no value, as `is_removed`. It makes no copy of the key, which may have megabytes."""
    page = page_named(key)
    return key not in contents.catalogue.entries and (page is None or not contents.index.has(page.req_id, page.page))


def is_on_disk_named(contents: Contents, name: bytes) -> bool:
    """Return whether the value with this name, which must exist, is on disk only, and not coded in memory either."""
    value = value_named(contents, name)
    body = value.slot if isinstance(value, Extent) else value
    return isinstance(body, OnDisk) and body.code is None
