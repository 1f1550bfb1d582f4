"""The page family: KVPAGESET, KVPAGEGET, KVPAGEEXISTS, their batches, KVPAGESTAT and KVPAGEWHY.

The five arguments that name a page, joined, are its key. A batch is parsed and stored, or found and sent, in steps.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from kvpage_server.commands.arguments import WRONG_TYPE, check_batch, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import (
    Postponed,
    ReadAhead,
    fetched,
    wait_for_checksums,
    wait_for_write_behind,
)
from kvpage_server.commands.families.pages.request import (
    HOLE,
    INCOMPLETE,
    blocks_of,
    fit_one_step,
    pages_missed,
    protection_fields,
    request_name,
)
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import WORDS_PER_STEP, Parts, extents_of_pages, nothing, pages, requests, values
from kvpage_server.commands.steps import STEP, Steps, stepwise
from kvpage_server.core import NAME, Argument, NewPages, PageNames, Slot, filled
from kvpage_server.core import arguments as core
from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage, PageName
from kvpage_server.core.pieces import Piece
from kvpage_server.page import MAX_SINGLE_PAGES, PageError, PageHeader, unix_ms
from kvpage_server.resp import OK, Raw, Reply, ReplyError, Stream
from kvpage_server.store.contents import NEVER_STORED, OVER_QUOTA, BlockGrowth
from kvpage_server.store.disk.borrowed_reads import VALUES_PER_COPY
from kvpage_server.store.disk.prefetch import Needed, Prefetcher
from kvpage_server.store.evict import MoreRoom
from kvpage_server.store.eviction.ghosts import Ghost
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.store.memory.entry import Entry, Page, coded_size_of, has_bytes, header_of, is_only_on_disk, is_page
from kvpage_server.store.memory.index import Block, ExtentPage, OnDisk
from kvpage_server.store.reading import Found
from kvpage_server.system.text import monotonic_ms

BlockName = tuple[bytes, int]  # request and page id

PAGES_PER_STEP = 512 if NAME == "native" else 128  # pages that a step parses, stores or finds
_DECIDED_PAGES_PER_STEP = 128  # the same when pages are stored one by one, because of listeners or quotas: the least
FROM_DISK = VALUES_PER_COPY  # pages that a step sends from disk
FROM_DISK_BYTES = 1 << 20  # bytes of these pages, or one page


def page_name(args: Sequence[Argument]) -> PageName:
    """Return the page that the first five arguments name. Raises ReplyError, which names the first wrong argument."""
    try:
        return core.page_name(args)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def page_key(args: Sequence[Argument]) -> bytes:
    """Return the key that the first five arguments name, without a check of them. No page has a key with invalid
    numbers, so a lookup of such a key finds nothing.
    """
    name: Sequence[Any] = args[:NAME_WORDS]
    try:
        return b":".join((b"kv", *name))
    except TypeError:  # a long argument is in the arena
        return b":".join((b"kv", *plain_all(name)))


def _pages_per_step(client: Client) -> int:
    """Return the number of pages that one step parses, stores or finds: less if each page needs a decision of
    its own.
    """
    return PAGES_PER_STEP if client.keyspace.stores_together else _DECIDED_PAGES_PER_STEP


def page_names(args: Sequence[Argument], first: int, most: int) -> PageNames:
    """Return the names of at most `most` pages of a batch, from page `first` (counted from 0) on.

    `args` are the batch: N, and then five arguments for each page. Raises ReplyError, which names a wrong argument.
    """
    try:
        return PageNames(args, 1 + first * NAME_WORDS, most)
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def _page_names_in_steps(client: Client, args: Sequence[Argument], count: int) -> Steps[list[PageNames]]:
    """Return the names of all `count` pages of a batch, in groups that were each parsed in a step. Raises
    ReplyError.
    """
    batches: list[PageNames] = []
    at_once = _pages_per_step(client)
    for first in range(0, count, at_once):
        batches.append(page_names(args, first, at_once))
        yield ()
    return batches


def new_pages(client: Client, args: Sequence[Argument], first: int, most: int, now: int) -> NewPages:
    """Return at most `most` pages of which `args` have ten arguments each, from index `first` on. The bodies are copied
    into slots if they are short; long ones are in slots already.

    `now` is the time of creation in unix milliseconds. Raises BadPage, which has the place of the wrong page.
    """
    config = client.server.config
    strict, with_checksums = config.strict_page_shape, config.page_checksums
    return NewPages(args, first, most, client.keyspace.arena, now, strict, with_checksums)


def _page_or_none(client: Client, args: list[Argument], entry: Entry | None) -> Reply:
    """Return KVPAGEGET's reply for the entry of a key: the body, or null without an entry. Raises ReplyError for an
    invalid name in `args`, and if the entry is a string.
    """
    if entry is None:
        page_name(args)  # raises ReplyError for a bad name
        return None
    if not is_page(entry):
        raise ReplyError(WRONG_TYPE)
    return encode_page_body(entry)


def encode_page_body(page: Page) -> tuple[Piece, ...]:
    """Return a page's body as a bulk string in pieces, which borrow the memory of its slot. Raises NotLoaded for a page
    on disk only.
    """
    if isinstance(page, Slot):
        return (page,)
    return b"$%d\r\n" % page.size, page.part(0, page.size), b"\r\n"


_page = partial(command, group="page")


@_page(
    "kvpageset req layer head page type dtype page_size head_dim ttl body",
    flags="write denyoom page hashed",
    uses=pages(0),
    needs=extents_of_pages(0),
    complexity="O(N) with N bytes",
    reply="OK",
    summary="Stores a page; ttl is in seconds, 0 for none.",
)
def kvpageset(client: Client, args: list[Argument]) -> Reply:
    """Return OK. The page replaces a page or string with the same key.

    A block has at most 8192 pages that are stored one by one. So a page of a larger block that was stored as a whole
    cannot be replaced.
    """
    try:
        page = new_pages(client, args, 0, 1, unix_ms())
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None
    try:
        client.keyspace.admit_batch(page)
    except MoreRoom:  # the command is called again, and the body is not hashed again
        page.slots[0].digest = PageHeader.parse(page.slots[0].header).checksum
        raise
    client.keyspace.contents.set_pages(page)
    return OK


@_page(
    "kvpageget req layer head page type",
    flags="readonly fast page",
    uses=pages(0),
    needs=values,
    reply="bulk | null",
    summary="Returns a page's body, or null if there is no such page.",
)
def kvpageget(client: Client, args: list[Argument]) -> Reply:
    """Return the body of the page; null if there is no such page, and WRONGTYPE if its key has another string.
    KVPAGEMGET returns null for that.
    """
    name: Sequence[Any] = args
    try:
        key = b":".join((b"kv", *name))
    except TypeError:
        key = page_key(args)
    entry = client.keyspace.reader.read(key)
    if type(entry) is Slot and type(entry.unit) is Block:  # the common case; the general code below has the same result
        return (entry,)
    return _page_or_none(client, args, entry)


@_page(
    "kvpagemset N req layer head page type dtype page_size head_dim ttl body [req layer head page type "
    "dtype page_size head_dim ttl body ...]",
    flags="write denyoom page hashed",
    uses=pages(1, PAGE_WORDS),
    needs=extents_of_pages(1, PAGE_WORDS),
    fetches=True,
    parts=Parts(1, PAGE_WORDS),
    complexity="O(N) with N bytes",
    reply="OK",
    summary="Stores N pages, or none of them.",
)
def kvpagemset(client: Client, args: list[Argument]) -> Reply:
    """Return OK, or an error that says which page is wrong; then none is stored. A block has at most 8192 pages that
    are stored one by one. If the system has no memory for the index (OOM), pages before the first one without memory
    may be stored: those of earlier steps, or with another ttl.

    A batch is stored in several steps if it has more than 128 pages, or if more than 4 MiB of its bodies were not
    hashed as they arrived, because the name is in mixed case, or `page-checksums` was turned on after the client had
    connected. Then other clients may see some pages before the rest, and a part may be stored if the server is killed
    before it answers. If another client stores a block of more than 8192 pages as a whole meanwhile, this block
    replaces all pages of the batch in it.
    """
    # 128 is the promise: a step usually stores up to 512 pages (`_pages_per_step`). A batch of more than 102 pages has
    # more than WORDS_PER_STEP words, so `dispatch.execute.begin` runs this function.
    count, now = check_batch("KVPAGEMSET", args, PAGE_WORDS, "page"), unix_ms()
    if count > _DECIDED_PAGES_PER_STEP and count > _pages_per_step(client):
        return Stream(None, _store_in_steps(client, args, count, deque(), now))
    batch = _pages_of_batch(client, args, 0, count, count, now)
    if len(batch) < count or client.keyspace.has_extents(batch):  # `new_pages` ends early after 4 MiB were hashed
        return Stream(None, _store_in_steps(client, args, count, deque([batch]), now))
    try:
        client.keyspace.admit_batch(batch)
    except MoreRoom:  # more than 250 keys have to be evicted, which takes several steps
        return Stream(None, _store_in_steps(client, args, count, deque([batch]), now))
    client.keyspace.contents.set_pages(batch)
    return OK


def _pages_of_batch(client: Client, args: Sequence[Argument], first: int, most: int, count: int, now: int) -> NewPages:
    """Return at most `most` pages of a batch of `count` pages, from page `first` (counted from 0) on. Raises ReplyError
    with the number of the wrong page.
    """
    try:
        return new_pages(client, args, 1 + first * PAGE_WORDS, most, now)
    except BadPage as error:
        raise ReplyError(f"ERR page {first + error.place + 1} of {count}: {error}") from None


def _store_in_steps(
    client: Client, args: Sequence[Argument], count: int, batches: deque[NewPages], now: int
) -> Iterator[Reply]:
    """Parse the pages of KVPAGEMSET that are not in `batches` yet, in steps. Then store all `count` pages in steps, and
    yield OK. Raises ReplyError, OverLimit or TooManyPages before a page is stored.
    """
    contents, read, at_once = client.keyspace.contents, sum(map(len, batches)), _pages_per_step(client)
    while read < count:
        batches.append(_pages_of_batch(client, args, read, at_once, count, now))
        read += len(batches[-1])
        yield ()
    if contents.may_outgrow(count):
        growth = BlockGrowth(contents)
        for some in batches:
            growth.add(some)
            yield ()
        yield from growth.freed()
    with (yield from client.keyspace.admit_in_steps(batches)) as reservation:
        yield from _split(client, batches)
        while batches:
            # another client may have stored some of the blocks as a whole, and they may have left memory
            with suppress(ReplyError):  # they stay on disk only
                yield from fetched(client, partial(_extents_of, batches[0].blocks()))
            reservation.release_part()
            for pages in _not_replaced(client.keyspace, batches.popleft()):
                contents.set_pages(pages)
            yield ()
    yield OK


def _not_replaced(keyspace: Keyspace, batch: NewPages) -> Iterator[NewPages]:
    """Yield the pages of a batch without those of blocks that another client has stored as a whole meanwhile, if these
    can't be split: they have too many pages, or can't be read from disk.

    Such a block replaces all pages of the batch in it, as if they had been stored before. So the batch is not refused
    after some of its pages were stored.
    """
    if not keyspace.has_extents(batch):
        yield batch
        return
    blocks = {name: keyspace.index.block(*name) for name in batch.blocks()}
    replaced = {name for name, block in blocks.items() if block is not None and not _can_be_split(block)}
    if not replaced:
        yield batch
        return
    for name, places in batch.runs(range(len(batch))):
        if name not in replaced:
            for at in places:
                yield NewPages.one(batch.name(at), batch.slots[at], batch.expires(at))


def _can_be_split(block: Block) -> bool:
    """Return whether pages of a block can be stored one by one now: it has single pages, or can be split."""
    return block.extent is None or (block.pages <= MAX_SINGLE_PAGES and type(block.extent.slot) is not OnDisk)


def _split(client: Client, batches: Iterable[PageNames]) -> Iterator[Reply]:
    """Split the extents (blocks that were stored as a whole) that the pages belong to, in steps. Raises ReplyError.

    An extent has to be in memory for it, and the disk may fail. After this function, the pages can be stored without
    the disk. Only a few extents are in memory at the same time, because a split block leaves memory when it is written.
    """
    for some in batches:
        for blocks in _whole(client, some):
            yield from wait_for_write_behind(client)
            hold = yield from fetched(client, partial(_extents_of, blocks))
            for block in blocks:
                client.keyspace.split_block(*block)
                yield ()
            del hold
        yield ()


def _whole(client: Client, some: PageNames) -> Iterator[list[BlockName]]:
    """Yield the names of the extents (blocks that were stored as a whole) that the pages belong to, in groups that may
    be in memory together. A group has at least one block.
    """
    if not client.keyspace.contents.catalogue.in_extents:
        return
    most, limit = client.server.lookup_bytes, client.server.config.client_memory
    most = min(most, limit) if limit else most
    blocks, size = list[BlockName](), 0
    for name in dict.fromkeys(some.blocks()):
        block = client.keyspace.index.block(*name)
        if block is None or block.extent is None:
            continue
        if blocks and size + block.extent.slot.size > most:
            yield blocks
            blocks, size = [], 0
        blocks.append(name)
        size += block.extent.slot.size
    if blocks:
        yield blocks


def _extents_of(blocks: Sequence[BlockName], lookup: Prefetcher) -> Iterable[Needed]:
    """Return the extents of these blocks, which must be in memory before pages of them are written."""
    return lookup.extents_at(dict.fromkeys(blocks))


class _Step(NamedTuple):
    """Pages of a batch, from index `first` to before `stop`, that are read in one step."""

    names: PageNames
    first: int
    stop: int


@_page(
    "kvpagemget N req layer head page type [req layer head page type ...]",
    flags="readonly page",
    uses=pages(1, NAME_WORDS),
    needs=values,
    fetches=True,
    parts=Parts(1, NAME_WORDS),
    complexity="O(N) with N pages",
    reply="array of bulk or null",
    summary="Returns the bodies of N pages, with null for missing ones.",
)
def kvpagemget(client: Client, args: list[Argument]) -> Reply:
    """Return an array of bodies. A page is looked up when the reply gets to it, so pages may change during a long
    reply.
    """
    count = check_batch("KVPAGEMGET", args, NAME_WORDS, "page")
    if (count > _DECIDED_PAGES_PER_STEP and count > _pages_per_step(client)) or client.keyspace.contents.any_on_disk:
        return Stream(None, _read_in_steps(client, args, count))
    names = page_names(args, 0, count)
    bodies, read = _read_step(client, names, 0)
    if read < count:  # the values take so much memory that the reply is sent in steps
        return Stream(None, chain([(b"*%d\r\n" % count, *bodies)], _read_rest(client, [names], read)))
    return (b"*%d\r\n" % count, *bodies)


def _read_in_steps(client: Client, args: Sequence[Argument], count: int) -> Iterator[Reply]:
    """Yield the whole reply of KVPAGEMGET, in steps: the names are parsed first, then the bodies are sent."""
    batches = yield from _page_names_in_steps(client, args, count)
    yield Raw(b"*%d\r\n" % count)
    yield from _read_rest(client, batches, 0)


def _read_rest(client: Client, batches: Sequence[PageNames], at: int) -> Iterator[Reply]:
    """Yield the bodies of a batch's pages, in steps, from page `at` of the first group of names to the last page."""
    keyspace = client.keyspace
    for i, names in enumerate(batches):
        while at < len(names):
            if keyspace.contents.any_on_disk and keyspace.needs.values_to_load(names.keys[at:]):
                rest = [_Step(names, at, len(names)), *(_Step(some, 0, len(some)) for some in batches[i + 1 :])]
                yield from _from_disk(client, rest)
                return
            bodies, read = _read_step(client, names, at)
            yield bodies
            at += read
        at = 0


