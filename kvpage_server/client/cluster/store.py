"""The store of a URL that names more than one server: the client's methods on a cluster, and the connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter
from typing import Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
from typing_extensions import Buffer

from kvpage_server.client.calls import Calls, count_misses, count_sent
from kvpage_server.client.cluster import commands
from kvpage_server.client.cluster.commands import Command, Router, Scattered, Write, block_key, block_writes, simple
from kvpage_server.client.cluster.nodes import SILENCE, Peers
from kvpage_server.client.cluster.plan import GONE, TOGETHER, Failed, Plan, lengths, timed
from kvpage_server.client.cluster.side_by_side import Rendezvous, SideBySideCalls, lists_several, servers_of
from kvpage_server.client.cluster.topology import SCHEMES, Address, Node
from kvpage_server.client.errors import PageClientError, Refused, Unsupported, WrongReply
from kvpage_server.client.page import (
    BlockBody,
    BlockName,
    Page,
    StateName,
    check_block_sizes,
    check_names,
    header_of,
    mismatch,
    pages_of_block,
    places,
    sized,
    sized_blocks,
)
from kvpage_server.client.raw_commands import BlockCommands, Kept, RawCommand, integer, up_to
from kvpage_server.client.wire.connection import Deadline, PagePool, PageTCPConnection, PageTLSConnection, check_options
from kvpage_server.client.wire.reply import ARRIVED, OTHER_SIZE, Answer, Place
from kvpage_server.page import HEADER_SIZE, BlockShape, PageHeader, PageKey, unix_ms

# -- calls -------------------------------------------------------------------------------------------------------------
#
# The client's methods on a cluster, as plans.
#
# A block is one string. A page that is written by itself is a string, too. A write of a page deletes the block that the
# page would belong to, a write of a block deletes its pages that were written one by one, and reads prefer the block.
# So a read finds the last written value, or nothing.

_ENCODED = 4096  # commands that are sent together, at most, if they are encoded without a Python object for each


def _memory(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data


class StringCommands(BlockCommands):
    """Commands about blocks, for a cluster that stores them as strings."""

    @staticmethod
    def exists(name: BlockName) -> RawCommand:
        return RawCommand(["EXISTS", block_key(name)], up_to(1))

    @staticmethod
    def delete(req_id: bytes, pages: Sequence[int]) -> RawCommand:
        return RawCommand(["UNLINK", *(block_key((req_id, page)) for page in pages)], integer)


@dataclass
class ClusterCalls:
    """The methods of a client on a cluster, as plans. `misses` counts misses by reason."""

    router: Router
    verify: bool
    misses: Counter[str]
    words: ClassVar[type[BlockCommands]] = StringCommands

    # -- pages -------------------------------------------------------------------------------------------------------

    @timed
    def mset(self, end: Deadline, pages: Sequence[Page], ttl: int) -> Plan[None]:
        bodies, created = sized(pages, ttl).bodies, unix_ms()
        written = [commands.set_page(page, ttl, created) for page in pages]
        yield from self.put_pages(written, [(page.key.req_id, page.key.page) for page in pages])(end)
        count_sent(bodies.sizes)

    @timed
    def put_pages(self, end: Deadline, written: Sequence[Command], names: Sequence[BlockName]) -> Plan[None]:
        """Run commands that write single pages of the blocks `names`, then delete the strings of these blocks."""
        yield from self.write(written)(end)
        blocks = map(block_key, dict.fromkeys(names))
        yield from self._integers([simple(b"UNLINK", key, writes=True) for key in blocks], end)

    @timed
    def mget_into(self, end: Deadline, keys: Sequence[PageKey], buffers: Sequence[Buffer]) -> Plan[list[bool]]:
        into = places(buffers, len(keys)).views()
        rooms = [Place(_memory(HEADER_SIZE), body) for body in into]
        missed = yield from self._read_pages(keys, rooms, end)
        return self._hits(missed, rooms)

    @timed
    def mget(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[Page | None]]:
        sizes, shapes = yield from self._with_shapes(keys, [simple(b"STRLEN", bytes(key)) for key in keys], end)
        rooms = []
        for key, size in zip(keys, sizes, strict=True):
            ranges = _ranges(key, shapes)
            nbytes = ranges[1][1] + 1 - ranges[1][0] if ranges else size - HEADER_SIZE if isinstance(size, int) else 0
            rooms.append(Place(_memory(HEADER_SIZE), _memory(max(nbytes, 0))))
        missed = yield from self._read_pages(keys, rooms, end, shapes)
        self._hits(missed, rooms)
        found: list[Page | None] = []
        for key, room, reason in zip(keys, rooms, missed, strict=True):
            if reason:
                found.append(None)
                continue
            header = PageHeader.parse(room.head)
            found.append(Page(key, room.body, header.dtype, header.page_size, header.head_dim))
        return found

    @timed
    def mexists(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[bool]]:
        """Return for each page whether it exists."""
        return [is_page or in_block for is_page, in_block in (yield from self._existence(keys, end))]

    @timed
    def taken(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[list[bool]]:
        """Return for each page whether its key has a value, even one that is not a page, or the page is in a stored
        block.
        """
        found = yield from self._with_blocks(keys, [simple(b"EXISTS", bytes(key)) for key in keys], end)
        return [in_block or answer == 1 for answer, in_block in found]

    @timed
    def delete(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[int]:
        """Delete the values of keys. A block that contains one of these pages is deleted as a whole. Return the number
        of the named pages that existed.
        """
        keys = list(dict.fromkeys(keys))
        found = yield from self._existence(keys, end)
        yield from self._unlink(keys, [in_block for _, in_block in found], end)
        return sum(is_page or in_block for is_page, in_block in found)

    @timed
    def unlink(self, end: Deadline, keys: Sequence[PageKey]) -> Plan[int]:
        """Delete as `delete`. Return the number of the named keys that had a value, as `taken`."""
        keys = list(dict.fromkeys(keys))
        found = yield from self._with_blocks(keys, [simple(b"EXISTS", bytes(key)) for key in keys], end)
        yield from self._unlink(keys, [in_block for _, in_block in found], end)
        return sum(in_block or answer == 1 for answer, in_block in found)

    @timed
    def delete_request(self, end: Deadline, req_id: bytes, pages: Sequence[int]) -> Plan[int]:
        """Delete the blocks of a request with these page ids. Return the number of their pages. Raises Unsupported
        without page ids.

        Only blocks that were stored whole are deleted.
        """
        names = _named(req_id, pages)
        shapes = _shapes(names, (yield from self.router.ask([commands.get_opening(name) for name in names], end)))
        gone = yield from self._integers([simple(b"UNLINK", block_key(name), writes=True) for name in names], end)
        return sum(shapes[name].pages for name, count in zip(names, gone, strict=True) if count and name in shapes)

    # -- blocks ------------------------------------------------------------------------------------------------------

    @timed
    def mset_blocks(
        self, end: Deadline, names: Sequence[BlockName], shape: BlockShape, bodies: Sequence[BlockBody], ttl: int
    ) -> Plan[None]:
        found, created = sized_blocks(names, shape, bodies, ttl), unix_ms()
        written = [
            one
            for name, body in zip(names, found, strict=True)
            for one in block_writes(name, shape, commands.whole_pages(shape, body), ttl, created)
        ]
        yield from self.write(written)(end)
        count_sent(lambda: [shape.nbytes] * len(found))

    @timed
    def fetch_blocks_into(
        self, end: Deadline, names: Sequence[BlockName], shape: BlockShape, buffers: Sequence[Buffer]
    ) -> Plan[list[str | None]]:
        """Receive blocks into buffers. If a block is absent, try to read its single pages.

        Return for each block the reason for its miss, or None if it was found.
        """
        check_names(names)
        into = places(buffers, len(names))
        check_block_sizes(into.sizes(), shape)
        before = commands.head_size(shape)
        rooms = [Place(_memory(before), body) for body in into.views()]
        answers = yield from self.router.ask(
            [commands.get_block(name, room) for name, room in zip(names, rooms, strict=True)], end
        )
        missed = [
            _reason(answer) or commands.mismatch(name[1], shape, room.head, room.body, verify=self.verify)
            for name, room, answer in zip(names, rooms, answers, strict=True)
        ]
        absent = [i for i, reason in enumerate(missed) if reason == "absent"]
        if absent:
            yield from self._blocks_of_pages(absent, missed, names, shape, rooms, end)
        self._hits(missed, rooms)
        return missed

    @timed
    def prefix(self, end: Deadline, names: Sequence[BlockName], pages_per_block: int, lease_ms: int) -> Plan[int]:
        """Return the number of blocks that were stored whole with `pages_per_block` pages, from the first name on.

        With `lease_ms`, the TTL of all named blocks is extended to at least that many milliseconds, also of blocks
        after the first absent one.
        """
        check_names(names)
        asked = [commands.get_opening(name) for name in names]
        leased = [_lease(name, lease_ms, at_primary=True) for name in names] if lease_ms else []
        answers = yield from self.router.ask([*asked, *leased], end)
        return _complete(names, _shapes(names, answers[: len(names)]), pages_per_block)

    lengths = lengths

    @timed
    def examine(
        self,
        end: Deadline,
        names: Sequence[BlockName],
        states: Sequence[StateName],
        pages_per_block: int,
        lease_ms: int,
    ) -> Plan[tuple[int, list[bool]]]:
        """Return as `Examines.examine`. A lease extends the TTL, and the block is read after it."""
        of_states = [(req_id, page) for req_id, page, _ in states]
        every = [*names, *of_states]
        leased = [_lease(name, lease_ms, at_primary=True) for name in every] if lease_ms else []
        opened = [commands.get_opening(name, at_primary=bool(lease_ms)) for name in every]
        answers = yield from self.router.ask([*leased, *opened], end)
        shapes = _shapes(every, answers[len(leased) :])
        for name, answer in zip(every, answers[: len(leased)], strict=False):
            if isinstance(answer, Failed):
                shapes.pop(name, None)
        return _complete(names, shapes, pages_per_block), [name in shapes for name in of_states]

    @timed
    def lease(self, end: Deadline, req_id: bytes, lease_ms: int, pages: Sequence[int]) -> Plan[int]:
        """Touch the blocks of a request with these page ids, and extend their TTL to at least `lease_ms` milliseconds.

        Return the number of these blocks that exist. Raises Unsupported without page ids.
        """
        names = _named(req_id, pages)
        touched = [simple(b"TOUCH", block_key(name), writes=True) for name in names]
        found = yield from self._integers([*touched, *(_lease(name, lease_ms, writes=True) for name in names)], end)
        return sum(found[: len(names)])

    @timed
    def keep(self, end: Deadline, keys: Sequence[bytes], seconds: int, tenant: str, tenants: int) -> Plan[Kept]:
        """Raise Unsupported."""
        yield from ()
        raise Unsupported("a cluster has its own eviction policy: it gives no value a lifetime")

    # -- anything else -----------------------------------------------------------------------------------------------

    @timed
    def write(self, end: Deadline, written: Sequence[Write]) -> Plan[None]:
        """Run commands that write. Their replies are OK or a count.

        Deletions of single pages run first. A command that was refused because its slot is being moved is replaced by
        one command for each key, which run last. Raises WrongReply for another reply, and as `Router.ask`.
        """
        yield from self._delete_scattered([one for one in written if isinstance(one, Scattered)], end)
        together, apart = [one for one in written if isinstance(one, Command)], []
        for one, answer in zip(together, (yield from self.router.ask(together, end)), strict=True):
            if isinstance(answer, Refused) and one.apart:
                apart.append(one.apart())
            elif answer != b"OK" and not isinstance(answer, int):
                raise WrongReply.instead_of("OK", answer)
        yield from self._singly(chain.from_iterable(apart), end)

    @timed
    def ask(self, end: Deadline, raw_commands: Sequence[RawCommand], again: bool) -> Plan[list[Any]]:
        """Send each command to the node that has its key. Return the decoded replies, with Failed for reads that no
        node answered.

        Without `again`, a command is not repeated if the node may have executed it. Raises Refused for an error reply.
        """
        return (
            yield from self.router.answers([commands.of_raw_command(one, once=not again) for one in raw_commands], end)
        )

    @timed
    def home(self, end: Deadline, key: bytes) -> Plan[Node]:
        """Return the node that has a key."""
        return (yield from self.router.home(key))

    @timed
    def nodes(self, end: Deadline) -> Plan[list[Node]]:
        """Return the nodes that have keys."""
        return (yield from self.router.primaries())

    def strayed(self, error: PageClientError) -> bool:
        return self.router.strayed(error)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _delete_scattered(self, scattered: Sequence[Scattered], end: Deadline) -> Plan[None]:
        """Delete single pages of blocks, of some blocks at a time. Redirected and failed commands are sent again one by
        one.
        """
        blocks, most = iter(scattered), max((one.shape.pages for one in scattered), default=1)
        while some := [*islice(blocks, max(_ENCODED // most, 1))]:
            encoded = [one.encode() for one in some]
            slots, texts = [*chain.from_iterable(s for s, _ in encoded)], [*chain.from_iterable(t for _, t in encoded)]
            left = yield from self.router.scatter(slots, texts)
            if left:
                asked = [*chain.from_iterable(one.singly() for one in some)]
                yield from self._singly((asked[i] for i in left), end)

    def _singly(self, asked: Iterator[Command], end: Deadline) -> Plan[None]:
        while some := [*islice(asked, TOGETHER)]:
            yield from self._integers(some, end)

    def _read_pages(
        self,
        keys: Sequence[PageKey],
        rooms: Sequence[Place],
        end: Deadline,
        shapes: dict[BlockName, BlockShape] | None = None,
    ) -> Plan[list[str | None]]:
        """Receive pages that are stored as strings, and pages that are in stored blocks, into `rooms`.

        Return for each page the reason for its miss, or None if it was found. `shapes` are the shapes of the pages'
        blocks if the caller has them already.
        """
        single = [
            Command(bytes(key), commands.simple(b"GET", bytes(key)).pieces, room)
            for key, room in zip(keys, rooms, strict=True)
        ]
        if shapes is None:
            answers, shapes = yield from self._with_shapes(keys, single, end)
        else:
            answers = yield from self.router.answers(single, end)
        missed = [_reason(answer) for answer in answers]
        in_blocks = {i: ranges for i, key in enumerate(keys) if (ranges := _ranges(key, shapes))}
        parts = []
        for i, (header, body) in in_blocks.items():
            key = block_key((keys[i].req_id, keys[i].page))
            for part, memory in ((header, rooms[i].head), (body, rooms[i].body)):
                parts.append(Command(key, commands.get_range(key, *part).pieces, Place(memory[:0], memory)))
        reasons = map(_reason, (yield from self.router.answers(parts, end)))
        for i, of_header, of_body in zip(in_blocks, reasons, reasons, strict=False):
            missed[i] = of_header or of_body
        return [
            reason or mismatch(header_of(key, room.head), room.body, verify=self.verify)
            for key, room, reason in zip(keys, rooms, missed, strict=True)
        ]

    def _blocks_of_pages(
        self,
        absent: Sequence[int],
        missed: list[str | None],
        names: Sequence[BlockName],
        shape: BlockShape,
        rooms: Sequence[Place],
        end: Deadline,
    ) -> Plan[None]:
        """Receive blocks that were written page by page. `absent` are the indexes of blocks that are not stored whole.

        Set `missed` to None for a complete block, otherwise to the reason for a miss. A block without its first page
        stays absent.
        """
        firsts = [next(key for key, *_ in pages_of_block(names[i], shape)) for i in absent]
        there = yield from self.router.answers([simple(b"EXISTS", bytes(key)) for key in firsts], end)
        for i, answer in zip(absent, there, strict=True):
            missed[i] = GONE if isinstance(answer, Failed) else missed[i]
        absent = [i for i, answer in zip(absent, there, strict=True) if answer == 1]
        pages = [(i, key, rooms[i].body[span]) for i in absent for key, _, span in pages_of_block(names[i], shape)]
        found = yield from self._read_pages(
            [key for _, key, _ in pages], [Place(_memory(HEADER_SIZE), body) for *_, body in pages], end, {}
        )
        for i in absent:
            missed[i] = None
        for (i, _, _), reason in zip(pages, found, strict=True):
            missed[i] = missed[i] or reason

    def _with_blocks(
        self, keys: Sequence[PageKey], asked: Sequence[Command], end: Deadline
    ) -> Plan[list[tuple[Answer | Failed, bool]]]:
        """Run the command of each page. Return for each page its reply, and whether the page is in a block that was
        stored whole.

        Raises as `_with_shapes`.
        """
        answers, shapes = yield from self._with_shapes(keys, asked, end)
        return [(answer, _ranges(key, shapes) is not None) for key, answer in zip(keys, answers, strict=True)]

    def _with_shapes(
        self, keys: Sequence[PageKey], asked: Sequence[Command], end: Deadline
    ) -> Plan[tuple[list[Answer | Failed], dict[BlockName, BlockShape]]]:
        """Run the command of each page. Return the replies, and the shapes of the pages' blocks that were found to
        exist.

        `asked` has a command for each of `keys`. A command whose node failed has a Failed as its reply; the shape of a
        block whose node failed is absent. Raises as `Router.ask`: if no command succeeded, or for an error reply.
        """
        names = list(dict.fromkeys((key.req_id, key.page) for key in keys))
        answers = yield from self.router.ask([*asked, *map(commands.get_opening, names)], end)
        return answers[: len(keys)], _shapes(names, answers[len(keys) :])

    def _existence(self, keys: Sequence[PageKey], end: Deadline) -> Plan[list[tuple[bool, bool]]]:
        """Return for each page whether it is stored by itself, and whether it is in a block that was stored whole."""
        alone = [commands.get_range(bytes(key), 0, HEADER_SIZE - 1) for key in keys]
        found = yield from self._with_blocks(keys, alone, end)
        return [
            (header_of(key, answer) is not None, in_block) for key, (answer, in_block) in zip(keys, found, strict=True)
        ]

    def _unlink(self, keys: Sequence[PageKey], in_blocks: Sequence[bool], end: Deadline) -> Plan[None]:
        """Delete the values of keys, and the blocks of those pages that are in blocks."""
        blocks = {block_key((key.req_id, key.page)) for key, in_block in zip(keys, in_blocks, strict=True) if in_block}
        gone = [simple(b"UNLINK", key, writes=True) for key in (*map(bytes, keys), *blocks)]
        yield from self._integers(gone, end)

    def _integers(self, asked: Sequence[Command], end: Deadline) -> Plan[list[int]]:
        return [integer(answer) for answer in (yield from self.router.ask(asked, end))]

    def _hits(self, missed: Sequence[str | None], rooms: Sequence[Place]) -> list[bool]:
        def found_bytes() -> Iterator[int]:
            return (room.body.nbytes for room, reason in zip(rooms, missed, strict=True) if reason is None)

        count_misses(self.misses, [reason for reason in missed if reason], found_bytes)
        return [reason is None for reason in missed]


def _named(req_id: bytes, pages: Sequence[int]) -> list[BlockName]:
    """Return the names of a request's blocks. Raises Unsupported without page ids."""
    names = [(req_id, page) for page in pages]
    check_names(names or [(req_id, 0)])
    if not names:
        raise Unsupported("a cluster does not know which blocks a request has: name their page ids")
    return names


