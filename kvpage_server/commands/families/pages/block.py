"""The block family: all pages of one (req_id, page_id) in one body. KVBLOCKSET, KVBLOCKGET, KVBLOCKMGET, KVBLOCKEXISTS,
and KVBLOCKSETCODED and KVBLOCKMGETCODED, whose bodies are in the lossless code (docs/page-code.md).

The body's order is layer, plane, head, token, dim. A block and its pages are the same data: a block that was stored as
a whole can be read page by page, and pages that were stored one by one can be read as a block when it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, check_batch, integer_in, plain, plain_all, shorten
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import ReadAhead
from kvpage_server.commands.families.pages.request import (
    SHAPE,
    block_missed,
    block_names,
    count_miss,
    hash_in_steps,
    note_chain,
    page_id,
    request_name,
)
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import BatchParts, batches, blocks, end_of_batch, nothing, requests
from kvpage_server.commands.steps import IN_THREAD_FROM, Steps, each, in_thread, stepwise
from kvpage_server.core import Argument, Slot
from kvpage_server.core.pieces import END, Piece, borrowed_bytes, frame
from kvpage_server.lossless import CODED_DTYPES, decode_body, encode_block_body
from kvpage_server.page import (
    MAX_HEAD,
    MAX_KV_TYPE,
    MAX_LAYER,
    MAX_TTL,
    MAX_U32,
    BlockShape,
    PageError,
    Plane,
    check_dtype,
    checksum,
    unix_ms,
)
from kvpage_server.resp import OK, Raw, Reply, ReplyError, Stream
from kvpage_server.store.disk.prefetch import Prefetcher
from kvpage_server.store.evict import in_room
from kvpage_server.store.keyspace import BLOCK_PAGES_PER_STEP, read_block, stored_shape
from kvpage_server.store.memory.index import Block, Extent, OnDisk

_PLANE = 3  # arguments of a plane: type dtype head_dim
_DIGEST = re.compile(rb"[0-9a-f]{16}")
_MOST_RATIO = 2  # of a body to its code; the largest possible one is 1.46
_COPIED_PER_STEP = 4 * 1024 * 1024  # bytes


_block = partial(command, flags="readonly", uses=requests(0), group="page")


@_block(
    "kvblockset req page layers heads page_size ttl P type dtype head_dim [type dtype head_dim ...] body",
    flags="write denyoom hashed",
    needs=nothing,
    complexity="O(N) with N bytes",
    reply="OK",
    summary="Stores a block, replacing all its pages; ttl is in seconds, 0 for none.",
)
def kvblockset(client: Client, args: list[Argument]) -> Reply:
    """Return OK. P is the number of planes, in the order of their type. The body is exactly layers x planes x heads x
    page_size x head_dim elements.
    """
    req_id, page, ttl = request_name(args[0]), page_id(args[1]), integer_in("ttl", args[5], 0, MAX_TTL)
    shape = read_shape(*plain_all([*args[2:5], *args[6:-1]]))
    keyspace, body = client.keyspace, args[-1]
    slot = body if isinstance(body, Slot) else keyspace.contents.slot_of(plain(body))
    if slot.size != shape.nbytes:
        raise ReplyError(f"ERR body must be {shape.nbytes} bytes for this shape, got {slot.size}")
    with_checksum = client.server.config.page_checksums
    small = slot.digest != 0 or not with_checksum

    def store() -> Steps[Reply]:
        """Hash the body in steps, unless it was hashed as it arrived. Then store it in one step."""
        digest = 0
        if with_checksum:
            digest = slot.digest or (yield from hash_in_steps(slot.body))
        yield from _stored(client, req_id, page, Extent(shape, slot, digest, unix_ms(), ttl), small=small)
        slot.digest = 0
        return OK

    return stepwise(store(), small=small)


def _stored(client: Client, req_id: bytes, page: int, extent: Extent, *, small: bool) -> Steps[None]:
    """Admit a block, and store it in one step. If the command is `small`, raise MoreRoom if many units have to be
    evicted before, so that it is called again; otherwise evict them in steps.
    """
    store = partial(client.keyspace.set_block, req_id, page, extent)
    if small:
        store()
    else:
        yield from in_room(store)


@lru_cache(maxsize=256)  # all blocks of a model have the same shape
def read_shape(layers: bytes, heads: bytes, page_size: bytes, planes: bytes, *numbers: bytes) -> BlockShape:
    """Return the shape of a block from KVBLOCKSET's arguments. `planes` is P, and `numbers` are three words for each
    plane. Raises ReplyError, which names the wrong argument.
    """
    counts = (
        integer_in("layers", layers, 1, MAX_LAYER + 1),
        integer_in("heads", heads, 1, MAX_HEAD + 1),
        integer_in("page_size", page_size, 1, MAX_U32),
    )
    count = integer_in("P", planes, 1, MAX_KV_TYPE + 1)
    if len(numbers) != count * _PLANE:
        raise ReplyError(
            f"ERR KVBLOCKSET with P = {count} takes {count * _PLANE} arguments between P and the body, "
            f"{_PLANE} a plane, got {len(numbers)}"
        )
    try:
        return BlockShape(*counts, tuple(_read_plane(*numbers[i : i + _PLANE]) for i in range(0, len(numbers), _PLANE)))
    except PageError as error:
        raise ReplyError(f"ERR {error}") from None


def _read_plane(kv_type: bytes, dtype: bytes, head_dim: bytes) -> Plane:
    """Return a plane from its three words. Raises ReplyError or PageError, which name the wrong argument."""
    return Plane(
        kv_type=integer_in("kv_type", kv_type, 0, MAX_KV_TYPE),
        dtype=check_dtype(integer_in("dtype", dtype, 0, 255)),
        head_dim=integer_in("head_dim", head_dim, 1, MAX_U32),
    )


# -- The shape that a reader expects -----------------------------------------------------------------------------------
#
# The option `SHAPE shape` of reads. A block may have as many bytes in other planes, heads or dtypes. In place of such a
# block, the reply has the empty string: no block is empty, and the reader knows the reason.

_SHAPE_OPTION = b"SHAPE"
_SHAPE_WORDS = 2  # of the option
_SHAPE_BYTES = 256  # of the longest shape, which has 21 numbers


def names_and_shape(command: str, args: Sequence[Argument]) -> tuple[Sequence[Argument], BlockShape | None]:
    """Check the arguments `N req page [req page ...] [SHAPE shape]` of a command. Return the words of the names, and
    the expected shape if there is one. Raises ReplyError.
    """
    end = end_of_batch(args, 1, 2)
    if len(args) - end != _SHAPE_WORDS or plain(args[end]).upper() != _SHAPE_OPTION:
        end = len(args)  # without the option, or with an error that names N
    check_batch(command, args[:end], 2, "block")
    return args[1:end], expected_shape(args[end:])


def expected_shape(option: Sequence[Argument]) -> BlockShape | None:
    """Return the shape in the words `SHAPE shape`, None without words. Raises ReplyError."""
    if not option:
        return None
    if len(option) != _SHAPE_WORDS or plain(option[0]).upper() != _SHAPE_OPTION:
        raise ReplyError(SYNTAX_ERROR)
    return _shape_in(plain(option[1]))


@lru_cache(maxsize=256)
def _shape_in(text: bytes) -> BlockShape:
    """Return the shape in a text `layers:heads:page_size:type:dtype:head_dim[:type:dtype:head_dim ...]`. Raises
    ReplyError.
    """
    numbers = text.split(b":") if len(text) <= _SHAPE_BYTES else []
    if len(numbers) <= _PLANE or len(numbers) % _PLANE:
        raise ReplyError(
            f"ERR shape must be layers:heads:page_size and, for each plane, :type:dtype:head_dim, got '{shorten(text)}'"
        )
    return read_shape(*numbers[:3], b"%d" % (len(numbers) // _PLANE - 1), *numbers[3:])


def misfits(client: Client, block: Block | None, expected: BlockShape | None) -> Steps[bool]:
    """Return whether a block is complete in another shape than the expected one. Nothing is counted."""
    if expected is None or block is None:
        return False
    shape = yield from stored_shape(client.keyspace, block)
    return shape is not None and shape is not expected and shape != expected


def _misfit_missed(client: Client) -> Reply:
    """Count a miss of a block in another shape, and return the reply for it."""
    client.keyspace.counters.misses += 1
    count_miss(client, SHAPE)
    return b""


def _on_disk_of(lookup: Prefetcher, name: tuple[bytes, int]) -> list[OnDisk]:
    """Return the values to load before the block `name` can be read."""
    return lookup.values_to_load_for_block(*name)


def _without_code(lookup: Prefetcher, name: tuple[bytes, int]) -> list[OnDisk]:
    """Return the values to load before the block `name` can be sent in the code: none if it is coded in memory."""
    block = lookup.index.block(*name)
    return [] if block is not None and block.code is not None else lookup.values_to_load_for_block(*name)


def _read(
    client: Client,
    req_id: bytes,
    page: int,
    ahead: ReadAhead[tuple[bytes, int]],
    expected: BlockShape | None,
    *,
    coded: bool = False,
) -> Steps[Reply]:
    """Return the reply for one block: its body, an error if it consists of single pages and is larger than
    maxmemory-clients, None if it is not complete, or the empty string if it does not have the expected shape. The last
    two are counted as misses. The block is the next step of `ahead`.

    With `coded`, it is the code if the block has one, in memory or made here, see `_coded`.
    """
    yield from ahead.next()
    found, tiered = client.keyspace.reader.block(req_id, page), client.server.tiered
    # Pages that are in memory now stay until they are collected, which takes steps.
    _held = tiered.fetching.holds.begin([found]) if tiered is not None and found is not None else None
    if (yield from misfits(client, found, expected)):
        ahead.end_step()
        return _misfit_missed(client)
    if coded and found is not None and (code := found.code) is not None:
        ahead.end_step()
        client.keyspace.reader.use_block(found)
        return (*_opening(code.digest, code.size), *(slot.part(0, slot.size) for slot in code.slots), END)
    block = yield from read_block(client.keyspace, found, ahead.lent)
    ahead.end_step()
    if block is None:
        block_missed(client, req_id, page)
        return None
    size, most = borrowed_bytes(block), client.server.config.client_memory
    if (yield from misfits(client, found, expected)):  # its pages changed while they were collected
        return _misfit_missed(client)
    if size > most > 0 and found is not None and found.extent is None:  # one value may exceed the limit
        return ReplyError(f"OOM the block has {size} bytes, maxmemory-clients allows {most}: read it page by page")
    return (yield from _coded(client, found, block)) if coded else block


def _is_small(client: Client, req_id: bytes, page: int) -> bool:
    """Return whether a block can be read in one step: it is in memory, and has few pages or was stored as a whole."""
    keyspace = client.keyspace
    block = keyspace.reader.block(req_id, page)
    if block is None:
        return True
    if keyspace.contents.any_on_disk and keyspace.needs.values_to_load_for_block(req_id, page):
        return False
    return block.extent is not None or block.pages <= BLOCK_PAGES_PER_STEP


@_block(
    "kvblockget req page [SHAPE shape]",
    needs=blocks(0),
    fetches=True,
    complexity="O(N) with N pages, O(1) if stored as a block",
    reply="bulk | null",
    summary="Returns a block's body, or null if it is not complete.",
)
def kvblockget(client: Client, args: list[Argument]) -> Reply:
    """Return one bulk string, in the order layer, plane, head, token, dim.

    A block is complete if it has all its pages and they fit together: one page_size, one dtype and head_dim in a plane,
    and every body exactly as long as that makes it.

    With SHAPE, the reply is the empty string if the block has another shape: a miss with the reason `shape`. A shape is
    written layers:heads:page_size and, for each plane, :type:dtype:head_dim.
    """
    name, expected = (request_name(args[0]), page_id(args[1])), expected_shape(args[2:])

    def body() -> Steps[Reply]:
        ahead = ReadAhead(client, _on_disk_of, [name], of_pages=False)
        return (yield from _read(client, *name, ahead, expected))

    return stepwise(body(), small=_is_small(client, *name))


@_block(
    "kvblockmget N req page [req page ...] [SHAPE shape]",
    uses=batches(1, 2),
    needs=blocks(1),
    fetches=True,
    parts=BatchParts(1, 2),
    complexity="O(N) with N pages, O(1) for each block stored as a block",
    reply="array of bulk or null",
    summary="Returns the bodies of N blocks, with null for those that are not complete.",
)
def kvblockmget(client: Client, args: list[Argument]) -> Reply:
    """Return an array of bodies. A block is looked up when the reply gets to it. The eviction policy assumes that each
    block extends the one before it. A block is complete if its pages fit together, as KVBLOCKGET says. SHAPE is the
    option of KVBLOCKGET, for all blocks.
    """
    return _bodies(client, *names_and_shape("KVBLOCKMGET", args), coded=False)


def _bodies(client: Client, words: Sequence[Argument], expected: BlockShape | None, *, coded: bool) -> Stream:
    """Return the reply of KVBLOCKMGET or, with `coded`, of KVBLOCKMGETCODED, for the blocks that `words` name."""
    index = client.keyspace.index

    def bodies() -> Iterator[Reply]:
        names = yield from each(words, block_names, 2)
        found = yield from each(names, lambda some: [index.block(*name) for name in some])
        yield from note_chain(client.keyspace, [block for block in found if block])
        yield Raw(b"*%d\r\n" % len(names))
        ahead = ReadAhead(client, _without_code if coded else _on_disk_of, names, of_pages=False)
        for req_id, page in names:
            yield (yield from _read(client, req_id, page, ahead, expected, coded=coded))

    return Stream(None, bodies())


# -- Bodies in the lossless code ---------------------------------------------------------------------------------------


@_block(
    "kvblocksetcoded req page layers heads page_size ttl P type dtype head_dim [type dtype head_dim ...] digest code",
    flags="write denyoom",
    needs=nothing,
    complexity="O(N) with N bytes",
    reply="OK",
    summary="Stores a block as KVBLOCKSET, from its body in the lossless code.",
)
def kvblocksetcoded(client: Client, args: list[Argument]) -> Reply:
    """Return OK. `code` is a coded block (docs/page-code.md). `digest` is the XXH3-64 of the block's body, 16
    hexadecimal digits. An error is the reply, and nothing is stored, if the code is damaged or that of another shape or
    dtype, or if the decoded body does not match the digest.
    """
    req_id, page, ttl = request_name(args[0]), page_id(args[1]), integer_in("ttl", args[5], 0, MAX_TTL)
    shape, digest, code = read_shape(*plain_all([*args[2:5], *args[6:-2]])), plain(args[-2]), args[-1]
    if not _DIGEST.fullmatch(digest):
        raise ReplyError("ERR digest must be 16 hexadecimal digits")
    coded = code.body if isinstance(code, Slot) else memoryview(plain(code))
    if shape.nbytes > _MOST_RATIO * len(coded):  # before memory is allocated
        raise ReplyError(f"ERR a block of {shape.nbytes} bytes does not have a code of {len(coded)}")
    keyspace, small = client.keyspace, shape.nbytes < IN_THREAD_FROM

    def store() -> Steps[Reply]:
        """Decode the body, in a thread if it is long. Then store it in one step."""
        try:
            slot = keyspace.arena.allocate(shape.nbytes)
        except MemoryError:
            raise ReplyError("OOM the system has no memory left for the block") from None

        def decoded() -> int:
            decode_body(coded, slot.body, shape)
            return checksum(slot.body)

        try:
            found = decoded() if small else (yield from in_thread(decoded))
        except PageError as error:
            raise ReplyError(f"ERR {error}") from None
        if found != int(digest, 16):
            raise ReplyError("ERR the decoded body does not match its digest")
        kept = found if client.server.config.page_checksums else 0
        yield from _stored(client, req_id, page, Extent(shape, slot, kept, unix_ms(), ttl), small=small)
        return OK

    return stepwise(store(), small=small)


@_block(
    "kvblockmgetcoded N req page [req page ...] [SHAPE shape]",
    uses=batches(1, 2),
    needs=blocks(1),
    fetches=True,
    parts=BatchParts(1, 2),
    complexity="O(N) with N bytes",
    reply="array of bulk or array or null",
    summary="Returns the bodies of N blocks as KVBLOCKMGET, in the lossless code if that is shorter.",
)
def kvblockmgetcoded(client: Client, args: list[Argument]) -> Reply:
    """Return an array. A block is an array of the XXH3-64 of its body, 16 hexadecimal digits, and its code
    (docs/page-code.md). It is the body itself if the code would save less than a tenth, and null or the empty string as
    in KVBLOCKMGET.
    """
    return _bodies(client, *names_and_shape("KVBLOCKMGETCODED", args), coded=True)


class _Code:
    """The code of a body as a piece of a reply."""

    __slots__ = ("size", "view")

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size = len(view)


def _coded(client: Client, block: Block | None, body: tuple[Piece, ...]) -> Steps[tuple[Piece, ...]]:
    """Return the digest and the code of a block's body, in pieces; the body itself if it has no code, or if the code
    would exceed maxmemory-clients.

    `body` is the bulk string of the body. A thread encodes long bodies. The digest is the stored one, if there is one:
    so a client notices a body that was damaged in memory.
    """
    shape, extent = (block.shape, block.extent) if block is not None else (None, None)
    if extent is not None:
        shape = extent.shape
    if shape is None or not any(plane.dtype in CODED_DTYPES for plane in shape.planes):
        return body
    nbytes, known = shape.nbytes, extent.digest if extent is not None else 0
    server = client.server
    if 0 < server.config.client_memory < server.in_flight + nbytes:  # no room for the code
        return body
    client.keep(nbytes)
    try:
        text = body[0].view if len(body) == 1 and isinstance(body[0], Slot) else (yield from _joined(body))
        start = len(frame(nbytes))
        if len(text) != start + nbytes + len(END):
            return body
        raw = text[start : start + nbytes]

        def work() -> tuple[int, memoryview | None]:
            return known or checksum(raw), encode_block_body(raw, shape)

        digest, code = (yield from in_thread(work)) if nbytes >= IN_THREAD_FROM else work()
    finally:
        client.keep(-nbytes)
    if code is None:
        return body
    return (*_opening(digest, len(code)), _Code(code), END)


def _opening(digest: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces before a code of `size` bytes. `digest` is that of the body."""
    return (b"*2\r\n$16\r\n%016x\r\n" % digest + frame(size),)


def _joined(pieces: Sequence[Piece]) -> Steps[memoryview]:
    """Copy the pieces of a reply in steps. The bytes of borrowed pieces may move between two steps."""
    text = bytearray()
    for piece in pieces:
        size = len(piece) if isinstance(piece, bytes) else len(piece.view)
        for start in range(0, size, _COPIED_PER_STEP):
            view = memoryview(piece) if isinstance(piece, bytes) else piece.view
            text += view[start : start + _COPIED_PER_STEP]
            if size > _COPIED_PER_STEP:
                yield ()
    return memoryview(text)


@_block(
    "kvblockexists req page",
    needs=nothing,
    complexity="O(N) with N pages, O(1) if stored as a block, or unchanged since the last check",
    reply="integer",
    summary="Says whether a block exists and is complete.",
)
def kvblockexists(client: Client, args: list[Argument]) -> Reply:
    """Return 1 if the block is complete, else 0. A block is complete if its pages fit together, as KVBLOCKGET says."""
    name = request_name(args[0]), page_id(args[1])

    def answer() -> Steps[Reply]:
        return int((yield from stored_shape(client.keyspace, client.keyspace.reader.block(*name))) is not None)

    return stepwise(answer(), small=_is_small(client, *name))