def _read_step(client: Client, names: PageNames, at: int) -> tuple[tuple[Piece, ...], int]:
    """Read the pages from `at` on, as many as one step may. Return their encoded bodies and their number."""
    found = client.keyspace.reader.read_pages(names, at, len(names), client.server.lookup_bytes)
    if found.missing:
        pages_missed(client, names, found.missing)
    return _encoded(client, found, None), len(found.entries)


def _from_disk(client: Client, batches: Sequence[_Step]) -> Iterator[Reply]:
    """Yield the bodies of the pages of some steps, some of which are on disk."""
    ahead = ReadAhead(client, _values_to_load, _divided(client, batches), of_pages=True)
    while (step := (yield from ahead.next())) is not None:
        yield _bodies_of(client, step, ahead)


def _divided(client: Client, batches: Iterable[_Step]) -> Iterator[_Step]:
    """Divide steps, so that each has at most FROM_DISK pages, and one page or at most FROM_DISK_BYTES."""
    get = client.keyspace.contents.catalogue.get
    for names, at, stop in batches:
        while at < stop:
            first, size = at, 0
            while at < min(first + FROM_DISK, stop):
                entry = get(names.keys[at])
                size += entry.size if entry is not None else 0
                if size > FROM_DISK_BYTES and at > first:
                    break
                at += 1
            yield _Step(names, first, at)


