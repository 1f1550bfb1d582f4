"""From a client's words to a reply: the command is found, what stands in its way is asked, then it runs."""

from __future__ import annotations

import logging

from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import Spec, find
from kvpage_server.resp.parser import Command
from kvpage_server.resp.reply import Reply, ReplyError

log = logging.getLogger("kvpage")


def execute(client: Client, words: Command) -> Reply:
    """The reply to one command. Errors are replies too: nothing is raised."""
    server = client.server
    server.stats.commands += 1
    try:
        spec = find(words)
        client.last_command = spec.name
        return run(client, spec, words)
    except ReplyError as error:
        server.stats.errors += 1
        return error
    except Exception:
        server.stats.errors += 1
        log.exception("%r failed; the connection goes on", words[0])
        return ReplyError("ERR internal error, the server's log says more")


def run(client: Client, spec: Spec, words: Command) -> Reply:
    """Run a command that was found and allowed."""
    return spec.handler(client, words[2 if spec.parent else 1 :])
