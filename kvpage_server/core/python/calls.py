"""The fast path: calls of complete commands, one after another, until one needs a decision of the session.

A table has a row for each command that the core may call, with its function and the number of its words. Before the
call of a row with `asks`, a callback decides whether the core may make it. The core returns a command that it does not
call to the session, and also a reply that it cannot encode (`_is_plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

from kvpage_server.core.pieces import Piece, borrowed_bytes
from kvpage_server.core.python.bodies import SEND_BYTES
from kvpage_server.core.python.frames import Command, Parser

PLAIN_REPLY_PIECES = 4  # pieces that a plain reply may have


class Callee(NamedTuple):
    """Row of the fast path: the function for a command's name."""

    spec: Any  # the caller's object for the command; the core passes it to the callbacks
    name: str  # key of the command's statistics
    function: Callable[[Any, Any], Any]  # called with the client and the words after the first
    fewest: int  # words that the command may have, its name included
    most: int
    asks: bool  # whether `may_run` is called before each call
    place: int = 0  # index of a word that must not end in `ending`; 0 for none
    ending: bytes = b""

    def is_refused(self, words: Command) -> bool:
        """Return whether the core may not make the call, because the word at `place` ends in `ending`."""
        word = words[self.place]
        return self.place > 0 and isinstance(word, bytes) and word.endswith(self.ending)


class CallAgain(Exception):
    """Base class of signals that a command waits, and is called once more then. Only the last call is counted."""


class CallingClient(Protocol):
    """The client that has sent the commands, as the core uses it."""

    fast_path_ok: bool  # whether its commands need no decision of the session; a command may change this
    protocol: int  # RESP 2 or 3
    last_command: str
    finished: int  # end of its last call, in monotonic nanoseconds


class Counts(Protocol):
    """The statistics of one command's calls."""

    nanoseconds: int  # the duration of all calls
    histogram: list[int]  # number of calls by duration: at index i, from 2**(i-1) to below 2**i nanoseconds


class Returned(NamedTuple):
    """The reason why the core stopped making calls, one of four:

    1. `words` without `row`: this command needs a decision of the session before it runs.
    2. `words` and `row`: this command has run, and the session has to process its result, `reply` or `error`.
    3. `left` is 0: no time is left, or the most calls were made.
    4. Otherwise: the replies borrow so much memory that they should be sent.
    """

    left: int  # calls that may still be made
    words: Command | None = None
    row: Callee | None = None
    reply: Any = None
    error: Exception | None = None  # raised instead of a result


class Caller:
    """The fast path of one client: it takes commands from `parser`, and calls the functions of `rows` by name.

    `may_run(client, spec, words)` returns whether the core may make the call. `note_slow(client, spec, words,
    nanoseconds)` is called after a slow call. `spec` is the field of the command's row.
    """

    def __init__(
        self,
        client: CallingClient,
        parser: Parser,
        rows: dict[Any, Callee],
        may_run: Callable[[Any, Any, Any], bool],
        note_slow: Callable[[Any, Any, Any, int], None],
    ) -> None:
        self._client, self._parser, self._rows = client, parser, rows
        self._may_run, self._note_slow = may_run, note_slow
        self._lent = 0  # bytes that `pieces` borrow because of replies that were added here

    def make(
        self,
        pieces: list[Piece],
        pushed: Sequence[Any],
        counts_of: Mapping[str, Counts],
        *,
        first: Command | None,
        ask: bool,
        slow_from: int,
        left: int,
        deadline: int,
    ) -> Returned | None:
        """Make up to `left` calls of complete commands, and append their replies to `pieces`.

        Return None if no complete command is left, otherwise the reason why the calls have stopped. `first` is a
        command that the session has already taken from the parser, or None. `pushed` is the session's list of push
        messages; the call that adds one is the last, because the message has to follow its reply. `counts_of` has the
        statistics by name. With `ask`, `may_run` is called for all rows, otherwise for rows with `asks`. `note_slow` is
        called for calls of at least `slow_from` nanoseconds. A call that ends after `deadline`, in monotonic
        nanoseconds, is the last one.
        """
        client, rows, words = self._client, self._rows, first
        if not pieces:
            self._lent = 0
        while left > 0 and self._lent < SEND_BYTES:
            if words is None:
                words = self._parser.next()
            if words is None:
                return None
            row = rows.get(words[0])
            if row is None or not row.fewest <= len(words) <= row.most or row.is_refused(words):
                return Returned(left, words)
            if (ask or row.asks) and not self._may_run(client, row.spec, words):
                return Returned(left, words)
            client.last_command = row.name
            left -= 1
            counts = counts_of[row.name]
            reply = error = None
            started = monotonic_ns()
            try:
                reply = row.function(client, words[1:])
            except Exception as raised:  # noqa: BLE001 - it is returned to the session
                error = raised
            client.finished = ended = monotonic_ns()
            took = ended - started
            counts.nanoseconds += took
            counts.histogram[took.bit_length()] += not isinstance(error, CallAgain)
            if took >= slow_from:
                self._note_slow(client, row.spec, words, took)
            if ended > deadline:
                left = 0
            if error is not None or pushed or not client.fast_path_ok or not _is_plain(reply):
                return Returned(left, words, row, reply, error)
            encoded = _encode_reply(reply, client.protocol)
            pieces += encoded
            self._lent += borrowed_bytes(encoded)
            words = None
        return None if self._parser.is_idle else Returned(left)


def _is_plain(reply: object) -> bool:
    """Return whether the fast path can encode a reply.

    It can encode bytes, None, an int, and a tuple of up to PLAIN_REPLY_PIECES pieces.
    """
    if type(reply) is tuple:
        return len(reply) <= PLAIN_REPLY_PIECES
    return isinstance(reply, bytes) or reply is None or type(reply) is int


def _encode_reply(reply: bytes | int | tuple[Piece, ...] | None, protocol: int) -> tuple[Piece, ...]:
    """Return a plain reply in wire format. A tuple, or an instance of a subclass of bytes, has that format already."""
    if isinstance(reply, tuple):
        return reply
    if reply is None:
        return (b"_\r\n" if protocol == 3 else b"$-1\r\n",)
    if isinstance(reply, int):
        return (b":%d\r\n" % reply,)
    return (b"$%d\r\n%b\r\n" % (len(reply), reply) if type(reply) is bytes else reply,)
