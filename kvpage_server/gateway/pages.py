"""The page family, as a gateway does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvpage_server.client.cluster.block_value import shape_of
from kvpage_server.client.cluster.commands import block_writes, get_opening
from kvpage_server.commands.arguments import check_batch, integer_in, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.families.pages.block import read_shape
from kvpage_server.commands.families.pages.page import AT_ONCE, new_pages, page_name
from kvpage_server.commands.families.pages.page_query import told_of
from kvpage_server.commands.families.pages.request import block_names, page_id, request_name
from kvpage_server.commands.steps import Steps, each
from kvpage_server.core import Argument, NewPages, Slot
from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage
from kvpage_server.gateway.overlap import Overlap
from kvpage_server.gateway.plans import NO_PAGE, Standing, Value
from kvpage_server.gateway.upstream import MOST, Upstream
from kvpage_server.gateway.words import set_page, spell
from kvpage_server.page import MAX_TTL, MAX_U32, PageError, PageKey, unix_ms
from kvpage_server.resp.reply import OK, Reply, ReplyError
from kvpage_server.store.eviction.leases import LONGEST_LEASE

T = TypeVar("T")


@dataclass(frozen=True)
class PagesBehind:
    """Each method takes a client and arguments, and returns the steps of the reply."""

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
        """All pages are checked before the first is written."""
        count = check_batch("KVPAGEMSET", args, PAGE_WORDS, "page")
        now, batches, read = unix_ms(), list[NewPages](), 0
        while read < count:
            try:
                batches.append(new_pages(client, args, 1 + read * PAGE_WORDS, AT_ONCE, now))
            except BadPage as error:
                raise ReplyError(f"ERR page {read + error.place + 1} of {count}: {error}") from None
            read += len(batches[-1])
            yield ()
        yield from self._put(batches)
        yield OK

    def kvpageget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [found] = yield from self.upstream.do(self.upstream.plans.pages([_key(args)]))
        yield spell(found)

    def kvpagemget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from _keys("KVPAGEMGET", args)
        yield from self.upstream.fetch(client, keys, self.upstream.plans.pages, _spell_page)

    def kvpageexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [there] = yield from self.upstream.do(self.upstream.plans.calls.mexists([_key(args)]))
        yield int(there)

    def kvpagemexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        keys = yield from _keys("KVPAGEMEXISTS", args)
        there = yield from self.upstream.each(keys, self.upstream.plans.calls.mexists)
        yield [*map(int, there)]

    def kvpagestat(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        """A cluster has no leases and pins."""
        found = yield from self.upstream.do(self.upstream.plans.standing(_key(args)))
        if not isinstance(found, Standing):
            yield spell(found)
            return
        left = {"ttl_left_ms": found.ttl_left_ms, "lease_left_ms": 0, "pinned": 0, "tier": "cluster"}
        yield told_of(found.header) | left

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
        check_batch("KVPAGEPREFIX", args[2:], 2, "block")
        names, found = (yield from each(args[3:], block_names, 2)), 0
        for some in _some(names):
            plan = self.upstream.plans.calls.prefix(some, pages_per_block, milliseconds)
            here = yield from self.upstream.do(plan)
            found += here
            if here < len(some):
                break
        yield found

    # -- blocks ------------------------------------------------------------------------------------------------------

    def kvblockset(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        name, ttl = (request_name(args[0]), page_id(args[1])), integer_in("ttl", args[5], 0, MAX_TTL)
        shape, body = read_shape(*plain_all([*args[2:5], *args[6:-1]])), args[-1]
        memory = body.body if isinstance(body, Slot) else memoryview(plain(body))
        if len(memory) != shape.nbytes:
            raise ReplyError(f"ERR body must be {shape.nbytes} bytes for this shape, got {len(memory)}")
        block = block_writes(name, shape, [memory], ttl, unix_ms())
        yield from self.overlap.write(client, name, len(memory), block)
        yield OK

    def kvblockget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [found] = yield from self.upstream.do(self.upstream.plans.blocks(block_names(args)))
        yield spell(found)

    def kvblockmget(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        check_batch("KVBLOCKMGET", args, 2, "block")
        names = yield from each(args[1:], block_names, 2)
        yield from self.upstream.fetch(client, names, self.upstream.plans.blocks, spell)

    def kvblockexists(self, client: Client, args: list[Argument]) -> Iterator[Reply]:
        [opening] = yield from self.upstream.do(self.upstream.plans.ask([get_opening(block_names(args)[0])]))
        yield int(isinstance(opening, memoryview) and shape_of(opening) is not None)

    # -- how ---------------------------------------------------------------------------------------------------------

    def _put(self, batches: Sequence[NewPages]) -> Steps[None]:
        for pages in batches:
            names = [pages.name(i) for i in range(len(pages))]
            written = [set_page(name.key, slot) for name, slot in zip(names, pages.slots, strict=True)]
            blocks = [(name.req_id, name.page) for name in names]
            yield from self.upstream.do(self.upstream.plans.calls.put_pages(written, blocks))


def _key(args: Sequence[Argument]) -> PageKey:
    name = page_name(args)
    return PageKey(name.req_id, name.layer, name.head, name.page, name.kv_type)


def _keys(command: str, args: Sequence[Argument]) -> Steps[list[PageKey]]:
    check_batch(command, args, NAME_WORDS, "page")
    return each(args[1:], lambda some: [_key(some[i:]) for i in range(0, len(some), NAME_WORDS)], NAME_WORDS)


def _spell_page(body: Value | None) -> Reply:
    """One of several: what is no page is as good as none."""
    return spell(None if body is NO_PAGE else body)


def _page_ids(args: Sequence[Argument]) -> list[int]:
    return [*map(page_id, args)]


def _some(items: list[T]) -> Iterator[list[T]]:
    """The items in batches, with an empty batch if there are none."""
    return (items[start : start + MOST] for start in range(0, len(items) or 1, MOST))