def _bodies_of(client: Client, step: _Step, ahead: ReadAhead[_Step]) -> tuple[Piece, ...]:
    """Return the encoded bodies of the pages of a step. Nothing else refers to borrowed ones, so they are freed when
    they are sent.
    """
    found = client.keyspace.reader.read_pages(step.names, step.first, step.stop)
    pages_missed(client, step.names, found.missing)
    bodies = ahead.borrowed_read_of(found.entries) or _encoded(client, found, ahead)
    ahead.end_step()
    return bodies


def _values_to_load(lookup: Prefetcher, step: _Step) -> Sequence[OnDisk]:
    """Return the values to load before the pages of a step can be read."""
    return lookup.values_to_load(step.names.keys[step.first : step.stop])


def _encoded(client: Client, found: Found, ahead: ReadAhead[_Step] | None) -> tuple[Piece, ...]:
    """Return the encoded bodies of the pages that were found, in order; null for a key that is no page, and for a page
    that cannot be read from disk. `ahead` has the pages that the reply borrows from the disk.
    """
    absent = b"_\r\n" if client.protocol == 3 else b"$-1\r\n"
    if not found.others:  # all pages have slots of their own, which contain encoded bodies
        return filled(found.entries, absent)
    pieces: list[Piece] = []
    for entry in found.entries:
        if not is_page(entry):
            pieces.append(absent)
        elif is_only_on_disk(entry):
            loan = ahead.borrowed_read_of([entry]) if ahead is not None else None
            pieces += loan or (encode_page_body(entry) if has_bytes(entry) else (absent,))
        else:
            pieces += encode_page_body(entry)
    return (*pieces,)


