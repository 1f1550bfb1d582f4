"""The commands for clients on the same machine that map memory instead of moving bytes through a connection: KVMAP
AREA, KVMAP ATTACH, KVMAP BLOCKMGET, KVMAP COPY, KVMAP MGET, KVMAP RELEASE, KVMAP SOCKET.

The memory of values has those of all tenants, so only users with the right to read every key can map it. For others,
the server copies blocks into an *area*: memory of a single connection, which nobody else has. It only ever contains
blocks that the user was allowed to read when they were copied, so a change of rights does not have to take it back.

A *ticket* keeps a slot in use for a connection, as a reply does while it is sent: the bytes do not move, and their
memory is not used for other values, even if the value is overwritten, deleted or evicted meanwhile. It counts for
`maxmemory-clients`, and ends with RELEASE or with the connection.

The reader compares digests with its own copy of the bytes. The reply to RELEASE confirms that the bytes did not change
before it: until then, the slot was in use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from kvpage_server.commands.arguments import integer_in, plain_all
from kvpage_server.commands.context import EPOCH_BITS, Client
from kvpage_server.commands.dispatch.checks import ReadAhead
from kvpage_server.commands.families.pages.block import misfits, names_and_shape
from kvpage_server.commands.families.pages.request import block_missed, block_names, note_chain
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import Parts, batches, blocks, values
from kvpage_server.commands.steps import Steps, stepwise
from kvpage_server.core import Argument, Slot
from kvpage_server.core.arguments import I64
from kvpage_server.core.pieces import END, Piece, borrowed_bytes, frame
from kvpage_server.core.regions import Area, round_up
from kvpage_server.page import FIELD_AT, BlockShape
from kvpage_server.resp import Reply, ReplyError, encode
from kvpage_server.store.keyspace import BLOCK_PAGES_PER_STEP, read_block
from kvpage_server.store.memory.entry import Text, is_page
from kvpage_server.store.memory.index import ExtentPage, OnDisk

MOST_REGIONS = 128  # descriptors in a reply; Linux passes at most 253 at once
MOST_AREA = 32 << 20  # bytes: to return the memory takes 6 ms
_ALIGNED = 64  # bytes: copies in an area begin at multiples
_COPIED_PER_STEP, _STEP_BYTES = 4 << 20, 1 << 20  # bytes of a step, and of a piece that is a step of its own
MOST_TICKETS = 65_536  # of a connection: each takes memory in addition to its slot
_SHARE = 2  # tickets take at most 1/2 of maxmemory-clients, so that they do not close other clients
_CHECKSUM = slice(FIELD_AT["checksum"], FIELD_AT["checksum"] + 8)

container("kvmap", group="map", summary="A container for commands of clients that map the server's memory.")
_map = partial(command, flags="readonly allkeys noscript no_multi", group="map")


def _check_socket(client: Client) -> None:
    """Raise ReplyError if the client is not connected to the unix socket."""
    path = client.server.config.unixsocket
    if not path or client.local_address != f"{path}:0":
        raise ReplyError("ERR KVMAP needs a connection to the server's unix socket (unixsocket)")


@_map(
    "kvmap|attach [region [region ...]]",
    flags="readonly allkeys dangerous noscript no_multi",
    complexity="O(N) with N regions",
    reply="array",
    summary="Passes descriptors of the server's memory, which can only be read.",
)
def kvmap_attach(client: Client, args: list[Argument]) -> Reply:
    """Return an array: the epoch, which differs after a restart; the numbers of all regions that can be mapped; and of
    the regions whose descriptors the reply carries (SCM_RIGHTS, in this order) an array of number and size in bytes.

    These are the named regions, without names the last 128. The descriptors can only be mapped for reading. They show
    everything in the server's memory, also values that are written or deleted later, until the process unmaps them.
    The command must not be sent in a pipeline behind others.
    """
    _check_socket(client)
    shared = client.keyspace.arena.regions.shared
    named = [integer_in("region", word, 1, I64[1]) for word in plain_all(args)] or [*shared][-MOST_REGIONS:]
    if len(named) > MOST_REGIONS:
        raise ReplyError(f"ERR KVMAP ATTACH passes at most {MOST_REGIONS} regions at once, got {len(named)}")
    if unknown := [number for number in named if number not in shared]:
        raise ReplyError(f"ERR there is no region {unknown[0]}")
    reply = [client.server.epoch, [*shared], [[number, shared[number].file_size] for number in named]]
    if not named:
        return reply
    try:
        descriptors = [shared[number].descriptor_to_read() for number in named]
    except OSError as error:
        raise ReplyError(f"ERR the system cannot seal and open shared memory: {error.strerror}") from None
    _pass(client, reply, descriptors)
    return ()


def _pass(client: Client, reply: Reply, descriptors: Sequence[int]) -> None:
    """Send a reply with descriptors. Raise ReplyError if that is not possible now."""
    pieces: list[Piece] = []
    encode(reply, client.protocol, pieces)
    if client.silence or not client.connection.pass_descriptors(_joined(pieces), descriptors):
        raise ReplyError(_NOT_PASSED)


_NOT_PASSED = "ERR descriptors cannot be passed now: read all earlier replies, then send this command alone"


def _joined(pieces: Sequence[Piece]) -> bytes:
    """Return the bytes of pieces, none of which is borrowed."""
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


_NO_ROOM = "OOM the tickets of this connection, or all clients, hold as much as they may: KVMAP RELEASE"


def _has_room(client: Client, nbytes: int) -> bool:
    """Return whether a client may have a ticket, or an area, for `nbytes` more."""
    most = client.server.config.client_memory
    return len(client.tickets) < MOST_TICKETS and not client.server.in_flight + nbytes > most // _SHARE > 0


def _lent(client: Client, slot: Slot, start: int, size: int, digest: int) -> Reply:
    """Lend `size` bytes of a slot's body, from index `start` on, to a client. Return region, offset, size, digest and
    ticket, or an error if the client has to read the value as other clients do.
    """
    region, offset = slot.place
    if not region.number:
        return ReplyError("NOMAP the value is in memory that cannot be mapped")
    if not _has_room(client, slot.footprint):
        return ReplyError(_NO_ROOM)
    return [region.number, offset + start, size, _as_text(digest), client.lend(slot)]


def _as_text(digest: int) -> bytes | None:
    """Return a digest as 16 hexadecimal digits, None if it is not known."""
    return b"%016x" % digest if digest else None


_NOT_IN_MEMORY = "NOMAP the value is on disk only"
_OTHER_SHAPE = "NOMAP the block has another shape"


def _block(client: Client, req_id: bytes, page: int, expected: BlockShape | None) -> Reply:
    """Return KVMAP BLOCKMGET's item for one block. A block that is not lent counts neither as a hit nor as a miss."""
    block = client.keyspace.reader.block(req_id, page)
    if block is None:
        client.keyspace.counters.misses += 1
        block_missed(client, req_id, page)
        return None
    if block.extent is None:
        return ReplyError("NOMAP the block consists of single pages")
    if expected is not None and block.shape != expected:
        return ReplyError(_OTHER_SHAPE)
    slot = block.extent.slot
    found = slot.temporary_slot if isinstance(slot, OnDisk) else slot
    if found is None:
        return ReplyError(_NOT_IN_MEMORY)
    lent = _lent(client, found, 0, found.size, block.extent.digest)
    if not isinstance(lent, ReplyError):
        client.keyspace.reader.use_block(block)
    return lent


