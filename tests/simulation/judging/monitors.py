"""MONITOR: a monitoring client receives each executed command, in order, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvpage_server.commands.context import Client
from kvpage_server.commands.dispatch.run import shown
from kvpage_server.commands.specs import find
from kvpage_server.resp import NULL_ARRAY, QUEUED, ReplyError, Stream
from tests.simulation.acting.peers import Peer
from tests.simulation.model.model import Model, Words

_LINE = re.compile(rb"\d+\.\d{6} \[0 (.*?)\] (.*)", re.DOTALL)
_NOT_SHOWN = frozenset(("admin", "skip_monitor"))
_LONGEST = 1024  # bytes of a word that is shown
_SPELT = {b'"': b'\\"', b"\\": b"\\\\", b"\n": b"\\n", b"\r": b"\\r", b"\t": b"\\t", b"\a": b"\\a", b"\b": b"\\b"}


class Monitors:
    """Monitors of one process."""

    def __init__(self, model: Model, fail: Callable[[str], None]) -> None:
        self._model = model
        self._fail = fail

    def ran(self, client: Client, words: Words, queued: list[Words], reply: Any) -> None:
        """A command was run, or refused. `queued`: the commands that EXEC has run.

        The clients that monitor afterwards and have not switched their replies off are shown it.
        """
        there = [talk for talk in self._model.talks if talk.monitors and talk.silent >= 0 and not talk.gone]
        if not there or reply is QUEUED:
            return
        required = not isinstance(reply, ReplyError | Stream)  # or it may have been refused, maybe in steps
        commands = [(one, False) for one in queued if reply is not NULL_ARRAY]  # some of which may be refused
        commands.append((words, required))
        for command, is_shown in commands:
            try:
                spec = find(command)
            except ReplyError:
                continue
            if spec.flags & _NOT_SHOWN:
                continue
            text = b" ".join(map(_quoted, shown(spec, command, _LONGEST)))
            for talk in there:
                (talk.to_show if is_shown else talk.may_show).append((client.address.encode(), text))

    def is_shown(self, peer: Peer, reply: Any) -> bool:
        """Return whether a line shows the next executed command."""
        line = _LINE.fullmatch(reply) if type(reply) is bytes else None
        talk = peer.talk
        if line is None or not (talk.monitors or talk.to_show or talk.may_show):
            return False
        shown_line = line[1], line[2]
        if shown_line in [*talk.to_show][:1]:
            talk.to_show.popleft()
        elif shown_line in talk.may_show:
            talk.may_show.remove(shown_line)
        else:
            self._fail(
                f"peer {peer.number}, who monitors, was shown {shown_line!r:.300}, run was {[*talk.to_show][:1]!r:.300}"
            )
        return True


def _quoted(word: bytes) -> bytes:
    return b'"%b"' % b"".join(map(_spelt_byte, word))


def _spelt_byte(byte: int) -> bytes:
    one = bytes((byte,))
    return _SPELT.get(one) or (one if 0x20 <= byte < 0x7F else b"\\x%02x" % byte)
