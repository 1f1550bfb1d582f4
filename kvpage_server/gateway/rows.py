"""The commands of a gateway, a kvpage-server without a store that forwards commands to a Redis cluster: the rows of the
command table, with functions that call the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from kvpage_server.client import BlockName
from kvpage_server.client.cluster import commands as cluster
from kvpage_server.client.cluster.plan import Failed, Timed, carried_out, restorable_lengths
from kvpage_server.client.wire.exchange import Piece, word
from kvpage_server.client.wire.reply import Answer
from kvpage_server.commands.arguments import WRONG_TYPE, check_batch, integer_in, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import Postponed
from kvpage_server.commands.families.keys.value import checked_page
from kvpage_server.commands.families.pages.block import expected_shape, names_and_shape, read_shape
from kvpage_server.commands.families.pages.lease import checked_prefix, state_names
from kvpage_server.commands.families.pages.page import PAGES_PER_STEP, header_fields, new_pages, page_name
from kvpage_server.commands.families.pages.request import block_names, page_id, request_name
from kvpage_server.commands.specs import TABLE, Spec, nothing
from kvpage_server.commands.steps import IN_THREAD_FROM, Steps, each, in_thread
from kvpage_server.core import Argument, Command, NewPages, Slot
from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage
from kvpage_server.gateway.upstream import MOST, NO_PAGE, PageMetadata, Plans, Upstream, Value, wait_for
from kvpage_server.page import (
    FIELD_AT,
    HEADER_SIZE,
    MAX_TTL,
    MAX_U32,
    BlockShape,
    PageError,
    PageKey,
    page_named,
    unix_ms,
)
from kvpage_server.resp import OK, Reply, ReplyError, Stream, Wait, simple
from kvpage_server.store.eviction.leases import LONGEST_LEASE

# -- Conversion of clients' commands and of the cluster's replies, without copies of values ----------------------------

_TTL = slice(FIELD_AT["ttl"], FIELD_AT["ttl"] + 8)  # of the TTL in a page's header


@dataclass(frozen=True, slots=True)
class Borrowed:
    """Part of a reply: memory of a node's reply, which is sent without a copy."""

    view: memoryview

    @property
    def size(self) -> int:
        return len(self.view)


def bulk_reply(value: Value | None) -> Reply:
    """Return a value as a bulk string, null for None, and WRONGTYPE for NO_PAGE."""
    if value is None:
        return None
    if value is NO_PAGE:
        return ReplyError(WRONG_TYPE)
    return b"$%d\r\n" % sum(map(len, value)), *map(Borrowed, value), b"\r\n"


def reply_of(answer: Answer | Failed) -> Reply:
    """Convert a node's reply into a reply to the client. A read that no node answered is null."""
    if isinstance(answer, memoryview):
        return bulk_reply((answer,))
    if isinstance(answer, bytes):
        return simple(answer.decode("utf-8", "replace"))
    return None if isinstance(answer, Failed) else answer


def passed(words: Sequence[Argument], *, writes: bool) -> cluster.Command:
    """Return a command for the cluster with the client's words, unchanged. The second word is its key."""

    def pieces() -> Iterator[Piece]:
        yield b"*%d\r\n" % len(words)
        for one in words:
            if isinstance(one, Slot):
                yield b"$%d\r\n" % one.size
                yield one.body
                yield b"\r\n"
            else:
                yield word(one)

    return cluster.Command(plain(words[1]), pieces, writes=writes)


def set_page(key: bytes, slot: Slot) -> cluster.Command:
    """Return a SET command for the page whose header and body are in `slot`, memory of the arena. Its TTL is that of
    the header.
    """
    ttl = int.from_bytes(slot.header[_TTL], "little")
    opening, ending = cluster.around_value(key, HEADER_SIZE + slot.size, ttl)

    def pieces() -> Iterator[Piece]:
        yield opening + bytes(slot.header)
        yield slot.body
        yield ending

    return cluster.Command(key, pieces, writes=True)


