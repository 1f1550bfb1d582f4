"""Commands that the core calls by itself, one after another: those that need no decision, of clients that are free."""

from __future__ import annotations

from functools import cache
from typing import Protocol

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.disk import Postponed, is_at_hand
from kvpage_server.commands.dispatch.run import in_steps, told
from kvpage_server.commands.dispatch.shown import note_slow
from kvpage_server.commands.index_key import TAIL, names_index
from kvpage_server.commands.table.spec import AT_ONCE, BY_WORD, SUBCOMMANDS, Spec
from kvpage_server.core import Argument, Callee, Caller, Command, Parser
from kvpage_server.core.piece import Piece
from kvpage_server.resp.reply import Reply, Stream


class ReplyList(Protocol):
    """Where replies go. `pushed` are messages that are to follow the next one."""

    pieces: list[Piece]
    pushed: list[Reply]


class AtOnce:
    """Of one client. Whoever calls it sees to it that nobody monitors."""

    def __init__(self, client: Client, parser: Parser) -> None:
        self._client = client
        self._caller = Caller(client, parser, _rows(), _may_run, note_slow)

    def run(self, replies: ReplyList, left: int, deadline: int) -> tuple[int, Command | None, bool, Reply]:
        """Run up to `left` commands until a moment, and add their replies.

        What is left; the command that was not run, or the last that was; whether it was; and its reply, which is not
        added. Raises Postponed.
        """
        client = self._client
        client.unanswered = False
        left, words, row, reply, error = self._caller.make(
            replies.pieces,
            replies.pushed,
            client.server.stats.calls,
            ask=client.server.tiered is not None,
            slow_from=client.server.slow_from,
            left=left,
            deadline=deadline,
        )
        if row is not None and words is not None:
            if error is not None:
                reply = self._told(row.what, words, error)
            elif type(reply) is Stream:
                reply = in_steps(client, row.what, reply)
        return left, words, row is not None, reply

    def _told(self, spec: Spec, words: Command, error: Exception) -> Reply:
        try:
            return told(self._client, spec, words, error)
        except Postponed as postponed:
            postponed.command = words
            raise


@cache
def _rows() -> dict[Argument, Callee]:
    """What the core calls for the words that clients send."""
    return {word: _row(spec) for word, spec in BY_WORD.items() if spec.name not in SUBCOMMANDS and not spec.runs_queued}


def _row(spec: Spec) -> Callee:
    most = spec.arity if spec.arity > 0 else AT_ONCE
    written = spec.keys[0] if spec.writes_keys and not spec.writes_several else 0
    asks = spec.stores or spec.writes_several
    return Callee(spec, spec.name, spec.handler, abs(spec.arity), most, asks, written, TAIL)


def _may_run(client: Client, spec: Spec, words: Command) -> bool:
    """Whether a command needs no decision, and waits for nothing. Its row says when this is asked."""
    tiered = client.server.tiered
    if spec.stores and client.keyspace.memory.is_full:
        return False
    if tiered is not None and not is_at_hand(tiered, spec):
        return False
    return not (spec.writes_several and names_index(spec, words))