@_map(
    "kvmap|blockmget N req page [req page ...] [SHAPE shape]",
    uses=batches(1, 2),
    needs=blocks(1),
    complexity="O(N) with N blocks",
    reply="array",
    summary="Returns where N blocks are in the server's memory, and keeps them there.",
)
def kvmap_blockmget(client: Client, args: list[Argument]) -> Reply:
    """Return for each block null if it does not exist, an array, or an error. The array has the number of the region,
    the offset in bytes, the number of bytes, their digest (XXH3-64 as 16 hexadecimal digits, or null if it is not
    known), and the ticket. N is at most 510.

    An error NOMAP means that KVBLOCKMGET has to read the block, for example because it consists of single pages, or
    does not have the shape after SHAPE; OOM that the client has to release tickets first.
    """
    _check_socket(client)
    words, expected = names_and_shape("KVMAP BLOCKMGET", args)
    names = block_names(words)
    found = (client.keyspace.index.block(*name) for name in names)
    client.keyspace.chain([block for block in found if block])
    return [_block(client, *name, expected) for name in names]


@_map(
    "kvmap|area bytes",
    flags="readonly noscript no_multi",
    reply="integer",
    summary="Passes the descriptor of memory of this connection alone, for KVMAP COPY.",
)
def kvmap_area(client: Client, args: list[Argument]) -> Reply:
    """Return the bytes of the memory: as many as requested, or a few more. The reply carries its descriptor
    (SCM_RIGHTS), which can be mapped for reading.

    The memory is at most 32 MiB, counts for `maxmemory-clients`, and replaces that of an earlier KVMAP AREA, which
    stays after an error. When the connection ends, its bytes become zeros, also where the client has mapped them. The
    command must not be sent in a pipeline behind others.
    """
    _check_socket(client)
    size = integer_in("bytes", args[0], 1, MOST_AREA)
    if not _has_room(client, size - (client.area.size if client.area else 0)):
        most = client.server.config.client_memory // _SHARE
        raise ReplyError(f"OOM clients hold up to {most} bytes, and {size} more of memory of a connection do not fit")
    try:
        area = Area(size)
    except OSError as error:
        raise ReplyError(f"ERR the system cannot seal and open shared memory: {error.strerror}") from None
    try:
        _pass(client, area.size, [area.descriptor])
    finally:
        area.close()
    client.drop_area()
    client.keep_area(area)
    return ()


