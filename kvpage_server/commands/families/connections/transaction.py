"""The commands for transactions: commands are queued and executed together, unless a watched key has changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from kvpage_server.commands.arguments import plain_all
from kvpage_server.commands.context import Client, Transaction
from kvpage_server.commands.dispatch.run import run_queued
from kvpage_server.commands.families.pages.request import blocks_of, fit_one_step
from kvpage_server.commands.registry import command
from kvpage_server.commands.specs import WORDS_PER_STEP, Parts, Spec, derived_from, nothing
from kvpage_server.commands.steps import STEP, Steps, each, stepwise
from kvpage_server.core import Argument
from kvpage_server.core.pieces import Piece, borrowed_bytes
from kvpage_server.page import unix_ms
from kvpage_server.resp import NULL_ARRAY, OK, Reply, ReplyError, Stream, Wait
from kvpage_server.store.contents import Contents

MOST_WATCHED = 8192  # keys that a client can watch


_transaction = partial(command, flags="noscript loading stale fast allow_busy unqueued", group="transactions")


@_transaction("multi", reply="OK", summary="Starts a transaction.")
def multi(client: Client, args: list[Argument]) -> Reply:
    """Begin a transaction, and return OK. The following commands are queued until EXEC or DISCARD."""
    if client.transaction is not None:
        raise ReplyError("ERR MULTI calls can not be nested")
    client.transaction = Transaction(client.user)
    client.update_fast_path()
    return OK


@_transaction(
    "exec",
    flags="noscript loading stale skip_slowlog unqueued runs_queued",
    since="1.2.0",
    complexity="that of the queued commands",
    reply="array | null",
    summary="Runs the queued commands.",
)
def exec_(client: Client, args: list[Argument]) -> Reply:
    """Execute the queued commands, and return the array of their replies; a null array if a watched key has changed. An
    error of one command does not stop the others.

    Each reply is encoded as its command ends: HELLO may change the protocol before the next command, and a streamed
    reply must be complete before the next command changes its data. All replies are in memory together: a reply beyond
    the memory limit of clients is an error, because the client would be closed for it.
    """
    transaction = client.transaction
    if transaction is None:
        raise ReplyError("ERR EXEC without MULTI")
    contents = client.keyspace.contents
    for key in client.watching:
        contents.find(key)  # an overdue key expires here, which changes it
    changed = client.watched_changed or 0 < client.watched_until <= unix_ms()
    client.end_transaction()
    if transaction.refused:
        raise ReplyError("EXECABORT Transaction discarded because of previous errors.")
    if changed:
        return NULL_ARRAY
    pieces: list[Piece] = [b"*%d\r\n" % len(transaction.commands)]
    most, held = client.server.config.client_memory, 0
    for spec, words in transaction.commands:
        reply = run_queued(client, spec, words, transaction.rights)
        size = borrowed_bytes(reply)
        if held + size > most > 0 and not spec.writes:
            reply = [_too_long(spec, held + size, most).line]
        else:
            held += size
        pieces += reply
    return tuple(pieces) if not contents.flushed else Stream(None, _after_freeing(contents, pieces), whole=True)


def _after_freeing(contents: Contents, pieces: list[Piece]) -> Iterator[Reply]:
    """Free the values that a FLUSHALL of the transaction has removed, in steps, and then yield EXEC's reply."""
    while contents.free_flushed():
        yield ()
    yield tuple(pieces)


def _too_long(spec: Spec, size: int, most: int) -> ReplyError:
    """Return the error in place of a reply with which the replies of a transaction would have `size` bytes, more than
    `most`.
    """
    return ReplyError(
        f"OOM with the reply of '{spec.name}' this transaction has {size} bytes to be read, maxmemory-clients allows "
        f"{most}: ask for less at a time"
    )


@_transaction(
    "discard", since="2.0.0", complexity="O(N) with N watched keys", reply="OK", summary="Discards the queued commands."
)
def discard(client: Client, args: list[Argument]) -> Reply:
    """Discard the queued commands, stop watching all keys, and return OK."""
    if client.transaction is None:
        raise ReplyError("ERR DISCARD without MULTI")
    client.end_transaction()
    return OK


@_transaction(
    "watch key [key ...]",
    keys=(1, -1, 1),
    needs=nothing,
    since="2.2.0",
    parts=Parts(),
    complexity="O(N) with N keys and blocks of watched requests",
    reply="OK",
    summary="Cancels the next transaction if one of these keys changes before it runs.",
)
def watch(client: Client, args: list[Argument]) -> Reply:
    """Make the next EXEC fail if one of the keys changes before it, and return OK.

    Expiry and eviction count as changes. `kv:{req}:index` and `kv:{req}:` change with every page of the request, even
    if the new page has the same bytes or its key existed.
    """
    if client.transaction is not None:
        raise ReplyError("ERR WATCH inside MULTI is not allowed")
    keys = plain_all(args)
    requests = [req_id for key in keys if (req_id := derived_from(key)) is not None]

    def steps() -> Steps[Reply]:
        while client.server.events.has_many_left:
            yield Wait(client.server.events.when_few_left)
        for req_id in requests:
            yield from blocks_of(client, req_id)  # overdue pages expire before they are watched
        yield from each(keys, lambda some: _watch(client, some))
        for req_id in requests:
            blocks = yield from blocks_of(client, req_id)
            due = [client.watched_until, *(block.soonest for block in blocks)]
            client.watched_until = min(filter(None, due), default=0)
        return OK

    index = client.keyspace.index
    is_small = (
        len(keys) <= WORDS_PER_STEP
        and not client.server.events.has_many_left
        and sum(map(index.count, requests)) <= STEP
        and all(fit_one_step(client, req_id) for req_id in requests)
    )
    return stepwise(steps(), small=is_small)


def _watch(client: Client, keys: Sequence[bytes]) -> Sequence[bytes]:
    """Watch some keys, and return them. Raises ReplyError for more than MOST_WATCHED keys of a client."""
    for key in keys:
        if len(client.watching) >= MOST_WATCHED:
            raise ReplyError(f"ERR a client watches at most {MOST_WATCHED} keys: EXEC looks at all of them")
        client.keyspace.contents.find(key)  # an overdue key expires before it is watched
        client.server.events.watch(client, key)
    return keys


@_transaction(
    "unwatch",
    flags="noscript loading stale fast allow_busy",
    since="2.2.0",
    complexity="O(N) with N watched keys",
    reply="OK",
    summary="Stops watching keys.",
)
def unwatch(client: Client, args: list[Argument]) -> Reply:
    """Stop watching all keys, and return OK. Changes so far do not make EXEC fail."""
    client.server.events.unwatch(client)
    return OK