def _lease(name: BlockName, lease_ms: int, **how: bool) -> Command:
    """Return the command that extends a block's TTL to `lease_ms` milliseconds. A longer TTL, or none, is not
    changed.
    """
    return simple(b"PEXPIRE", block_key(name), lease_ms, b"GT", **how)


def _reason(answer: Answer | Failed) -> str | None:
    """Return the reason for a miss from the reply to a read: None for a string that was received into its memory.

    Raises WrongReply for a reply that is neither a string nor null.
    """
    if answer is ARRIVED:
        return None
    if answer is None:
        return "absent"
    if answer is OTHER_SIZE:
        return "size"
    if isinstance(answer, Failed):
        return GONE
    raise WrongReply.instead_of("a string", answer)


def _shapes(names: Sequence[BlockName], answers: Sequence[Answer]) -> dict[BlockName, BlockShape]:
    """Return the shapes of the blocks for which `answers` has a valid opening, by name."""
    shapes = zip(names, map(commands.shape_of, answers), strict=True)
    return {name: shape for name, shape in shapes if shape is not None}


def _complete(names: Sequence[BlockName], shapes: dict[BlockName, BlockShape], pages_per_block: int) -> int:
    """Return the number of blocks with `pages_per_block` pages, from the first name on. `shapes` are by name."""
    for i, name in enumerate(names):
        if name not in shapes or shapes[name].pages != pages_per_block:
            return i
    return len(names)


