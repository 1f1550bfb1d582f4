"""What is checked before a command runs: rights, the client's state, a pause, room in memory."""

from __future__ import annotations

import asyncio
import logging

from kvpage_server.commands.access.user import Denial
from kvpage_server.commands.arguments import OUT_OF_MEMORY
from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.disk import Postponed, wait_for_room
from kvpage_server.commands.table.spec import Spec, meant, named
from kvpage_server.core import Command
from kvpage_server.resp.reply import ReplyError, Wait, bare
from kvpage_server.store.keyspace import OutOfMemory

log = logging.getLogger("kvpage")

_HTTP = (
    b"post",
    b"host:",
)  # how HTTP begins: a browser may have been tricked into sending commands


class Paused(Exception):
    """The command has to wait for the end of a CLIENT PAUSE."""


def is_unqueued(words: Command) -> bool:
    """Whether a command is run even after MULTI."""
    spec = named(words[0])
    return spec is not None and spec.unqueued


def queues(client: Client, spec: Spec) -> bool:
    """Whether the command is queued for EXEC."""
    return client.transaction is not None and not spec.unqueued


def admit(client: Client, spec: Spec) -> None:
    """Raises ReplyError if the command is not allowed in the client's state, Paused if it has to wait."""
    if (client.channels or client.patterns) and client.protocol == 2 and not spec.while_subscribed:
        raise ReplyError(
            f"ERR Can't execute '{spec.name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET "
            "are allowed in this context"
        )
    if client.transaction is not None and "no_multi" in spec.flags:
        raise ReplyError(f"ERR Command '{spec.name}' not allowed inside a transaction")
    server = client.server
    if server.pause is not None and server.is_paused and (not server.pause.only_writes or _writes(client, spec)):
        raise Paused


def check_rights(client: Client, spec: Spec, words: Command) -> None:
    """Raises ReplyError if the client has not authenticated, or its user lacks a right."""
    user = client.user
    if "no_auth" in spec.flags:
        return
    if user is None:
        raise ReplyError("NOAUTH Authentication required.")
    if user.unrestricted:
        return
    denial = user.denial(spec, words[spec.words :])
    if denial is not None:
        raise refused(client, denial)


def refused(client: Client, denial: Denial) -> ReplyError:
    """The error for a client that lacks a right. Adds it to the ACL log."""
    client.server.refuse(client, denial.kind, denial.what)
    return ReplyError(denial.message)


def takes_memory(client: Client, spec: Spec) -> bool:
    """Whether a command needs room: if it stores something, if it is queued, or if it is EXEC and runs such a one."""
    if client.transaction is None:
        return spec.stores
    if spec.runs_queued:
        return any(queued.stores for queued, _ in client.transaction.commands)
    return not spec.unqueued


def have_room(client: Client) -> None:
    """Make room in memory for what a command stores, now or in a transaction. Raises ReplyError, Postponed.

    Room is made before a command runs, so that nothing is evicted in the middle of a command or transaction. If a lot
    has to be evicted, other clients have their turn in between.
    """
    try:
        if not client.server.keyspace.memory.make_room():
            raise Postponed(Wait(asyncio.get_running_loop().call_soon))
    except OutOfMemory:
        if client.server.tiered is not None:
            wait_for_room(client.server.tiered)
        raise ReplyError(OUT_OF_MEMORY) from None


def rejected(client: Client, spec: Spec | None, words: Command, error: ReplyError) -> ReplyError:
    """The error as the reply to a command that was not run."""
    stats = client.server.stats
    stats.note_error(str(error))
    if spec is not None:
        stats.calls[spec.name].rejected += 1
    elif isinstance(words[0], bytes) and words[0].lower() in _HTTP:
        log.warning("%s speaks HTTP: its connection ends, the rest of it may be commands", client.address)
        client.connection.abort()
    wanted = meant(words)
    if wanted is not None and wanted.runs_queued:
        client.end_transaction()
        error = ReplyError(f"EXECABORT Transaction discarded because of: {str(error).removeprefix('ERR ')}")
    elif client.transaction is not None:
        client.transaction.refused = True
    end_caching(client, wanted)
    return bare(error)


def end_caching(client: Client, spec: Spec | None) -> None:
    """A command has run, or was refused: what CLIENT CACHING has said was for it, or for its transaction."""
    if client.tracking is not None and client.transaction is None and not (spec is not None and spec.keeps_caching):
        client.tracking.asked = False


def _writes(client: Client, spec: Spec) -> bool:
    """Whether the command changes the store; for EXEC, whether a queued command does."""
    if spec.runs_queued and client.transaction is not None:
        return any(spec.flags & {"write", "may_replicate"} for spec, _ in client.transaction.commands)
    return bool(spec.flags & {"write", "may_replicate"})
