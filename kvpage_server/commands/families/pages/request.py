"""The page family's commands about a request and its blocks: KVPAGEDEL, KVPAGEINDEX, KVPAGEVERIFY.

A request may have any number of pages, so all of these commands work in steps, and other clients have their turn in
between. A block that changes meanwhile is handled in its state at its step.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import chain, islice

import xxhash

from kvpage_server.commands.arguments import SYNTAX_ERROR, integer_in, plain
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import fetched, wait_for_checksums
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import READ, WORDS_PER_STEP, WRITE, Parts, blocks_of_request, nothing, requests
from kvpage_server.commands.steps import STEP, Steps, each
from kvpage_server.core import Argument, PageNames
from kvpage_server.core.arguments import PageName
from kvpage_server.page import MAX_PAGE, PageError, PageKey, check_req_id, checksum, unix_ms
from kvpage_server.resp import Raw, Reply, ReplyError, Stream
from kvpage_server.store.contents import NEVER_STORED, OVER_QUOTA
from kvpage_server.store.disk.prefetch import Needed, Prefetcher
from kvpage_server.store.eviction.ghosts import Ghost
from kvpage_server.store.eviction.leases import Lease
from kvpage_server.store.keyspace import Keyspace, gathered
from kvpage_server.store.memory.entry import Page, header_of, is_page
from kvpage_server.store.memory.index import Block, Extent

# -- Misses of pages and blocks, counted by reason for INFO ------------------------------------------------------------

INCOMPLETE = "incomplete"  # the block has some of its pages
HOLE = "hole"  # the block exists, but one before it does not
SHAPE = "shape"  # the block exists, but not in the shape that the client expects
OF_STRINGS = (NEVER_STORED, "expired", "evicted", OVER_QUOTA, "deleted", "overwritten", "corrupt")
REASONS = (NEVER_STORED, INCOMPLETE, HOLE, SHAPE, *OF_STRINGS[1:])


def count_miss(client: Client, reason: str, times: int = 1) -> None:
    """Add `times` to the number of misses with a reason."""
    client.keyspace.counters.page_misses[reason] += times


def _page_missed(client: Client, name: PageName) -> None:
    """Count a miss of a page, with the reason in its ghost (the record of its removal), or as never stored."""
    ghost = client.keyspace.ghosts.of_page(name.req_id, name.layer, name.head, name.page, name.kv_type)
    count_miss(client, reason_of(ghost, NEVER_STORED))


def pages_missed(client: Client, names: PageNames, places: list[int]) -> None:
    """Count a miss for each page of a batch that was not found. `places` are the indexes of these pages in `names`."""
    for block, some in names.runs(places):
        if client.keyspace.ghosts.has_block(*block):
            for i in some:
                _page_missed(client, names.name(i))
        else:
            count_miss(client, NEVER_STORED, len(some))


def block_missed(client: Client, req_id: bytes, page: int) -> None:
    """Count a miss of a block that does not exist or is incomplete."""
    block = client.keyspace.index.block(req_id, page)
    ghost = client.keyspace.ghosts.of_block(req_id, page, block)
    count_miss(client, reason_of(ghost, NEVER_STORED if block is None else INCOMPLETE))


def reason_of(ghost: Ghost | None, otherwise: str) -> str:
    """Return the reason in a ghost (the record of a removal); `otherwise` without a ghost."""
    return ghost.reason if ghost is not None else otherwise


_SORTED = 4096  # numbers that are sorted in a step
_DELETED_PAGES_PER_STEP = 1024  # pages of a block that are deleted in one step
_KEYS = 256  # keys of pages that are made in a step
HASHED_BYTES_PER_STEP = 1024 * 1024  # takes about 0.1 ms


def request_name(raw: Argument) -> bytes:
    """Return an argument as a request id. Raises ReplyError with the allowed values."""
    try:
        return check_req_id(plain(raw))
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def page_id(raw: Argument) -> int:
    """Return an argument as a page id. Raises ReplyError with the allowed values."""
    return integer_in("page_id", raw, 0, MAX_PAGE)


def block_names(args: Sequence[Argument]) -> list[tuple[bytes, int]]:
    """Return (request id, page id) of each pair of arguments. Raises ReplyError for an invalid one."""
    return [(request_name(req), page_id(page)) for req, page in zip(args[::2], args[1::2], strict=True)]


def note_chain(keyspace: Keyspace, blocks: list[Block]) -> Steps[None]:
    """Note in steps that each of these blocks extends the block before it, so that the eviction policy keeps the first
    ones longer. Each step overlaps the last one by one block.
    """
    for start in range(0, len(blocks), STEP):
        # A block may have been removed since it was looked up, or in an earlier step.
        keyspace.chain([*filter(keyspace.index.still_has, blocks[start : start + STEP + 1])])
        yield ()


def fit_one_step(client: Client, req: Argument, pages: Sequence[Argument] = ()) -> bool:
    """Return whether `req [page ...]` names so few blocks that one step can handle them, none of which is unloaded or
    overdue. Without `pages`, all blocks of the request count.
    """
    keyspace, req_id = client.keyspace, request_name(req) if pages else plain(req)
    if (len(pages) + 1 if pages else keyspace.index.count(req_id)) > WORDS_PER_STEP:
        return False
    named = map(page_id, pages) if pages else keyspace.index.page_ids(req_id)
    return not any(_takes_long(keyspace, req_id, page) for page in named)


def named_blocks(client: Client, req: Argument, pages: Sequence[Argument]) -> Steps[list[Block]]:
    """Return the existing blocks that `req [page ...]` names, in steps: each page id once, in their order, or all
    blocks of the request by page id.
    """
    keyspace, req_id = client.keyspace, request_name(req)
    if not pages:
        return (yield from blocks_of(client, req_id))
    found: dict[int, Block] = {}
    for start in range(0, len(pages), STEP):
        for page in map(page_id, pages[start : start + STEP]):
            takes_long = _takes_long(keyspace, req_id, page)
            if page not in found and (block := keyspace.reader.block(req_id, page)):
                found[page] = block
            if takes_long:
                yield ()
        yield ()
    return [*found.values()]


def ascending(numbers: Sequence[int]) -> Steps[list[int]]:
    """Return numbers in ascending order. They are sorted in steps."""
    parts: list[Iterable[int]] = []
    for start in range(0, len(numbers), _SORTED):
        parts.append(sorted(numbers[start : start + _SORTED]))
        yield ()
    found, merged = list[int](), merge(*parts)
    while some := [*islice(merged, STEP)]:
        found += some
        yield ()
    return found


def blocks_of(client: Client, req_id: bytes) -> Steps[list[Block]]:
    """Return the existing blocks of a request by ascending page id, in steps. Expired pages are removed before."""
    keyspace, ids = client.keyspace, client.keyspace.index.page_ids(req_id)
    found: list[Block] = []
    for at, page in enumerate((yield from ascending(ids))):
        takes_long = _takes_long(keyspace, req_id, page)
        if block := keyspace.reader.block(req_id, page):
            found.append(block)
        if takes_long or at % STEP == STEP - 1:
            yield ()
    return found


def _takes_long(keyspace: Keyspace, req_id: bytes, page: int) -> bool:
    """Return whether the next lookup of a block passes over all of its pages: it is unloaded, or a page may have
    expired.
    """
    block = keyspace.index.requests.get(req_id, {}).get(page)
    return block is not None and (not isinstance(block, Block) or 0 < block.soonest <= unix_ms())


def keys_in(block: Block) -> Iterator[list[bytes]]:
    """Yield the keys of a block's pages in groups of up to 256. These are the pages that the block has when the first
    group is requested.
    """
    keys = block.page_keys()
    while some := [*islice(keys, _KEYS)]:
        yield some


def _existing_blocks(keyspace: Keyspace, blocks: list[Block]) -> Iterator[Block]:
    """Yield the current block for the name of each of these blocks, at its turn. Skip a name without a block."""
    return (block for named in blocks if (block := keyspace.reader.block(named.req_id, named.page)))


_request = partial(command, group="page", uses=requests(0))


@_request(
    "kvpagedel req [page ...]",
    flags="write",
    needs=nothing,
    parts=Parts(1),
    complexity="O(N) with N pages",
    reply="integer",
    summary="Deletes a request, or some of its blocks.",
)
def kvpagedel(client: Client, args: list[Argument]) -> Reply:
    """Return the number of deleted pages. Blocks are deleted from the last to the first, so the rest is always a
    prefix.

    A block of more than 1024 pages that were stored one by one is deleted in parts, which others see.
    """
    keyspace, req_id = client.keyspace, request_name(args[0])

    def steps() -> Iterator[Reply]:
        if len(args) > 1:
            ids = yield from ascending((yield from each(args[1:], lambda some: [*map(page_id, some)])))
        else:
            ids = [block.page for block in (yield from blocks_of(client, req_id))]
        removed = 0
        while ids:  # they are not the blocks, because a list of removed blocks would be freed in one step
            page = ids.pop()
            if _takes_long(keyspace, req_id, page):
                keyspace.reader.block(req_id, page)
                yield ()
            block = keyspace.reader.block(req_id, page)
            if block is None:
                if not len(ids) % STEP:
                    yield ()
                continue
            if block.extent is not None or block.pages <= _DELETED_PAGES_PER_STEP:
                removed += keyspace.contents.remove_block(block, "del")
                yield ()
                continue
            for keys in keys_in(block):
                if block.extent is not None or not keyspace.index.still_has(block):
                    break  # meanwhile, it was stored as a whole after the deletion of its pages, or removed
                removed += sum(map(keyspace.contents.delete, keys))
                yield ()
        yield removed

    return Stream(None, steps())


@_request(
    "kvpageindex req [WITHSIZES | TOTAL]",
    flags="readonly",
    needs=nothing,
    complexity="O(N) with N pages",
    reply="array of map",
    summary="Lists a request's blocks and what each holds.",
)
def kvpageindex(client: Client, args: list[Argument]) -> Reply:
    """Return a map for each block, by page id: page, pages, layers, heads, planes, complete, and for WITHSIZES bytes,
    memory, pinned, kept_until_ms, kept_by.

    `complete` is 1 if KVBLOCKGET would return the block, else 0: with all its pages it may still lack a common shape.
    `layers` and `heads` are the highest numbers plus one. `bytes` is the size of the bodies, `memory` is the size of
    the block in memory.

    With TOTAL, one map for all blocks: blocks, pages, bytes, memory, complete, which is 1 if all of them are, and page,
    planes, pinned, kept_until_ms and kept_by of the first; none if the request has no page.
    """
    keyspace, req_id = client.keyspace, request_name(args[0])
    with_sizes = [plain(arg).upper() for arg in args[1:]]
    if with_sizes not in ([], [b"WITHSIZES"], [b"TOTAL"]):
        raise ReplyError(SYNTAX_ERROR)
    total = _Total() if with_sizes == [b"TOTAL"] else None

    def steps() -> Iterator[Reply]:
        blocks, found = (yield from blocks_of(client, req_id)), []
        for block in _existing_blocks(keyspace, blocks):
            described = yield from _describe(keyspace, block, bool(with_sizes))
            if not keyspace.index.still_has(block):  # it was removed in between
                pass
            elif total is not None:
                total.add(described)
            else:
                found.append(described)
            yield ()
        found = found if total is None else total.maps
        yield Raw(b"*%d\r\n" % len(found))
        yield from found

    return Stream(None, steps())


class _Total:
    """The sum of KVPAGEINDEX's maps, for TOTAL."""

    def __init__(self) -> None:
        self.maps: list[dict[str, Reply]] = []  # one, or none without a block

    def add(self, block: dict[str, Reply]) -> None:
        """Add the map of a block. The first map determines `page` and `planes` of the sum."""
        if not self.maps:
            first = {name: block[name] for name in ("page", "planes", "pinned", "kept_until_ms", "kept_by")}
            self.maps = [{"blocks": 0, "pages": 0, "bytes": 0, "memory": 0, "complete": 1} | first]
        (total,) = self.maps
        for name in ("pages", "bytes", "memory"):
            total[name] += block[name]
        total["blocks"] += 1
        total["complete"] = min(total["complete"], block["complete"])