@_page(
    "kvpageexists req layer head page type",
    flags="readonly fast page",
    uses=pages(0),
    needs=nothing,
    reply="integer",
    summary="Says whether a page exists, without reading it.",
)
def kvpageexists(client: Client, args: list[Argument]) -> Reply:
    """Return 1 if the page exists, else 0."""
    entry = client.keyspace.contents.find(page_key(args))
    if entry is None:
        page_name(args)
    return int(is_page(entry))


# -- KVPAGEMEXISTS, KVPAGESTAT -----------------------------------------------------------------------------------------

_query = partial(command, flags="readonly", needs=nothing, group="page")


@_query(
    "kvpagemexists N req layer head page type [req layer head page type ...]",
    uses=pages(1, NAME_WORDS),
    parts=Parts(1, NAME_WORDS),
    complexity="O(N) with N pages",
    reply="array of integer",
    summary="Says for each of N pages whether it exists, without reading it.",
)
def kvpagemexists(client: Client, args: list[Argument]) -> Reply:
    """Return an array with 1 for each page that exists, and 0 for the others, in order."""
    count = check_batch("KVPAGEMEXISTS", args, NAME_WORDS, "page")
    if count <= _DECIDED_PAGES_PER_STEP or count <= _pages_per_step(client):
        return (b"*%d\r\n" % count, _existence(client, page_names(args, 0, count)))

    def steps() -> Iterator[Reply]:
        batches = yield from _page_names_in_steps(client, args, count)
        yield Raw(b"*%d\r\n" % count)
        for names in batches:
            yield (_existence(client, names),)

    return Stream(None, steps())


