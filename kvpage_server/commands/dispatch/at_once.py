"""Commands that the core calls by itself, one after another: those that need no decision, of clients that are free."""

from __future__ import annotations

from functools import cache

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.disk import is_at_hand
from kvpage_server.commands.dispatch.run import in_steps, told
from kvpage_server.commands.dispatch.shown import note_slow
from kvpage_server.commands.index_key import TAIL, names_index
from kvpage_server.commands.table.spec import AT_ONCE, BY_WORD, SUBCOMMANDS, Spec
from kvpage_server.core import Argument, Callee, Caller, Command, Parser
from kvpage_server.resp.reply import Reply, Stream


def caller_of(client: Client, parser: Parser) -> Caller:
    """What calls them. Whoever uses it sees to it that nobody monitors."""
    return Caller(client, parser, _rows(), _may_run, note_slow)


def came_of(client: Client, spec: Spec, words: Command, reply: Reply, error: Exception | None) -> Reply:
    """The reply to a command that was called and handed back. Raises Postponed."""
    if error is None:
        return in_steps(client, spec, reply) if type(reply) is Stream else reply
    return told(client, spec, words, error)


@cache
def _rows() -> dict[Argument, Callee]:
    """What the core calls for the words that clients send."""
    return {word: _row(spec) for word, spec in BY_WORD.items() if spec.name not in SUBCOMMANDS and not spec.runs_queued}


def _row(spec: Spec) -> Callee:
    most = spec.arity if spec.arity > 0 else AT_ONCE
    written = spec.keys[0] if spec.writes_keys and not spec.writes_several else 0
    asks = spec.stores or spec.writes_keys
    return Callee(spec, spec.name, spec.handler, abs(spec.arity), most, asks, written, TAIL)


def _may_run(client: Client, spec: Spec, words: Command) -> bool:
    """Whether a command needs no decision, and waits for nothing. Its row says when this is asked."""
    tiered = client.server.tiered
    if spec.stores and client.keyspace.memory.is_full:
        return False
    if tiered is not None and not is_at_hand(client, tiered, spec):
        return False
    return not (spec.writes_several and names_index(spec, words))