# -- Overlapping writes of blocks --------------------------------------------------------------------------------------
#
# A client may send several KVBLOCKSET without waiting for the replies (a pipeline). Their blocks are written in
# batches: while one batch is sent to the cluster, the next blocks are received and become the next batch, which takes
# one round trip per node. The replies keep their order. Any other command waits until the client's earlier writes are
# done, so that it finds their values.

OVERLAP = frozenset({"kvblockset"})
_BLOCKS, _BYTES = 16, 64 * 1024**2  # limits of unfinished writes: blocks of one client, and bytes of all clients
_PAGES_AT_ONCE = 4096  # pages of a block whose commands are created on the loop
_CONCURRENT_BATCHES = 2  # of one client; single blocks of a failed batch are sent again in addition


_Block = tuple[list[cluster.Write], asyncio.Future[None]]  # the writes of a block, and a future of their completion


@dataclass(slots=True)
class _ClientWrites:
    """Unfinished writes of one client."""

    names: set[BlockName] = field(default_factory=set)  # all blocks that are not written yet
    next: list[_Block] = field(default_factory=list)  # the next batch
    batches_running: int = 0
    waiting: list[Callable[[], None]] = field(default_factory=list)  # callbacks of commands that wait for these writes

    def take(self) -> list[_Block]:
        """Remove and return the blocks of the next batch."""
        some, self.next = self.next, []
        return some