def _existence(client: Client, names: PageNames) -> bytes:
    """Return an encoded 1 or 0 for each named page. It counts no hits or misses."""
    entries = client.keyspace.reader.find_pages(names)
    return b":%d\r\n" * len(entries) % (*map(is_page, entries),)


@_query(
    "kvpagestat req layer head page type",
    flags="readonly fast",
    uses=pages(0),
    reply="map | null",
    summary="Returns a page's header, time to live, protection and tier.",
)
def kvpagestat(client: Client, args: list[Argument]) -> Reply:
    """Return a map, or null if there is no such page. `tier` is memory or disk. `checksum` is null for a page of a
    block that was stored whole and is only on disk: it would have to be computed. `coded_size` has the bytes of the
    page's lossless code in memory, or its share of its block's code; 0 if it is not coded there.
    """
    name, keyspace = page_name(args), client.keyspace
    page = keyspace.contents.find(name.key)
    if page is None:
        return None
    block = keyspace.reader.block(name.req_id, name.page)
    if not is_page(page) or block is None:
        raise ReplyError(WRONG_TYPE)
    if wait := wait_for_checksums([page]):
        raise Postponed(wait)
    (header, checksum), guard, now = _header(page), keyspace.leases.of(block), unix_ms()
    is_in_memory, coded_size = not is_only_on_disk(page), coded_size_of(page)
    return header_fields(header) | {
        "checksum": checksum,
        "ttl_left_ms": page.expires - now if page.expires else -1,
        "lease_left_ms": max(guard.until - monotonic_ms(), 0),
        **protection_fields(guard),
        "tier": "memory" if is_in_memory or coded_size else "disk",
        "coded_size": coded_size,
    }


