"""From a client's words to a reply: the command is found, what stands in its way is asked, it runs or is queued."""

from __future__ import annotations

import logging

from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import Spec, find
from kvpage_server.resp.parser import Command
from kvpage_server.resp.reply import Reply, ReplyError

log = logging.getLogger("kvpage")

_AT_ONCE = frozenset(("exec", "discard", "multi", "watch", "quit", "reset"))  # the others are queued after MULTI
_WHILE_SUBSCRIBED = frozenset(
    ("subscribe", "unsubscribe", "psubscribe", "punsubscribe", "ping", "quit", "reset")
)  # what RESP2 allows then: it cannot tell a reply from a message


def execute(client: Client, words: Command) -> Reply:
    """The reply to one command. Errors are replies too: nothing is raised."""
    try:
        spec = find(words)
        admit(client, spec, words)
    except ReplyError as error:
        client.server.stats.errors += 1
        if client.transaction is not None:
            client.transaction.refused = True
        return error
    client.last_command = spec.name
    if client.transaction is not None and spec.name not in _AT_ONCE:
        return client.transaction.queue(spec, words)
    return run(client, spec, words)


def admit(client: Client, spec: Spec, words: Command) -> None:
    """Raises ReplyError when the client may not call the command now."""
    if (client.channels or client.patterns) and client.protocol == 2 and spec.name not in _WHILE_SUBSCRIBED:
        raise ReplyError(
            f"ERR Can't execute '{spec.name}': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET "
            "are allowed in this context"
        )
    if client.transaction is not None and "no_multi" in spec.flags:
        raise ReplyError("ERR Command not allowed inside a transaction")


def run(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was admitted, now or by EXEC. Errors are replies too."""
    stats = client.server.stats
    stats.commands += 1
    try:
        return spec.handler(client, words[2 if spec.parent else 1 :])
    except ReplyError as error:
        stats.errors += 1
        return error
    except Exception:
        stats.errors += 1
        log.exception("%r failed; the connection goes on", words[0])
        return ReplyError("ERR internal error, the server's log says more")
