"""MONITOR: who asks for it is shown each command that is run, in the order in which they are, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvpage_server.commands.context import Client
from kvpage_server.commands.table.spec import find
from kvpage_server.resp.reply import NULL_ARRAY, QUEUED, ReplyError, Stream
from tests.simulation.model import Conversation, Model, Words
from tests.simulation.peers import Peer

_LINE = re.compile(rb"(\d+)\.(\d{6}) \[0 (.*?)\] (.*)", re.DOTALL)
_NOT_SHOWN = frozenset(("admin", "skip_monitor"))
_ALL_OF_IT = 1000  # bytes of a command that is shown as it is
_SPELT = {b'"': b'\\"', b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\a": b"\\a", b"\b": b"\\b"}


class Monitors:
    """Of one process."""

    def __init__(self, model: Model, fail: Callable[[str], None]) -> None:
        self._model = model
        self._fail = fail

    @property
    def there(self) -> list[Conversation]:
        """Who is shown what is run now."""
        return [talk for talk in self._model.talks if talk.monitors and not talk.gone]

    def ran(self, there: list[Conversation], client: Client, words: Words, queued: list[Words], reply: Any) -> None:
        """A command was run, or refused, while those were there. `queued`: what it has run, as EXEC."""
        if not there or reply is QUEUED:
            return
        commands = [(words, not isinstance(reply, ReplyError | Stream))]  # or it may be refused in steps
        commands += [(one, False) for one in queued if reply is not NULL_ARRAY]  # some of which may be refused
        for said, was_run in commands:
            try:
                spec = find(said)
            except ReplyError:
                continue
            if spec.flags & _NOT_SHOWN:
                continue
            if spec.secret:
                said = said[: spec.words]
            is_whole = sum(map(len, said)) <= _ALL_OF_IT and not spec.secret
            spelt = b" ".join(map(_spelt, said if is_whole else said[:1]))
            for talk in there:
                talk.to_show.append((client.address.encode(), spelt, is_whole, was_run))

    def is_shown(self, peer: Peer, reply: Any) -> bool:
        """Whether that is a line of what was run, which has to be the next one."""
        line = _LINE.fullmatch(reply) if type(reply) is bytes else None
        if line is None or not (peer.talk.monitors or peer.talk.to_show):
            return False
        address, said = line[3], line[4]
        while peer.talk.to_show:
            theirs, spelt, is_whole, was_run = peer.talk.to_show.popleft()
            if theirs == address and (said == spelt if is_whole else said.startswith(spelt)):
                return True
            if was_run:
                self._fail(f"peer {peer.number}, who monitors, was shown {said!r:.200}, run was {spelt!r:.200}")
        self._fail(f"peer {peer.number}, who monitors, was shown {said!r:.200}, which was not run")
        return True

    @staticmethod
    def not_shown(talk: Conversation) -> bytes:
        """What is still to be shown to somebody, if anything is."""
        return next((spelt for _, spelt, _, was_run in talk.to_show if was_run), b"")


def _spelt(word: bytes) -> bytes:
    return b'"%b"' % b"".join(map(_spelt_byte, word))


def _spelt_byte(byte: int) -> bytes:
    one = bytes((byte,))
    return _SPELT.get(one) or (one if 0x20 <= byte < 0x7F else b"\\x%02x" % byte)