def header_fields(header: PageHeader) -> dict[str, Reply]:
    """Return the fields of KVPAGESTAT's reply that are the contents of a page's header."""
    return {
        "dtype": int(header.dtype),
        "page_size": header.page_size,
        "head_dim": header.head_dim,
        "layer": header.layer,
        "head": header.head,
        "page": header.page,
        "type": header.kv_type,
        "bytes": header.body_size,
        "checksum": f"{header.checksum:016x}",
        "created_ms": header.created_ms,
        "ttl": header.ttl,
    }


def _header(page: Page) -> tuple[PageHeader, str | None]:
    """Return a page's header, and its checksum as 16 hexadecimal digits; None if the checksum is not computed yet."""
    if type(page) is ExtentPage and not page.extent.has_checksums:
        return PageHeader.parse(page.header_with(0)), None
    header = header_of(page)
    return header, f"{header.checksum:016x}"


# -- KVPAGEWHY: the reason why a read of a request or a page would miss ----------------------------------------------

STORED = "stored"


@command(
    "kvpagewhy req [layer head page type]",
    flags="readonly",
    uses=requests(0),
    needs=nothing,
    complexity="O(1) for a page, O(N) for a request of N pages",
    reply="map",
    summary="Says why reading a request or a page would miss.",
    group="page",
)
def kvpagewhy(client: Client, args: list[Argument]) -> Reply:
    """Return a map. `reason` is stored, never stored, expired, evicted, over quota, deleted, overwritten, corrupt or
    hole.

    A request is stored if every block from page id 0 to its last has all its pages, whether or not their shapes fit
    together as KVBLOCKGET wants; `blocks` is the number of its blocks.

    `at` is when the page was removed (unix milliseconds), and `policy` or `quota` is the policy or the pattern of the
    quota that removed it. `limit` is the parameter whose limit the policy kept, maxmemory or maxdisk, or filesystem if
    that was full. If a request has a hole, `block` is the page id of its first block that lacks pages, and `cause` is
    the reason: one of these, or incomplete if the block has others of its pages and nothing was removed. `since` says
    from when on the server remembers removals (unix milliseconds), and is 0 for users without the right to read every
    key. A block that missed with the reason shape (KVBLOCKGET) is stored.
    """
    keyspace = client.keyspace
    if len(args) == 1:
        req_id = request_name(args[0])
        small = fit_one_step(client, args[0]) and keyspace.ghosts.count(req_id) <= WORDS_PER_STEP
        return stepwise(_why_request(client, req_id), small=small)
    if len(args) != NAME_WORDS:
        raise ReplyError("ERR KVPAGEWHY takes a req, or the five arguments that name a page")
    name = page_name(args)
    entry = keyspace.contents.find(name.key)
    if entry is None:
        ghost = keyspace.ghosts.of_page(name.req_id, name.layer, name.head, name.page, name.kv_type)
        return _explain(client, ghost)
    if not is_page(entry):
        raise ReplyError(WRONG_TYPE)
    return {"reason": STORED}