class Overlap:
    """The unfinished writes of blocks, by client."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._writes_of: dict[Client, _ClientWrites] = {}
        self._bytes = 0

    def check(self, client: Client, spec: Spec, words: Command) -> None:
        """Raise Postponed if a command must wait for unfinished writes of its client.

        KVBLOCKSET waits only for space, or for an earlier write of the same block.
        """
        writes = self._writes_of.get(client)
        if writes and not (
            spec.name in OVERLAP and self._has_space(writes) and writes.names.isdisjoint(_block_to_write(words))
        ):
            raise Postponed(Wait(writes.waiting.append))

    def _has_space(self, writes: _ClientWrites) -> bool:
        return len(writes.names) < _BLOCKS and self._bytes < _BYTES

    def write(
        self, client: Client, name: BlockName, shape: BlockShape, commands: Callable[[], list[cluster.Write]]
    ) -> Steps[None]:
        """Write a block with the commands that `commands()` returns. The steps end when it is written.

        A thread creates the commands for very many pages. Raises ReplyError if the cluster refuses it or fails.
        """
        writes = self._writes_of.setdefault(client, _ClientWrites())
        done = asyncio.get_running_loop().create_future()
        nbytes = shape.nbytes
        writes.names.add(name)
        self._bytes += nbytes
        client.keep(nbytes)
        try:
            block = commands() if shape.pages <= _PAGES_AT_ONCE else (yield from in_thread(commands))
            writes.next.append((block, done))
            if writes.batches_running < _CONCURRENT_BATCHES:
                self._send(writes, writes.take())
            yield from wait_for(done)
        finally:
            self._bytes -= nbytes
            client.keep(-nbytes)
            writes.names.discard(name)
            if not writes.names:
                del self._writes_of[client]
            waiting, writes.waiting = writes.waiting, []
            for then in waiting:
                then()

    def _send(self, writes: _ClientWrites, some: Sequence[_Block]) -> None:
        """Start to write a batch."""
        writes.batches_running += 1
        task = self._upstream.start(self._upstream.plans.calls.write([one for block, _ in some for one in block]))
        task.add_done_callback(partial(self._batch_done, writes, some))

    def _batch_done(self, writes: _ClientWrites, some: Sequence[_Block], task: asyncio.Task[None]) -> None:
        """End the steps of a batch's blocks, with the error if it failed, and start the next batch.

        If a batch of several blocks failed, each of them is written again alone, because one may have caused the error.
        """
        writes.batches_running -= 1
        if task.cancelled():
            return
        error = task.exception()
        if error and len(some) > 1:
            for one in some:
                self._send(writes, [one])
            return
        for _, done in some:
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)
        if writes.next:
            self._send(writes, writes.take())


def _block_to_write(words: Command) -> list[BlockName]:
    """Return the name of the block of a KVBLOCKSET, in a list. The list is empty if the name is invalid, because the
    command will be refused.
    """
    try:
        return block_names(words[1:3])
    except ReplyError:
        return []


# -- The commands of pages on a gateway --------------------------------------------------------------------------------

T = TypeVar("T")


@dataclass(frozen=True)
class PagesBehind:
    """The functions of page commands on a gateway. Each method has the name of its command.

    Each takes a client and the arguments, and returns the steps of the reply. They raise ReplyError.
    """

    upstream: Upstream
    overlap: Overlap

    # -- pages -------------------------------------------------------------------------------------------------------

    def kvpageset(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        try:
            page = new_pages(client, args, 0, 1, unix_ms())
        except PageError as error:
            raise ReplyError(f"ERR {error}") from None
        yield from self._put([page])
        yield OK

    def kvpagemset(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """Write pages. All of them are checked before the first one is written."""
        count = check_batch("KVPAGEMSET", args, PAGE_WORDS, "page")
        now, batches, read = unix_ms(), list[NewPages](), 0
        while read < count:
            try:
                batches.append(new_pages(client, args, 1 + read * PAGE_WORDS, PAGES_PER_STEP, now))
            except BadPage as error:
                raise ReplyError(f"ERR page {read + error.place + 1} of {count}: {error}") from None
            read += len(batches[-1])
            yield ()
        yield from self._put(batches)
        yield OK

    def kvpageget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [found] = yield from self.upstream.do(self.upstream.plans.pages([_key(args)]))
        yield bulk_reply(found)

    def kvpagemget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from _keys("KVPAGEMGET", args)
        yield from self.upstream.fetch(client, keys, self.upstream.plans.pages, _encode_page)

    def kvpageexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [there] = yield from self.upstream.do(self.upstream.plans.calls.mexists([_key(args)]))
        yield int(there)

    def kvpagemexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from _keys("KVPAGEMEXISTS", args)
        there = yield from self.upstream.each(keys, self.upstream.plans.calls.mexists)
        yield [*map(int, there)]

    def kvpagestat(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """Yield the header fields and the TTL of a page. Lease, pin, lifetime and coded size are 0: a cluster has none
        of them, and KVPAGELEASE extends the TTL instead.
        """
        found = yield from self.upstream.do(self.upstream.plans.metadata(_key(args)))
        if not isinstance(found, PageMetadata):
            yield bulk_reply(found)
            return
        left = {"ttl_left_ms": found.ttl_left_ms, "lease_left_ms": 0, "pinned": 0, "kept_until_ms": 0, "kept_by": b""}
        yield header_fields(found.header) | left | {"tier": "cluster", "coded_size": 0}

    # -- requests ----------------------------------------------------------------------------------------------------

    def kvpagedel(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        req_id, pages = request_name(args[0]), (yield from each(args[1:], _page_ids))
        removed = 0
        for some in _some(pages):
            removed += yield from self.upstream.do(self.upstream.plans.calls.delete_request(req_id, some))
        yield removed

    def kvpagelease(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        req_id, milliseconds = request_name(args[0]), integer_in("lease_ms", args[1], 1, LONGEST_LEASE)
        pages, leased = (yield from each(args[2:], _page_ids)), 0
        for some in _some(pages):
            leased += yield from self.upstream.do(self.upstream.plans.calls.lease(req_id, milliseconds, some))
        yield leased

    def kvpageprefix(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        pages_per_block = integer_in("pages_per_block", args[0], 1, MAX_U32)
        milliseconds = integer_in("lease_ms", args[1], 0, LONGEST_LEASE)
        blocks, of_states = checked_prefix(args)
        names = yield from each(args[3 : blocks.stop], block_names, 2)
        states = yield from each(args[of_states.start : of_states.stop], state_names, 3)
        if states:
            calls = self.upstream.plans.calls
            chunks = restorable_lengths(calls, names, states, pages_per_block, milliseconds)
            yield (yield from carried_out(chunks, self.upstream.do))
        else:
            yield (yield from self._prefix(names, pages_per_block, milliseconds))

    def _prefix(self, names: list[BlockName], pages_per_block: int, milliseconds: int) -> Steps[int]:
        """Count the complete blocks from the first name on, and lease them."""
        found = 0
        for some in _some(names):
            plan = self.upstream.plans.calls.prefix(some, pages_per_block, milliseconds)
            here = yield from self.upstream.do(plan)
            found += here
            if here < len(some):
                break
        return found

    # -- blocks ------------------------------------------------------------------------------------------------------

    def kvblockset(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        name, ttl = (request_name(args[0]), page_id(args[1])), integer_in("ttl", args[5], 0, MAX_TTL)
        shape, body = read_shape(*plain_all([*args[2:5], *args[6:-1]])), args[-1]
        memory = body.body if isinstance(body, Slot) else memoryview(plain(body))
        if len(memory) != shape.nbytes:
            raise ReplyError(f"ERR body must be {shape.nbytes} bytes for this shape, got {len(memory)}")
        commands = partial(cluster.block_writes, name, shape, [memory], ttl, unix_ms())
        yield from self.overlap.write(client, name, shape, commands)
        yield OK

    def kvblockget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        names, expected = block_names(args[:2]), expected_shape(args[2:])
        [found] = yield from self.upstream.do(self.upstream.plans.blocks(names, expected))
        yield bulk_reply(found)

    def kvblockmget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        words, expected = names_and_shape("KVBLOCKMGET", args)
        names = yield from each(words, block_names, 2)
        yield from self.upstream.fetch(
            client, names, lambda some: self.upstream.plans.blocks(some, expected), bulk_reply
        )

    def kvblockexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [opening] = yield from self.upstream.do(self.upstream.plans.ask([cluster.get_opening(block_names(args)[0])]))
        yield int(cluster.shape_of(opening) is not None)

    # -- writing -----------------------------------------------------------------------------------------------------

    def _put(self, batches: Sequence[NewPages]) -> Steps[None]:
        """Write pages, one batch after the other."""
        for pages in batches:
            names = [pages.name(i) for i in range(len(pages))]
            written = [set_page(name.key, slot) for name, slot in zip(names, pages.slots, strict=True)]
            blocks = [(name.req_id, name.page) for name in names]
            yield from self.upstream.do(self.upstream.plans.calls.put_pages(written, blocks))


def _key(args: Sequence[Argument]) -> PageKey:
    """Return the page key at the start of `args`: req_id, layer, head, page, type. Raises ReplyError."""
    name = page_name(args)
    return PageKey(name.req_id, name.layer, name.head, name.page, name.kv_type)


def _keys(command: str, args: Sequence[Argument]) -> Steps[list[PageKey]]:
    """Return the page keys of a batch command, in steps. `args` begins with their number. Raises ReplyError."""
    check_batch(command, args, NAME_WORDS, "page")
    return each(args[1:], lambda some: [_key(some[i:]) for i in range(0, len(some), NAME_WORDS)], NAME_WORDS)


def _encode_page(body: Value | None) -> Reply:
    """Return the reply for one of several pages: null if the string under the page's key is no page."""
    return bulk_reply(None if body is NO_PAGE else body)