def protection_fields(lease: Lease) -> dict[str, Reply]:
    """Return whether a block is pinned, the end of its lifetime in unix milliseconds, 0 for none, and its tenant."""
    return {
        "pinned": int(lease.pinned),
        "kept_until_ms": lease.ends,
        "kept_by": lease.tenant if lease.ends else b"",
    }


def _describe(keyspace: Keyspace, block: Block, with_sizes: bool) -> Steps[dict[str, Reply]]:
    """Return KVPAGEINDEX's map of a block, in steps. `bytes` and `memory` are included if `with_sizes`."""
    pages, shape = yield from gathered(keyspace, block)
    layers, heads, planes = block.measure()
    described: dict[str, Reply] = {
        "page": block.page,
        "pages": block.pages,
        "layers": layers,
        "heads": heads,
        "planes": planes,
        "complete": int(shape is not None),
    }
    if with_sizes:
        extent = block.extent
        described["bytes"] = extent.slot.size if extent else sum(page.size for page in pages)
        described["memory"] = block.footprint
        described |= protection_fields(keyspace.leases.of(block))
    return described


@_request(
    "kvpageverify req [page ...]",
    flags="write",
    access=READ | WRITE,
    needs=blocks_of_request,
    fetches=True,
    parts=Parts(1),
    complexity="O(N) with N bytes",
    reply="map",
    summary="Hashes the pages of a request, or of some of its blocks, and removes corrupt ones.",
)
def kvpageverify(client: Client, args: list[Argument]) -> Reply:
    """Return a map: the number of checked pages, the number of pages without a checksum, and the keys of the corrupt
    ones.
    """
    keyspace = client.keyspace

    def steps() -> Iterator[Reply]:
        blocks, checked, unchecked = (yield from named_blocks(client, args[0], args[1:])), 0, 0
        corrupt: list[bytes] = []
        for block in _existing_blocks(keyspace, blocks):
            keys = yield from _keys_on_disk(client, block)
            yield from fetched(client, partial(_values_of, block), touches=client.touches)
            extent = block.extent if keyspace.index.still_has(block) else None
            if extent is not None:  # it stays in memory until the next step
                intact = yield from _check_extent(extent)
                checked += extent.shape.pages if intact is not None else 0
                unchecked += extent.shape.pages if intact is None else 0
                if intact is False and keyspace.index.still_has(block) and block.extent is extent:
                    corrupt += block.page_keys()
                    keyspace.contents.remove_block(block, "del", "corrupt")
                yield ()
                continue
            lost = yield from _lost(keyspace, keys)
            checked += len(lost)
            corrupt += lost
            for key in chain.from_iterable(keys_in(block)):
                yield from fetched(client, partial(_value_of, key), touches=client.touches)
                page = keyspace.contents.find(key)
                if not is_page(page):
                    continue
                intact = yield from _check(page)
                if intact is None:
                    unchecked += 1
                    continue
                checked += 1
                if not intact and keyspace.contents.find(key) is page:
                    corrupt.append(key)
                    keyspace.contents.remove_corrupt(key)
        yield {"checked": checked, "unchecked": unchecked, "corrupt": corrupt}

    return Stream(None, steps(), whole=False)  # nobody needs the result when the client has disconnected


