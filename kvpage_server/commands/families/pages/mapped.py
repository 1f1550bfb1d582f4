"""The commands for clients on the same machine that map memory instead of moving bytes through a connection: KVMAP
ATTACH, KVMAP BLOCKMGET, KVMAP MGET, KVMAP RESERVE, KVMAP COMMIT, KVMAP RELEASE.

A *ticket* keeps a slot in use for a connection, as a reply does while it is sent: the bytes do not move, and their
memory is not used for other values, even if the value is overwritten, deleted or evicted meanwhile. It counts for
`maxmemory-clients`, and ends with RELEASE or with the connection.

The reader compares digests with its own copy of the bytes. The reply to RELEASE confirms that the bytes did not change
before it: until then, the slot was in use.

A writer fills memory of its own, which the server has made so that nobody can make it shorter. The server copies the
value into a slot, and hashes the copy: bytes that the writer changes meanwhile are stored or not, but always match
their digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from kvpage_server.commands.arguments import check_batch, integer_in, plain, plain_all, shorten
from kvpage_server.commands.context import EPOCH_BITS, Client
from kvpage_server.commands.dispatch.checks import check_rights
from kvpage_server.commands.families.pages.block import kvblockset, read_shape
from kvpage_server.commands.families.pages.request import block_missed, block_names
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import TABLE, Parts, blocks, nothing, requests, values
from kvpage_server.commands.steps import IN_THREAD_FROM, in_thread
from kvpage_server.core import Argument, Slot, copy_hashed
from kvpage_server.core.arguments import I64
from kvpage_server.core.pieces import Piece
from kvpage_server.core.regions import Reserved, reserved_footprint
from kvpage_server.page import FIELD_AT
from kvpage_server.resp import Reply, ReplyError, Stream, encode
from kvpage_server.store.memory.entry import Text, is_page
from kvpage_server.store.memory.index import ExtentPage, OnDisk

MOST_REGIONS = 128  # descriptors in a reply; Linux passes at most 253 at once
MOST_TICKETS = 65_536  # of a connection: each takes memory in addition to its slot
MOST_RESERVED, MOST_RESERVED_IN_ALL = 256, 4096  # tickets of RESERVE, of a connection and of all: each is a mapping
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
    pieces: list[Piece] = []
    encode(reply, client.protocol, pieces)
    if client.silence or not client.connection.pass_descriptors(_joined(pieces), descriptors):
        raise ReplyError(_NOT_PASSED)
    return ()


_NOT_PASSED = "ERR descriptors cannot be passed now: read all earlier replies, then send this command alone"


def _joined(pieces: Sequence[Piece]) -> bytes:
    """Return the bytes of pieces, none of which is borrowed."""
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


_NO_ROOM = "OOM the tickets of this connection, or all clients, hold as much as they may: KVMAP RELEASE"


def _has_room(client: Client, nbytes: int) -> bool:
    """Return whether a client may have a ticket for `nbytes` more."""
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
    return [region.number, offset + start, size, b"%016x" % digest if digest else None, client.lend(slot)]


_NOT_IN_MEMORY = "NOMAP the value is on disk only"


def _block(client: Client, req_id: bytes, page: int) -> Reply:
    """Return KVMAP BLOCKMGET's item for one block. A block that is not lent counts neither as a hit nor as a miss."""
    block = client.keyspace.reader.block(req_id, page)
    if block is None:
        client.keyspace.counters.misses += 1
        block_missed(client, req_id, page)
        return None
    if block.extent is None:
        return ReplyError("NOMAP the block consists of single pages")
    slot = block.extent.slot
    found = slot.temporary_slot if isinstance(slot, OnDisk) else slot
    if found is None:
        return ReplyError(_NOT_IN_MEMORY)
    lent = _lent(client, found, 0, found.size, block.extent.digest)
    if not isinstance(lent, ReplyError):
        client.keyspace.reader.use_block(block)
    return lent


