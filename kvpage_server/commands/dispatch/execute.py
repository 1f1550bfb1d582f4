"""From a client's words to a reply: find the command, check whether it may run, run or queue it."""

from __future__ import annotations

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.admission import (
    admit,
    check_rights,
    have_room,
    queues,
    rejected,
    takes_memory,
)
from kvpage_server.commands.dispatch.disk import prepare
from kvpage_server.commands.dispatch.parts import after_rights, are_many_rights, begin, freed_after
from kvpage_server.commands.dispatch.run import run, run_as_asked
from kvpage_server.commands.queued import MOST_QUEUED
from kvpage_server.commands.table.spec import AT_ONCE, BY_WORD, find
from kvpage_server.core import Command
from kvpage_server.resp.reply import Reply, ReplyError


def execute(client: Client, words: Command) -> Reply:
    """The reply to one command; errors are replies, too. Raises Paused and Postponed if it has to wait."""
    spec = None
    try:
        count = len(words)
        spec = BY_WORD.get(words[0])
        if spec is None or count != spec.arity:
            spec = find(words)
        if count > AT_ONCE and not (queues(client, spec) and count <= MOST_QUEUED):
            return begin(client, spec, words)
        client.last_command = spec.name
        server = client.server
        stores = spec.stores
        if not client.free:
            if server.instead is not None:
                spec = server.instead(client, spec, words)
            if are_many_rights(client, words):
                return after_rights(client, spec, words)
            check_rights(client, spec, words)
            admit(client, spec)
            stores = takes_memory(client, spec)
        if stores and server.keyspace.memory.is_full:
            have_room(client)
        if client.transaction is not None and queues(client, spec):
            return client.transaction.queue(spec, words)
        if server.tiered is not None:
            prepare(client, server.tiered, spec, words)
    except ReplyError as error:
        reply = rejected(client, spec, words, error)
        return reply if len(words) <= AT_ONCE else freed_after(reply, words)
    return run(client, spec, words) if client.free else run_as_asked(client, spec, words)