def _keys_on_disk(client: Client, block: Block) -> Steps[list[list[bytes]]]:
    """Return the keys of a block's pages in groups, in steps. Without a disk tier, return none: no page can be lost by
    a read.
    """
    keys: list[list[bytes]] = []
    for some in keys_in(block) if client.server.tiered is not None else ():
        keys.append(some)
        yield ()
    return keys


def _lost(keyspace: Keyspace, keys: list[list[bytes]]) -> Steps[list[bytes]]:
    """Return, in steps, those of these keys whose pages were removed because their bytes on disk were damaged."""
    ghosts, gone = keyspace.ghosts, list[PageKey]()
    for some in keys:
        gone += [PageKey.parse(key) for key in some if keyspace.contents.find(key) is None]
        yield ()
    ends = [(name, ghosts.of_page(name.req_id, name.layer, name.head, name.page, name.kv_type)) for name in gone]
    return [bytes(name) for name, ghost in ends if ghost is not None and ghost.reason == "corrupt"]


def _values_of(block: Block, lookup: Prefetcher) -> Iterator[Needed]:
    """Return the values to load before a block can be read."""
    return lookup.blocks_at([(block.req_id, block.page)])


def _value_of(key: bytes, lookup: Prefetcher) -> Iterator[Needed]:
    """Return the values to load before a key can be read."""
    return lookup.values_of([key])