@_map(
    "kvmap|copy offset N req page [req page ...] [SHAPE shape]",
    flags="readonly noscript no_multi",
    uses=batches(2, 2),
    needs=blocks(2),
    fetches=True,
    complexity="O(N) with N bytes",
    reply="array",
    summary="Copies N blocks into the memory of this connection (KVMAP AREA).",
)
def kvmap_copy(client: Client, args: list[Argument]) -> Reply:
    """Return for each block null if it is not complete, an array, or an error. The array has the offset of the block in
    the memory of KVMAP AREA, the number of bytes, and their digest as KVMAP BLOCKMGET, null for a block of single
    pages. N is at most 510.

    The first block is put behind `offset`, and each block behind the one before it, with less than 128 bytes between
    them. The user needs the right to read the blocks, not every key. An error NOMAP means that the memory has no room
    for the block, or that it does not have the shape after SHAPE; KVBLOCKGET can read it. The reply to a later command
    confirms that the connection, and so its memory, had not ended before it.
    """
    _check_socket(client)
    area = client.area
    if area is None:
        raise ReplyError("ERR KVMAP COPY needs memory of its connection: KVMAP AREA")
    offset = integer_in("offset", args[0], 0, area.size)
    words, expected = names_and_shape("KVMAP COPY", args[1:])
    return stepwise(_copy(client, area, offset, block_names(words), expected), small=False)


def _copy(
    client: Client, area: Area, end: int, names: Sequence[tuple[bytes, int]], expected: BlockShape | None
) -> Steps[Reply]:
    """Copy blocks into an area, one after the other from index `end` on, and return KVMAP COPY's reply."""
    keyspace = client.keyspace
    known = [block for name in names if (block := keyspace.index.block(*name))]
    yield from note_chain(keyspace, known)
    ahead = ReadAhead(client, lambda lookup, name: lookup.values_to_load_for_block(*name), names, of_pages=False)
    items: list[Reply] = []
    for name in names:
        yield from ahead.next()
        block = keyspace.reader.block(*name)
        if (yield from misfits(client, block, expected)):
            ahead.end_step()
            items.append(ReplyError(_OTHER_SHAPE))
            continue
        digest = block.extent.digest if block is not None and block.extent is not None else 0
        body = yield from read_block(keyspace, block, ahead.lent)
        ahead.end_step()
        if body is None:
            block_missed(client, *name)
            items.append(None)
            continue
        if (yield from misfits(client, block, expected)):  # its pages changed while they were collected
            items.append(ReplyError(_OTHER_SHAPE))
            continue
        size = borrowed_bytes(body)
        before = len(frame(size))  # the block is copied as a bulk string
        start = round_up(end + before, _ALIGNED)
        if start + size + len(END) > area.size:
            items.append(ReplyError("NOMAP the memory of KVMAP AREA has no room for the block"))
            continue
        end = start - before
        for number, piece in enumerate(body, start=1):
            end = yield from _copy_piece(area, piece, end)
            if not number % BLOCK_PAGES_PER_STEP:
                yield ()
        items.append([start, size, _as_text(digest)])
    return items