def _page_ids(args: Sequence[Argument]) -> list[int]:
    return [*map(page_id, args)]


def _some(items: list[T]) -> Iterator[list[T]]:
    """Yield the items in batches of MOST, or one empty batch if there are none."""
    return (items[start : start + MOST] for start in range(0, len(items) or 1, MOST))


# -- strings -----------------------------------------------------------------------------------------------------------
#
# The commands of strings and keys on a gateway. The gateway's own client of the cluster sends a command again if its
# reply is lost, so only commands that can run twice without harm are supported.
#
# A page is a string of its own, or a part of a block's string. So commands on a page's key look for both, or are
# refused.

_SETS = frozenset({"set", "setex", "psetex"})
_OF_BLOCK = frozenset({"type", "ttl", "pttl", "expiretime", "pexpiretime"})  # a page in a block has its block's result
_OF_STRING = frozenset({"strlen", "getrange", "expire", "pexpire", "expireat", "pexpireat", "persist"})
PASSED = _SETS | _OF_BLOCK | _OF_STRING
SUMMED = {"del": b"UNLINK", "unlink": b"UNLINK", "exists": b"EXISTS", "touch": b"TOUCH"}  # they return a count of keys
_ONCE = frozenset({b"NX", b"XX", b"GET", b"IFEQ"})  # options with which SET cannot run twice