def _why_request(client: Client, req_id: bytes) -> Steps[dict[str, Reply]]:
    """Return KVPAGEWHY's reply for a request, in steps: its first block that is missing or incomplete, or the number of
    its blocks if there is none.
    """
    keyspace = client.keyspace
    blocks = {block.page: block for block in (yield from blocks_of(client, req_id))}
    if not blocks:
        return _explain(client, (yield from keyspace.ghosts.of_request(req_id)))
    for page in itertools.count():
        block = blocks.get(page)
        if block is not None and block.is_full:
            if page % STEP == 0:
                yield ()
            continue
        ghost = keyspace.ghosts.of_block(req_id, page, block)
        if block is None and ghost is None and page > max(blocks):
            return {"reason": STORED, "blocks": len(blocks)}
        found = _explain(client, ghost, NEVER_STORED if block is None else INCOMPLETE)
        return {"reason": HOLE, "block": page, "cause": found.pop("reason"), **found}
    raise AssertionError


def _explain(client: Client, ghost: Ghost | None, otherwise: str = NEVER_STORED) -> dict[str, Reply]:
    """Return the part of the reply that explains why pages are missing. `ghost` is the record of their removal; without
    one, the reason is `otherwise`.
    """
    if ghost is None:
        return {"reason": otherwise, "since": client.keyspace.ghosts.since if client.sees_all else 0}
    by: dict[str, Reply] = {"quota" if ghost.reason == OVER_QUOTA else "policy": ghost.by} if ghost.by else {}
    if ghost.limit:
        by["limit"] = ghost.limit
    return {"reason": ghost.reason, "at": ghost.at, **by}