def _check_extent(extent: Extent) -> Generator[Reply, None, bool | None]:
    """Return, in steps, whether the body of an extent (a block that was stored as a whole) matches its digest; None
    without a digest. A mismatch does not show which page is damaged.
    """
    if not extent.digest:
        return None
    body = extent.slot.part(0, extent.slot.size)  # borrows the memory, as the block may leave it between steps
    return (yield from hash_in_steps(body.view)) == extent.digest


def _check(page: Page) -> Generator[Reply, None, bool | None]:
    """Return, in steps, whether a page matches its header in size and checksum; None if the header has no checksum."""
    body = page.part(0, page.size)  # borrows the memory, as the page may leave it between steps
    if wait := wait_for_checksums([page]):
        yield wait
    try:
        header = header_of(page)
    except PageError:
        return False
    if header.body_size != page.size:
        return False
    if not header.checksum:
        return None
    return (yield from hash_in_steps(body.view)) == header.checksum


def hash_in_steps(body: memoryview) -> Generator[Reply, None, int]:
    """Return the XXH3-64 of bytes, computed in steps of 1 MiB."""
    if len(body) <= HASHED_BYTES_PER_STEP:
        yield ()
        return checksum(body)
    digest = xxhash.xxh3_64()
    for start in range(0, len(body), HASHED_BYTES_PER_STEP):
        digest.update(body[start : start + HASHED_BYTES_PER_STEP])
        yield ()
    return digest.intdigest()