def _ranges(key: PageKey, shapes: dict[BlockName, BlockShape]) -> tuple[tuple[int, int], tuple[int, int]] | None:
    return commands.ranges_of_page(key, shapes.get((key.req_id, key.page)))


PAUSE = 0.05  # seconds before a transaction is tried again


@dataclass(frozen=True)
class Several:
    """Servers that form one store: the client's methods as plans, and the connections to each server."""

    calls: ClusterCalls | SideBySideCalls
    peers: Peers

    def connections(self, node: Hashable) -> PagePool:
        """Return the pool of connections to a node. Raises Closed, or Disconnected if the node gets no requests for a
        while.
        """
        self.peers.check(node)
        return self.peers.pool(node, replica=False)

    @contextmanager
    def attempt(self, node: Hashable, end: Deadline) -> Iterator[None]:
        """Run the caller's ``with`` block, which uses a node, as one attempt of a transaction.

        An error is suppressed if the caller should try again. It is raised if a retry is useless, or if less than PAUSE
        seconds are left.
        """
        failure: PageClientError | None = None
        try:
            yield
        except PageClientError as error:
            failure = error
            if not self.calls.strayed(error) or end.seconds_left() <= PAUSE:
                raise
        finally:
            self.peers.remember(node, failure)
            del failure  # break the reference cycle: it has this frame in its traceback


def names_several(url: str) -> bool:
    """Return whether a URL names more than one server."""
    return urlsplit(url).scheme in SCHEMES or lists_several(url)


def several(url: str, verify: bool, options: dict[str, Any]) -> Several | None:
    """Return the store of a URL; None if the URL names a single server. `options` are those of `PageClient`.

    Raises ValueError for an invalid URL or option.
    """
    if not names_several(url):
        return None
    address = Address(url) if urlsplit(url).scheme in SCHEMES else None
    options = {**options, **(address.options if address else {})}  # the URL's options have priority, as in redis-py
    silence = options.pop("node_deadline", SILENCE)
    replicas = address is not None and options.pop("read_from_replicas", False)
    check_options(options, PageTCPConnection, PageTLSConnection)
    if address:
        peers = Peers(address.url, options, silence, address.seeds)
        return Several(ClusterCalls(Router(address, replicas), verify, Counter()), peers)
    servers = servers_of(url)
    calls = SideBySideCalls(Rendezvous(servers), Calls(connections=1, verify=verify))
    return Several(calls, Peers(attrgetter("url"), options, silence, servers))
