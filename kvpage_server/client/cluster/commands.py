"""Commands for single keys on a cluster, their routing to nodes, and blocks as strings."""

from __future__ import annotations

import struct
import time
from binascii import crc_hqx
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate, count, product
from typing import Any

import numpy as np

from kvpage_server.client.cluster.plan import Failed, NodeRequest, Plan, Round
from kvpage_server.client.cluster.topology import (
    SLOTS,
    Address,
    Node,
    Shard,
    SlotMap,
    ask_slots,
    has_tag,
    redirection,
    slot_of,
)
from kvpage_server.client.errors import DeadlineExceeded, Disconnected, PageClientError, Refused, WrongReply
from kvpage_server.client.page import BlockName, Page, pages_of_block
from kvpage_server.client.raw_commands import RawCommand, encoded, key_of
from kvpage_server.client.wire.connection import Deadline
from kvpage_server.client.wire.exchange import Piece, Request, around_set, command, word
from kvpage_server.client.wire.reply import OTHER_SIZE, Answer, Lines, Place, Values
from kvpage_server.core import Chunk, SentPages, digest, fill_digests
from kvpage_server.page import (
    FIELD_AT,
    HEADER_SIZE,
    MAX_KV_TYPE,
    BlockShape,
    DType,
    PageError,
    PageKey,
    Plane,
    pack_header,
)

# -- block value -------------------------------------------------------------------------------------------------------
#
# A block is stored as one string: an opening, the headers of its pages, and its body.
#
#     64 bytes          the opening: the shape of the block
#     64 bytes a page   the pages' headers, in the order of the body
#     the rest          the body: layer, plane, head, token, dim
#
# A page is two ranges of the string, its header and its body; the header has the page's digest. The opening has a
# digest of the whole string, so that one comparison checks a block.
#
# The opening, little-endian:
#
#     0   4   magic KVPB
#     4   1   version, 1
#     5   1   planes
#     6   2   reserved, 0
#     8   4   layers
#     12  4   heads
#     16  4   page_size
#     20  36  planes, 6 bytes each: kv_type, dtype, head_dim (4 bytes); zeros for missing planes
#     56  8   XXH3-64 of the 56 bytes before, of the pages' headers and of the body

OPENING_SIZE = 64
_MAGIC, _VERSION = b"KVPB", 1
_FIELDS, _PLANE, _DIGEST = struct.Struct("<4sBBHIII"), struct.Struct("<BBI"), struct.Struct("<Q")
_DIGEST_AT = OPENING_SIZE - _DIGEST.size
assert _FIELDS.size + (MAX_KV_TYPE + 1) * _PLANE.size == _DIGEST_AT
_OF_A_WRITE = ("page", "created", "ttl", "checksum")  # fields of a header that differ between blocks of the same shape
_HEADERS = np.dtype(
    {"names": _OF_A_WRITE, "formats": ["<u8"] * 4, "offsets": [FIELD_AT[f] for f in _OF_A_WRITE], "itemsize": 64}
)
Headers = np.ndarray[Any, Any]


def block_key(name: BlockName) -> bytes:
    return b"kv:%b:block:%d" % name


def head_size(shape: BlockShape) -> int:
    """Return the number of bytes before the body."""
    return OPENING_SIZE + HEADER_SIZE * shape.pages


def head(page: int, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int) -> bytes:
    """Return the bytes before a block's body: the opening and the headers of its pages.

    `page` is the page id, `ttl` in seconds, `created_ms` in unix milliseconds. If the body is in several pieces, each
    must consist of whole pages.
    """
    headers = _blank_headers(shape).copy()
    fields = headers.view(_HEADERS)
    fields["page"], fields["created"], fields["ttl"] = page, created_ms, ttl
    fill_digests(headers.data, body)
    before = _opening(shape)
    return before + _DIGEST.pack(digest([before, headers.data, *body])) + headers.tobytes()