def _copy_piece(area: Area, piece: Piece, at: int) -> Steps[int]:
    """Copy a piece to index `at` of an area in steps, between which its bytes may move. Return the index behind it."""
    size = len(piece) if isinstance(piece, bytes) else len(piece.view)
    for start in range(0, size, _COPIED_PER_STEP):
        view = memoryview(piece) if isinstance(piece, bytes) else piece.view
        area.copy(view[start : start + _COPIED_PER_STEP], at + start)
        if size >= _STEP_BYTES:
            yield ()
    return at + size


def _value(client: Client, key: bytes) -> Reply:
    """Return KVMAP MGET's item for one key."""
    entry = client.keyspace.reader.read(key)
    if entry is None:
        return None
    if isinstance(entry, Text):
        return entry.data
    if isinstance(entry, ExtentPage):
        extent = entry.extent
        slot = extent.slot.temporary_slot if isinstance(extent.slot, OnDisk) else extent.slot
        if slot is None:
            return ReplyError(_NOT_IN_MEMORY)
        plane = extent.shape.plane(entry.kv_type)
        known = extent.has_checksums and not extent.is_not_hashed
        digest = extent.checksum_of(entry.layer, entry.head, plane) if known else 0
        return _lent(client, slot, entry.start, entry.size, digest)
    found = entry.temporary_slot if isinstance(entry, OnDisk) else entry
    if found is None:
        return ReplyError(_NOT_IN_MEMORY)
    digest = int.from_bytes(found.header[_CHECKSUM], "little") if is_page(entry) else 0
    return _lent(client, found, 0, found.size, digest)


@_map(
    "kvmap|mget key [key ...]",
    keys=(2, -1, 1),
    needs=values,
    parts=Parts(joined="array"),
    complexity="O(N) with N keys",
    reply="array",
    summary="Returns where the values of keys are in the server's memory, and keeps them there.",
)
def kvmap_mget(client: Client, args: list[Argument]) -> Reply:
    """Return for each key null, an array or an error as KVMAP BLOCKMGET, or the value itself if it is a string of less
    than 512 bytes, which is not in shared memory. Of a page, the array says where its body is.
    """
    _check_socket(client)
    return [_value(client, key) for key in plain_all(args)]


@_map(
    "kvmap|release ticket [ticket ...]",
    flags="noscript no_multi",
    parts=Parts(joined="sum"),
    complexity="O(N) with N tickets",
    reply="integer",
    summary="Releases tickets, so that the server can use their memory again.",
)
def kvmap_release(client: Client, args: list[Argument]) -> Reply:
    """Return the number of released tickets: all of them, or none and an error, if the connection does not have one of
    them. Bytes that were read before this reply are those of the value.
    """
    tickets = [integer_in("ticket", word, 1, I64[1]) for word in plain_all(args)]
    held = {ticket for ticket in tickets if ticket in client.tickets}
    if len(held) < len(tickets):
        raise ReplyError(_why_not_held(client, tickets))
    for ticket in tickets:
        client.take_back(ticket)
    return len(tickets)


@_map(
    "kvmap|socket",
    flags="readonly dangerous noscript no_multi",
    reply="array | null",
    summary="Returns the path of the server's unix socket, which the other commands of KVMAP need.",
)
def kvmap_socket(client: Client, args: list[Argument]) -> Reply:
    """Return an array of the absolute path and the server's run_id, or null without a unix socket (`unixsocket`). A
    client that has asked over TCP can connect to the path. If the reply there is the same, it is the same server.
    """
    path = client.server.config.unixsocket
    return [os.fsencode(Path(path).absolute()), client.server.run_id.encode()] if path else None


def _why_not_held(client: Client, tickets: Sequence[int]) -> str:
    """Return the error for the first of some tickets that the client does not have, or that is there twice."""
    seen: set[int] = set()
    for ticket in tickets:
        if ticket in seen:
            return f"ERR ticket {ticket} is there twice"
        seen.add(ticket)
        if ticket in client.tickets:
            continue
        if ticket >> EPOCH_BITS != client.server.epoch:
            return f"ERR ticket {ticket} is of another epoch: the server was restarted"
        if client.first_ticket <= ticket <= client.last_ticket:
            return f"ERR ticket {ticket} was released before"
        return f"ERR ticket {ticket} is not one of this connection"
    raise AssertionError
