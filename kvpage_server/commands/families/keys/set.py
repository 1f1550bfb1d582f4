"""The set family, for index keys only: SMEMBERS, SCARD, SISMEMBER, SSCAN of `kv:{req}:index`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from kvpage_server.commands.arguments import SYNTAX_ERROR, WRONG_TYPE, plain, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.checks import refused
from kvpage_server.commands.families.keys.keyspace import MOST_SCANNED, scan_cursor, scan_options
from kvpage_server.commands.families.pages.request import blocks_of, fit_one_step, keys_in
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import nothing, request_of
from kvpage_server.commands.steps import Steps, stepwise
from kvpage_server.core import Argument
from kvpage_server.resp import Raw, Reply, ReplyError, Stream
from kvpage_server.store.memory.entry import is_page
from kvpage_server.store.memory.index import Block


def _request(client: Client, raw: Argument) -> bytes:
    """Return the request id in an index key; b"", which no request has, for another key without a value.

    Raises ReplyError (WRONGTYPE) for a key that has a value, and (NOPERM) if the user may not read all keys of the
    request, as the command would show these.
    """
    key = plain(raw)
    req_id = request_of(key)
    if client.user is not None and (denial := client.user.denial_of_index(client.last_command, key)):
        raise refused(client, denial)
    if req_id is None and client.keyspace.contents.find(key) is not None:
        raise ReplyError(WRONG_TYPE)
    return req_id or b""


_index = partial(command, flags="readonly fast", keys=(1, 1, 1), needs=nothing, group="set")


@_index(
    "smembers key",
    flags="readonly",
    complexity="O(N) with N pages",
    reply="set of bulk",
    summary="Returns the page keys of a request.",
)
def smembers(client: Client, args: list[Argument]) -> Reply:
    """Return the set of the request's page keys. It is collected in steps, and other clients are served in between."""
    req_id = _request(client, args[0])

    def steps() -> Iterator[Reply]:
        keys: list[bytes] = []
        for block in (yield from blocks_of(client, req_id)):
            for some in keys_in(block):
                keys += some
                yield ()
        yield Raw(b"%b%d\r\n" % (b"~" if client.protocol == 3 else b"*", len(keys)))
        yield from keys

    return Stream(None, steps())


@_index("scard key", complexity="O(N) with N blocks", reply="integer", summary="Counts the pages of a request.")
def scard(client: Client, args: list[Argument]) -> Reply:
    """Return the number of pages, 0 if there is no such request. They are those of one moment."""
    req_id, index = _request(client, args[0]), client.keyspace.index

    def steps() -> Steps[int]:
        yield from blocks_of(client, req_id)  # removes expired pages; blocks may be stored between two steps
        blocks = index.requests.get(req_id, {})  # FLUSHALL between two steps has replaced `requests`
        return sum(block.pages for block in blocks.values() if isinstance(block, Block))

    return stepwise(steps(), small=fit_one_step(client, req_id))


@_index("sismember key member", reply="integer", summary="Says whether a request has a page key.")
def sismember(client: Client, args: list[Argument]) -> Reply:
    """Return 1 if the request has a page with this key, else 0."""
    index, member = plain(args[0]), plain(args[1])
    if not client.keyspace.listing.has_pages(_request(client, index)):
        return 0
    of_request = member.startswith(index.removesuffix(b"index"))
    return int(of_request and is_page(client.keyspace.contents.find(member)))


@_index(
    "sscan key cursor [MATCH pattern] [COUNT count]",
    flags="readonly",
    since="2.8.0",
    complexity="O(N) with N pages returned",
    reply="array",
    summary="Returns some page keys of a request, and the cursor to go on with.",
)
def sscan(client: Client, args: list[Argument]) -> Reply:
    """Return the next cursor and the keys of some whole blocks, at least `count` keys. A cursor is a page id
    plus one.
    """
    start = scan_cursor(plain(args[1]))
    req_id, keyspace = _request(client, args[0]), client.keyspace
    if not keyspace.listing.has_pages(req_id):
        return [b"0", []]
    options = plain_all(args[2:])
    matches, count, _ = scan_options(options)
    if b"TYPE" in (word.upper() for word in options[::2]):
        raise ReplyError(SYNTAX_ERROR)

    def steps() -> Iterator[Reply]:
        cursor, seen, found = 0, 0, list[bytes]()
        for page in keyspace.index.pages_from(req_id, start - 1):
            if seen >= min(count, MOST_SCANNED):
                cursor = page + 1
                break
            block = keyspace.reader.block(req_id, page)
            for some in keys_in(block) if block is not None else ():
                seen += len(some)
                found += some if matches is None else filter(matches, some)
                yield ()
        yield Raw(b"*2\r\n")
        yield b"%d" % cursor
        yield Raw(b"*%d\r\n" % len(found))
        yield from found

    return Stream(None, steps())