def mismatch(page: int, shape: BlockShape, found: memoryview, body: memoryview, *, verify: bool) -> str | None:
    """Return the reason why a received block is invalid, ``header`` or ``checksum``; None if it is valid.

    `found` has the bytes before the body. `page` and `shape` are the expected page id and shape. With `verify`, the
    digest is compared as well.
    """
    before, table = found[:_DIGEST_AT], found[OPENING_SIZE:]
    headers, given = _blank_headers(shape).copy(), np.frombuffer(table, _HEADERS)
    fields = headers.view(_HEADERS)
    fields["page"] = page
    for name in ("created", "ttl", "checksum"):
        fields[name] = given[name]
    if before != _opening(shape) or headers.tobytes() != table:
        return "header"
    if verify and found[_DIGEST_AT:OPENING_SIZE] != _DIGEST.pack(digest([before, table, body])):
        return "checksum"
    return None


def checked_block(page: int, value: memoryview, *, verify: bool) -> tuple[BlockShape | None, str | None]:
    """Return the shape of the block in a string, None without one, and the reason why it is invalid, as `mismatch`."""
    shape = shape_of(value[:OPENING_SIZE])
    before = head_size(shape) if shape else 0
    if shape is None or len(value) != before + shape.nbytes:
        return None, "header"
    return shape, mismatch(page, shape, value[:before], value[before:], verify=verify)


def shape_of(opening: object) -> BlockShape | None:
    """Return the shape in a block's opening of OPENING_SIZE bytes; None for another reply, as of an absent block."""
    if not isinstance(opening, bytes | memoryview) or len(opening) != OPENING_SIZE:
        return None
    magic, version, planes, reserved, layers, heads, page_size = _FIELDS.unpack_from(opening)
    if (magic, version, reserved) != (_MAGIC, _VERSION, 0) or not 1 <= planes <= MAX_KV_TYPE + 1:
        return None
    found = list(_PLANE.iter_unpack(opening[_FIELDS.size : _FIELDS.size + planes * _PLANE.size]))
    try:
        of_planes = tuple(Plane(kv_type, DType(dtype), head_dim) for kv_type, dtype, head_dim in found)
        return BlockShape(layers, heads, page_size, of_planes)
    except ValueError:  # PageError is a subclass
        return None