@dataclass(frozen=True)
class StringsBehind:
    """The functions of commands for strings and keys on a gateway.

    Each takes the command's row, a client and the arguments, and returns the steps of the reply. They raise ReplyError.
    """

    upstream: Upstream

    @property
    def _plans(self) -> Plans:
        return self.upstream.plans

    def get(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [value] = yield from self.upstream.do(self._plans.strings_and_pages([_named_strings(plain(args[0]))]))
        yield bulk_reply(value)

    def mget(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from each(args, lambda some: [*map(_named_strings, plain_all(some))])
        read = partial(self._plans.strings_and_pages, skips_types=True)
        yield from self.upstream.fetch(client, keys, read, bulk_reply)

    def counted(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """Yield the number of existing keys, or of deleted keys, for DEL, UNLINK, EXISTS and TOUCH.

        TOUCH of a page in a block touches the block.
        """
        word = SUMMED[spec.name]
        pages, others, seen = list[PageKey](), list[bytes](), set[bytes]()

        def sort(some: Sequence[Argument]) -> list[None]:
            for key in plain_all(some):
                if word == b"UNLINK" and key in seen:
                    continue
                seen.add(key)
                if page := page_named(key):
                    pages.append(page)
                else:
                    others.append(key)
            return []

        yield from each(args, sort)

        def ask(some: Sequence[bytes]) -> Timed[list[Answer | Failed]]:
            return self._plans.ask([cluster.simple(word, key, writes=spec.writes) for key in some])

        def touch(some: Sequence[PageKey]) -> Timed[list[Answer | Failed]]:
            return ask([*map(bytes, some), *{cluster.block_key((page.req_id, page.page)) for page in some}])

        if word == b"UNLINK" and 0 < len(pages) <= MOST:
            count = yield from self.upstream.do(self._plans.calls.unlink(pages))
        else:  # all pages are counted before the first one is deleted, because its block is deleted with it
            count = sum((yield from self.upstream.each(pages, self._plans.calls.taken)))
            if word == b"UNLINK":
                for some in _some(pages):
                    yield from self.upstream.do(self._plans.calls.unlink(some))
            elif word == b"TOUCH":
                yield from self.upstream.each(pages, touch)
        answers = yield from self.upstream.each(others, ask)
        yield count + sum(answer for answer in answers if isinstance(answer, int))

    def passed(self, spec: Spec, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """Send a command with one key to its node, unchanged.

        A page that is part of a block gets the block's TTL and type. Commands that would change a page in a block, or
        read a part of it, are refused.
        """
        if spec.name == "set" and _ONCE & {option.upper() for option in plain_all(args[2:])}:
            raise ReplyError(
                "ERR a gateway does not support SET with NX, XX, IFEQ or GET: "
                "when a node fails, it sends a command again"
            )
        page, words = page_named(plain(args[0])), [spec.name.upper().encode(), *args]
        if page and spec.name in _SETS:
            value = args[1 if spec.name == "set" else 2]
            check = partial(checked_page, client, bytes(page), value)
            if isinstance(value, Slot) and value.size >= IN_THREAD_FROM:
                yield from in_thread(check)
            else:
                check()
            written = [passed(words, writes=True)]
            yield from self.upstream.do(self._plans.calls.put_pages(written, [(page.req_id, page.page)]))
            yield OK
        elif page and spec.name in _OF_BLOCK:
            block = [words[0], cluster.block_key((page.req_id, page.page))]
            asked = [passed(some, writes=False) for some in (words, block)]
            alone, in_block = yield from self.upstream.do(self._plans.ask(asked))
            yield reply_of(in_block if alone in (-2, b"none") else alone)
        elif page and (yield from self.upstream.do(self._plans.in_block(page))):
            raise ReplyError(
                f"ERR '{spec.name}' of a page that lies in a block can't be done before a cluster: a block lives as one"
            )
        else:
            [answer] = yield from self.upstream.do(self._plans.ask([passed(words, writes=spec.writes)]))
            yield reply_of(answer)


def _named_strings(key: bytes) -> PageKey | bytes:
    """Return a key as PageKey if it is the key of a page, otherwise unchanged."""
    return page_named(key) or key


_Steps = Callable[[Client, list[Argument]], Iterator[Reply]]
_OF_THE_STORE = frozenset({"page", "map", "set", "string", "generic"})  # groups of commands about stored values
_ALSO = frozenset({"dbsize", "flushall", "flushdb", "client|tracking", "save", "bgsave", "kvdecode", "watch"})
_TRANSACTION = frozenset({"multi", "exec", "discard"})


class Rows:
    """The command table of a gateway: the override that the server calls for each command
    (`Server.command_override`).
    """

    def __init__(self, upstream: Upstream) -> None:
        self._overlap = Overlap(upstream)
        pages, strings = PagesBehind(upstream, self._overlap), StringsBehind(upstream)
        done: dict[str, _Steps] = {
            name: getattr(pages, name) for name in TABLE if TABLE[name].group == "page" and hasattr(pages, name)
        }
        for names, steps in (
            (("get",), strings.get),
            (("mget",), strings.mget),
            (SUMMED, strings.counted),
            (PASSED, strings.passed),
        ):
            done |= {name: partial(steps, TABLE[name]) for name in names if name in TABLE}
        self._rows = {name: _row(TABLE[name], steps) for name, steps in done.items()}

    def __call__(self, client: Client, spec: Spec, words: Command) -> Spec:
        """Return the gateway's row of the command with the server's row `spec`.

        Raises ReplyError for an unsupported command, Postponed for a command that waits for its client's writes.
        """
        self._overlap.check(client, spec, words)
        return self.row(spec)

    def row(self, spec: Spec) -> Spec:
        """Return the gateway's row of a command, whatever its client's writes are. Raises ReplyError if unsupported."""
        if spec.name in _TRANSACTION:
            raise ReplyError(
                f"ERR '{spec.name}': a gateway has no transactions, since each node of a cluster works by itself"
            )
        row = self._rows.get(spec.name)
        if row is None and (spec.group in _OF_THE_STORE or spec.keys[0] or spec.name in _ALSO):
            shown = spec.name.replace("|", " ")
            raise ReplyError(f"ERR a gateway does not support '{shown}': each node of a cluster has a part of the keys")
        return row or spec


def _row(spec: Spec, steps: _Steps) -> Spec:
    """Return the row of a command with a function that replies in `steps`.

    The command waits for the cluster, so it can't be part of a transaction. A write is completed even if its client
    disconnects. The body of a block is not hashed on arrival, because a cluster stores the digests of its pages.
    """
    overlaps = spec.name in OVERLAP

    def handler(client: Client, args: list[Argument]) -> Stream:
        return Stream(None, steps(client, args), whole=spec.writes, aside=overlaps)

    return replace(
        spec,
        handler=handler,
        flags=spec.flags | {"no_multi"},
        stores=False,
        hashed=spec.hashed and not overlaps,
        needs=nothing,
        preloads=False,
        parts=replace(spec.parts, joined="") if spec.parts else None,
    )