@_map(
    "kvmap|blockmget N req page [req page ...]",
    uses=requests(1, 2),
    needs=blocks(1),
    complexity="O(N) with N blocks",
    reply="array",
    summary="Returns where N blocks are in the server's memory, and keeps them there.",
)
def kvmap_blockmget(client: Client, args: list[Argument]) -> Reply:
    """Return for each block null if it does not exist, an array, or an error. The array has the number of the region,
    the offset in bytes, the number of bytes, their digest (XXH3-64 as 16 hexadecimal digits, or null if it is not
    known), and the ticket. N is at most 510.

    An error NOMAP means that KVBLOCKMGET has to read the block, for example because it consists of single pages; OOM
    that the client has to release tickets first.
    """
    _check_socket(client)
    check_batch("KVMAP BLOCKMGET", args, 2, "block")
    names = block_names(args[1:])
    found = (client.keyspace.index.block(*name) for name in names)
    client.keyspace.chain([block for block in found if block])
    return [_block(client, *name) for name in names]


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
    "kvmap|reserve nbytes",
    flags="noscript no_multi",
    reply="array",
    summary="Passes memory that the client fills with a block.",
)
def kvmap_reserve(client: Client, args: list[Argument]) -> Reply:
    """Return an array of a ticket and `nbytes`. The reply carries a descriptor (SCM_RIGHTS) of as much memory, which
    the client maps for writing. KVMAP RELEASE ends the ticket. A connection may have 256 such tickets, and all
    connections together 4,096. The command must not be sent in a pipeline behind others.
    """
    _check_socket(client)
    nbytes = integer_in("nbytes", args[0], 1, client.server.config.largest_command)
    if client.reserved >= MOST_RESERVED:
        raise ReplyError(f"OOM the connection has {MOST_RESERVED} tickets of KVMAP RESERVE: KVMAP RELEASE")
    if client.server.reserved >= MOST_RESERVED_IN_ALL:
        raise ReplyError(f"OOM all connections together have {MOST_RESERVED_IN_ALL} tickets of KVMAP RESERVE")
    if not _has_room(client, reserved_footprint(nbytes)):
        raise ReplyError(_NO_ROOM)
    try:
        reserved = Reserved(nbytes)
    except (OSError, ImportError) as error:
        raise ReplyError(f"OOM the system has no shared memory: {error}") from None
    ticket = client.lend(reserved)
    passed = not client.silence and client.connection.pass_descriptors(
        b"*2\r\n:%d\r\n:%d\r\n" % (ticket, nbytes), [reserved.descriptor]
    )
    reserved.close()
    if not passed:
        if not client.gone:
            client.take_back(ticket)
        raise ReplyError(_NOT_PASSED)
    return ()


@_map(
    "kvmap|commit ticket KVBLOCKSET req page layers heads page_size ttl P type dtype head_dim "
    "[type dtype head_dim ...]",
    flags="write denyoom noscript no_multi",
    uses=requests(2),
    needs=nothing,
    complexity="O(N) with N bytes",
    reply="OK",
    summary="Stores a block whose body is in reserved memory.",
)
def kvmap_commit(client: Client, args: list[Argument]) -> Reply:
    """Return OK, as KVBLOCKSET, whose arguments are those after `ticket`, without the body. The body is the reserved
    memory, and has exactly as many bytes. The server copies it before it replies, so that the client can then fill the
    memory with another block. The user needs the right to run KVBLOCKSET, too.
    """
    _check_socket(client)
    ticket, name, words = integer_in("ticket", args[0], 1, I64[1]), plain(args[1]), args[2:]
    reserved = client.tickets.get(ticket)
    if reserved is None:
        raise ReplyError(_why_not_held(client, [ticket]))
    if not isinstance(reserved, Reserved):
        raise ReplyError(f"ERR ticket {ticket} is one for reading")
    if name.upper() != b"KVBLOCKSET":
        raise ReplyError(f"ERR KVMAP COMMIT takes the arguments of KVBLOCKSET, got {shorten(name)}")
    check_rights(client, TABLE["kvblockset"], args[1:])
    shape = read_shape(*plain_all([*words[2:5], *words[6:]]))
    if shape.nbytes != reserved.size:
        raise ReplyError(f"ERR ticket {ticket} has reserved {reserved.size} bytes, and the block has {shape.nbytes}")
    slot = client.keyspace.arena.allocate(reserved.size)

    def copy() -> int:
        return copy_hashed(reserved.memory, slot.body)  # this keeps `reserved`, and so its memory

    if reserved.size < IN_THREAD_FROM:
        return _stored(client, words, slot, copy())

    def store() -> Iterator[Reply]:
        reply = _stored(client, words, slot, (yield from in_thread(copy)))
        yield from reply.items if isinstance(reply, Stream) else (reply,)

    return Stream(None, store())


def _stored(client: Client, words: list[Argument], slot: Slot, digest: int) -> Reply:
    """Store a block as KVBLOCKSET does, with the body in `slot`."""
    slot.digest = digest if client.server.config.page_checksums else 0
    return kvblockset(client, [*words, slot])


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