def ranges_of_page(key: PageKey, shape: BlockShape | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the byte ranges of a page in a block's string: those of its header and of its body, each as (first, last)
    for GETRANGE.

    Return None if the block has no such page, or there is no block, so that `shape` is None.
    """
    if shape is None:
        return None
    try:
        span = shape.page_span(key.layer, key.head, key.kv_type)
    except PageError:
        return None
    plane = [plane.kv_type for plane in shape.planes].index(key.kv_type)
    header = OPENING_SIZE + HEADER_SIZE * ((key.layer * len(shape.planes) + plane) * shape.heads + key.head)
    before = head_size(shape)
    return (header, header + HEADER_SIZE - 1), (before + span.start, before + span.stop - 1)


def whole_pages(shape: BlockShape, body: Sequence[memoryview]) -> Sequence[memoryview]:
    """Return a block's body unchanged if each of its pieces consists of whole pages, otherwise joined in one piece."""
    if len(body) == 1:
        return body
    bounds = {0, *(span.stop for span in _spans(shape))}
    return body if all(end in bounds for end in accumulate(map(len, body))) else [memoryview(b"".join(body))]


@lru_cache(16)
def _spans(shape: BlockShape) -> tuple[slice, ...]:
    return tuple(shape.page_spans())


@lru_cache(16)
def _opening(shape: BlockShape) -> bytes:
    planes = b"".join(_PLANE.pack(plane.kv_type, plane.dtype, plane.head_dim) for plane in shape.planes)
    fields = _FIELDS.pack(_MAGIC, _VERSION, len(shape.planes), 0, shape.layers, shape.heads, shape.page_size)
    return (fields + planes).ljust(_DIGEST_AT, b"\0")


@lru_cache(16)
def _blank_headers(shape: BlockShape) -> Headers:
    """Return the headers of a block's pages as uint8, with 0 in the fields that differ from write to write."""

    def header(layer: int, plane: Plane, head: int) -> bytes:
        about = plane.dtype, plane.kv_type, shape.page_size, plane.head_dim, layer, head
        return pack_header(*about, 0, 0, 0, shape.page_nbytes(plane), 0)

    pages = product(range(shape.layers), shape.planes, range(shape.heads))
    return np.frombuffer(b"".join(header(*page) for page in pages), np.uint8)


_ASKING = command(b"ASKING")
_KEYS = 4096  # of one command, at most
_REQUEST, _PAGE, _NEXT = b"\0", b"\1", b"\2"  # placeholders; no request id contains these bytes


@dataclass(frozen=True, slots=True)
class Command:
    """A command whose keys are all in the slot of `key`. It can be sent several times. `place` is the memory for its
    reply, if that is long.
    """

    key: bytes
    pieces: Callable[[], Iterator[Piece | Chunk]]
    place: Place | None = None
    writes: bool = False  # sent to the primary, and retried until the deadline
    at_primary: bool = False  # sent to the primary, though it is a read
    once: bool = False  # not retried when the server may have executed it
    apart: Callable[[], Iterator[Command]] | None = None  # a command for each key, for a slot that is being moved
    read: Callable[[Any], Any] | None = None  # decodes the reply; raises WrongReply
    skips_types: bool = False  # a value of another type is absent, as for MGET; otherwise it raises Refused


def ask(commands: Sequence[Command], *, asking: bool) -> Request[list[Answer]]:
    """Return one request for several commands. Its result is the list of their decoded replies, with Refused objects
    for error replies.

    With `asking`, an ASKING precedes each command, so that the node also replies for slots that are being moved to it.
    """

    def pieces() -> Iterator[Piece | Chunk]:
        for one in commands:
            if asking:
                yield _ASKING
            yield from one.pieces()

    def read(answers: list[Answer]) -> list[Answer]:
        if asking:
            answers = [first if isinstance(first, Refused) else second for first, second in _pairs(answers)]
        return [
            one.read(answer) if one.read and not isinstance(answer, Refused) else answer
            for one, answer in zip(commands, answers, strict=True)
        ]

    places = [place for one in commands for place in ([None, one.place] if asking else [one.place])]
    return Request(pieces, lambda: Values(with_errors=True, places=places), read)


def _pairs(answers: list[Any]) -> Iterator[tuple[Any, Any]]:
    return zip(answers[::2], answers[1::2], strict=True)


def ask_lines(texts: Sequence[bytes]) -> Request[list[bytes]]:
    """Return one request of several encoded commands whose replies are single lines. The result is the list of these
    lines.
    """
    return Request(lambda: iter((b"".join(texts),)), lambda: Lines(len(texts)), lambda lines: lines)


def simple(*words: bytes | int, writes: bool = False, at_primary: bool = False) -> Command:
    """Return a command of a few words. Its key is the second word if that is bytes, otherwise empty."""
    text, key = command(*words), bytes(words[1]) if isinstance(words[1], bytes) else b""
    return Command(key, lambda: iter((text,)), writes=writes, at_primary=at_primary)


def of_raw_command(raw_command: RawCommand, *, once: bool) -> Command:
    """Return the `Command` that sends a raw command to the primary, because a replica may have older values.

    Its reply must not be an array. With `once`, the command is not retried
    if the server may have executed it.
    """
    text = command(*map(encoded, raw_command.words))
    return Command(
        key_of(raw_command), lambda: iter((text,)), writes=once, at_primary=True, once=once, read=raw_command.read
    )


def get_block(name: BlockName, place: Place) -> Command:
    text = command(b"GET", block_key(name))
    return Command(block_key(name), lambda: iter((text,)), place)


def get_opening(name: BlockName, *, at_primary: bool = False) -> Command:
    """Return the command that reads the opening of a block, which has its shape."""
    return get_range(block_key(name), 0, OPENING_SIZE - 1, at_primary=at_primary)


def get_range(key: bytes, first: int, last: int, *, at_primary: bool = False) -> Command:
    return simple(b"GETRANGE", key, b"%d" % first, b"%d" % last, at_primary=at_primary)


def set_block(name: BlockName, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int) -> Command:
    """Return the SET of a whole block as one string: a head with digests, and the body.

    The digests of the body are computed each time the command is sent. `ttl` is in seconds, 0 for none, `created_ms` in
    unix milliseconds.
    """
    key = block_key(name)
    opening, ending = around_value(key, head_size(shape) + shape.nbytes, ttl)

    def pieces() -> Iterator[Piece]:
        yield opening + head(name[1], shape, body, ttl, created_ms)
        yield from body
        yield ending

    return Command(key, pieces, writes=True)


def set_page(page: Page, ttl: int, created_ms: int) -> Command:
    sent = SentPages([page])
    before, after = around_set(ttl)
    return Command(bytes(page.key), lambda: iter((sent.as_blobs(0, before, after, ttl, created_ms),)), writes=True)


def around_value(key: bytes, nbytes: int, ttl: int) -> tuple[bytes, bytes]:
    """Return the bytes before and after the value of a SET. `nbytes` is the length of the value, `ttl` in seconds, 0
    for none.
    """
    before, after = around_set(ttl)
    return b"%b%b$%d\r\n" % (before, word(key), nbytes), after


# -- Deletion of single pages when their block is written; otherwise reads would find them after the block's removal ---


@dataclass(frozen=True, slots=True)
class Scattered:
    """The commands that delete the single pages of a block when their keys are in different slots of the cluster.

    `Router.scatter` sends the encoded commands of `encode`, and reads their replies, without a Python object for each:
    256 pages take 0.2 ms instead of 4. Commands that fail are sent again, as the commands of `singly`.
    """

    name: BlockName
    shape: BlockShape

    def singly(self) -> Iterator[Command]:
        """Yield a command for each page."""
        return (simple(b"UNLINK", bytes(key), writes=True) for key, *_ in pages_of_block(self.name, self.shape))

    def encode(self) -> tuple[list[int], list[bytes]]:
        """Return the cluster slot of each page's key, and the encoded UNLINK command of each page, in the body's
        order.
        """
        req_id, page = self.name[0], b"%d" % self.name[1]
        texts, endings = _apart(self.shape, len(req_id) + len(page))
        begun = crc_hqx(b"kv:%b:" % req_id, 0)
        slots = [crc_hqx(ending, begun) % SLOTS for ending in endings.replace(_PAGE, page).split(_NEXT)]
        return slots, texts.replace(_REQUEST, req_id).replace(_PAGE, page).split(_NEXT)


Write = Command | Scattered


def block_writes(
    name: BlockName, shape: BlockShape, body: Sequence[memoryview], ttl: int, created_ms: int
) -> list[Write]:
    """Return the commands that write a block, and delete its pages that were written as strings of their own."""
    return [*_deletions(name, shape), set_block(name, shape, body, ttl, created_ms)]


def _deletions(name: BlockName, shape: BlockShape) -> Sequence[Write]:
    scattered, page = Scattered(name, shape), b"%d" % name[1]
    if not has_tag(name[0]):
        _apart(shape, len(name[0]) + len(page))  # keeps the result for `encode`: the caller may run this on a thread
        return [scattered]
    texts = _together(shape, len(name[0]) + len(page))
    filled = [text.replace(_REQUEST, name[0]).replace(_PAGE, page) for text in texts]
    return [Command(block_key(name), partial(iter, (text,)), writes=True, apart=scattered.singly) for text in filled]


def _endings(shape: BlockShape) -> Iterator[bytes]:
    """Yield the part after the request id of each key of a block's pages, with a placeholder for the page id."""
    for layer, plane, head in product(range(shape.layers), shape.planes, range(shape.heads)):
        yield b"%d:%d:%b:%d" % (layer, head, _PAGE, plane.kv_type)


def _words(shape: BlockShape, nbytes: int) -> list[bytes]:
    """Return the keys of a block's pages as encoded words with placeholders for the request id and the page id.

    `nbytes` is the length of the request id and the page id together.
    """
    return [b"$%d\r\nkv:%b:%b\r\n" % (len(ending) + 3 + nbytes, _REQUEST, ending) for ending in _endings(shape)]


@lru_cache(16)
def _together(shape: BlockShape, nbytes: int) -> list[bytes]:
    words = _words(shape, nbytes)
    parts = [words[i : i + _KEYS] for i in range(0, len(words), _KEYS)]
    return [b"*%d\r\n%b%b" % (1 + len(part), word(b"UNLINK"), b"".join(part)) for part in parts]


@lru_cache(16)
def _apart(shape: BlockShape, nbytes: int) -> tuple[bytes, bytes]:
    """Return the encoded UNLINK commands of all pages with placeholders, and the part after the request id of each key.

    Both are joined by _NEXT. `nbytes` is as for `_words`.
    """
    opening = b"*2\r\n" + word(b"UNLINK")
    return _NEXT.join(opening + key for key in _words(shape, nbytes)), _NEXT.join(_endings(shape))


# -- routing -----------------------------------------------------------------------------------------------------------
#
# `Router` sends a batch of commands to the nodes that have their keys.
#
# It follows redirections, refreshes an outdated map, and retries failed commands. A read has few retries, because its
# pages can be computed. A write is tried until its deadline.

READ_TRIES = 3  # attempts of a read, at most
FOLLOWED = 8  # redirections of an attempt, at most
_PAUSES = (0.0, 0.02, 0.05, 0.1, 0.2)  # seconds before each retry; the last number also before all later ones
_REFRESH_SECONDS = 0.1  # between the beginnings of two refreshes of the map
_AGAIN = frozenset({"TRYAGAIN", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "READONLY"})  # the cluster is changing


@dataclass(slots=True)
class _Attempt:
    """The state of one command of a batch."""

    to: Node | None = None  # the node of an ASK redirection
    tries: int = 0  # failed attempts
    followed: int = 0
    from_replica: bool = False
    answer: Answer | Failed = None
    over: bool = False


@dataclass
class Router:
    """Sends commands to the nodes of one cluster, by the map of slots. All plans of a client share it."""

    address: Address
    read_from_replicas: bool
    slots: SlotMap = field(default_factory=SlotMap)
    outdated: bool = True  # whether the map is known to be outdated
    _turn: Any = field(default_factory=count)
    _next_refresh: float = 0.0  # monotonic seconds

    def ask(self, commands: Sequence[Command], end: Deadline) -> Plan[list[Answer | Failed]]:
        """Run commands and return their replies, as `answers`. If all commands fail, raises the first error."""
        answers = yield from self.answers(commands, end)
        if answers and all(isinstance(answer, Failed) for answer in answers):
            raise answers[0].error.again()
        return answers

    def answers(self, commands: Sequence[Command], end: Deadline) -> Plan[list[Answer | Failed]]:
        """Run commands on the nodes of their keys until `end`, and return the reply to each.

        MOVED and ASK are followed. The reply to a read that no node answered is Failed. A command of several keys with
        `apart` gets the error TRYAGAIN, while its slot moves, as its reply: the caller then sends a command for each
        key. Raises Refused for every other error reply, and the last error of a write that has not succeeded by `end`.
        """
        late = Failed(end.exceeded())
        ways = [
            _Attempt(answer=late, from_replica=self.read_from_replicas and not (one.writes or one.at_primary))
            for one in commands
        ]
        slots = [slot_of(one.key) for one in commands]
        left, pause = list(range(len(commands))), 0.0
        if left and self.outdated:
            yield from self._refresh()
        while left and end.seconds_left() > 0:
            groups, lost = self._by_node(left, slots, ways)
            outcomes = yield Round([_node_request(commands, group, to) for to, group in groups.items()], pause)
            failures = len(lost)
            for i in lost:
                self._failed(commands[i], ways[i], Refused(f"CLUSTERDOWN nobody serves slot {slots[i]}"))
            for ((node, _, _), group), outcome in zip(groups.items(), outcomes, strict=True):
                if isinstance(outcome, Failed):
                    if isinstance(outcome.error, Refused) and outcome.error.code not in _AGAIN:
                        raise outcome.error.again()
                    failures += len(group)
                    for i in group:
                        self._failed(commands[i], ways[i], outcome.error)
                    continue
                for i, answer in zip(group, outcome, strict=True):
                    failures += self._answered(commands[i], slots[i], ways[i], answer, node)
            left = [i for i in left if not ways[i].over]
            tries = max((ways[i].tries for i in left), default=0)
            pause = _PAUSES[min(tries, len(_PAUSES)) - 1] if tries else 0.0
            if pause >= end.seconds_left():
                break
            if left and failures:
                yield from self._refresh()
        for i in left:
            self._give_up(commands[i], ways[i], end)
        return [way.answer for way in ways]

    def _by_node(
        self, left: Sequence[int], slots: Sequence[int], ways: Sequence[_Attempt]
    ) -> tuple[dict[tuple[Node, bool, bool], list[int]], list[int]]:
        """Group commands by node. `left` are their indexes; `slots` and `ways` have the slot and the state of each
        command.

        Return the indexes of each (node, whether to send ASKING, whether the node is used as a replica), and the
        indexes of commands whose slot no node serves.
        """
        groups: dict[tuple[Node, bool, bool], list[int]] = defaultdict(list)
        lost, turn = [], next(self._turn)
        for i in left:
            way, shard = ways[i], self.slots.shard(slots[i])
            if way.to:
                groups[way.to, True, False].append(i)
            elif shard is None:
                lost.append(i)
            elif way.from_replica and shard.replicas:
                groups[shard.replicas[turn % len(shard.replicas)], False, True].append(i)
            else:
                groups[shard.primary, False, False].append(i)
        return groups, lost

    def _answered(self, command: Command, slot: int, way: _Attempt, answer: Answer, node: Node) -> bool:
        """Process the reply of `node` to a command: store it in the state `way`, or note its redirection.

        Return whether the attempt has failed. Raises Refused for an error that a retry does not avoid.
        """
        if not isinstance(answer, Refused):
            absent = not answer or answer is OTHER_SIZE  # null, 0, an empty string, or one of another size
            if absent and way.from_replica and self._has_replicas(slot):
                way.from_replica = False  # the replica may be behind
            else:
                way.answer, way.over = answer, True
            return False
        if answer.code == "TRYAGAIN" and command.apart:
            way.answer, way.over = answer, True
            return False
        if answer.code == "WRONGTYPE" and command.skips_types:
            way.answer, way.over = None, True
            return False
        to = redirection(str(answer), node) if answer.code in ("MOVED", "ASK") else None
        if to is None and answer.code not in _AGAIN:
            raise answer.again()
        if to and way.followed == FOLLOWED:
            answer = Refused(f"CLUSTERDOWN the nodes disagree about who serves slot {slot}, at last came {answer}")
        if to is None or way.followed == FOLLOWED:
            self._failed(command, way, answer)
            return True
        way.followed, way.from_replica, way.to = way.followed + 1, False, None
        if answer.code == "ASK":
            way.to = to[1]
        else:
            self.slots.moved(*to)
            self.outdated = True  # the next call refreshes the map; this one has the new node
        return False

    def _failed(self, command: Command, way: _Attempt, error: PageClientError) -> None:
        """Note a failed attempt in the state `way`. The command is over after READ_TRIES failures of a read.

        A DeadlineExceeded does not replace the error of an earlier attempt, which has more information.
        """
        way.tries += 1
        way.to, way.from_replica, way.followed = None, False, 0
        if way.tries == 1 or not isinstance(error, DeadlineExceeded):
            way.answer = Failed(error)
        in_doubt = command.once and not isinstance(error, Refused)
        way.over = in_doubt or (not command.writes and way.tries >= READ_TRIES)

    def _give_up(self, command: Command, way: _Attempt, end: Deadline) -> None:
        if command.writes:
            assert isinstance(way.answer, Failed)
            error = way.answer.error
            raise type(error)(f"{error} (tried {way.tries} times in {end.spent()})")

    def _has_replicas(self, slot: int) -> bool:
        shard = self.slots.shard(slot)
        return bool(shard and shard.replicas)

    def scatter(self, slots: Sequence[int], texts: Sequence[bytes]) -> Plan[list[int]]:
        """Send encoded commands to the primaries of their slots, once. `slots` and `texts` have an item for each
        command.

        Return the indexes of the commands that did not get an integer reply.
        """
        if self.outdated:
            yield from self._refresh()
        groups: dict[Shard | None, list[int]] = defaultdict(list)
        for i, slot in enumerate(slots):
            groups[self.slots.shard(slot)].append(i)
        left = groups.pop(None, [])
        outcomes = yield Round(
            [
                NodeRequest(shard.primary, ask_lines([texts[i] for i in group]))
                for shard, group in groups.items()
                if shard
            ]
        )
        for group, lines in zip(groups.values(), outcomes, strict=True):
            if isinstance(lines, Failed):
                left += group
            else:
                left += [i for i, line in zip(group, lines, strict=True) if line[:1] != b":"]
        return left

    # -- nodes -------------------------------------------------------------------------------------------------------

    def home(self, key: bytes) -> Plan[Node]:
        """Return the node that serves the slot of a key. Raises Refused if no node serves it."""
        if self.outdated:
            yield from self._refresh()
        shard = self.slots.shard(slot_of(key))
        if shard is None:
            self.outdated = True
            raise Refused(f"CLUSTERDOWN nobody serves slot {slot_of(key)}")
        return shard.primary

    def strayed(self, error: PageClientError) -> bool:
        """Mark the map of slots as outdated after an error of a transaction. Return whether the caller should try
        again.

        It should if the cluster is changing, if the map was outdated, or if the node did not answer.
        """
        if not isinstance(error, Refused):
            self.outdated = True
            return not isinstance(error, WrongReply)
        self.outdated = True
        return error.code in _AGAIN | {"MOVED", "ASK"}

    def primaries(self) -> Plan[list[Node]]:
        if self.outdated:
            yield from self._refresh()
        return self.slots.primaries()

    # -- the map -----------------------------------------------------------------------------------------------------

    def _refresh(self) -> Generator[Round, list[Any], None]:
        """Replace the map of slots: ask the nodes in turn until one returns a map with nodes. If none does, keep the
        old map.

        With an old map, do nothing if a refresh has begun a moment ago: while a node fails, all calls for it ask for a
        new map, and to answer costs the other nodes more than a read. Without an old map, raises the last error reply,
        for example that of a server without cluster mode, or otherwise the last error.
        """
        if self.slots.nodes() and time.monotonic() < self._next_refresh:
            return
        self._next_refresh = time.monotonic() + _REFRESH_SECONDS
        error: PageClientError = Disconnected("the cluster's URL names no node")
        for node in dict.fromkeys([*self.slots.nodes(), *self.address.seeds]):
            [outcome] = yield Round([NodeRequest(node, ask_slots(node))])
            if not isinstance(outcome, Failed) and outcome.nodes():
                self.slots, self.outdated = outcome, False
                return
            if not isinstance(outcome, Failed):
                error = Refused(f"CLUSTERDOWN nobody serves slots, says {node}")
            elif isinstance(outcome.error, Refused) and outcome.error.code not in _AGAIN:
                error = Refused(f"{outcome.error} (asked {node} which slots the nodes of the cluster serve)")
            elif not isinstance(error, Refused):
                error = outcome.error
        if not self.slots.nodes():
            raise error.again()


def _node_request(commands: Sequence[Command], group: Sequence[int], to: tuple[Node, bool, bool]) -> NodeRequest:
    node, asking, replica = to
    return NodeRequest(node, ask([commands[i] for i in group], asking=asking), replica)
