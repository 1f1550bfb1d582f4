"""The fast path: calls of complete commands, one after another, until one needs a decision of the session.

The owner of the table defines the function and the number of words of each command. For a row with `asks`, it decides
before each call whether the core may make it. A command that the core does not call is returned to the session, and so
is a reply that `_is_plain` excludes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

from kvpage_server.core.pieces import Piece, lent
from kvpage_server.core.python.bodies import SEND_BYTES
from kvpage_server.core.python.frames import Command, Parser

PLAIN_REPLY_PIECES = 4  # pieces that a plain reply may have


class Callee(NamedTuple):
    """Row of the fast path: the function for a command's name."""

    what: Any  # the owner's object for the command
    name: str  # for statistics
    function: Callable[[Any, Any], Any]  # called with the client and the words after the first
    fewest: int  # words that the command may have, its name included
    most: int
    asks: bool  # whether `may_run` is called before each call
    place: int = 0  # index of a word that must not end in `ending`; 0 for none
    ending: bytes = b""

    def is_refused(self, words: Command) -> bool:
        """Return whether the word at `place` ends in `ending`."""
        word = words[self.place]
        return self.place > 0 and isinstance(word, bytes) and word.endswith(self.ending)


class CalledFor(Protocol):
    """The client that has sent the commands."""

    fast_path_ok: bool  # whether its commands need no decision; a command may change this
    protocol: int  # RESP 2 or 3
    last_command: str
    finished: int  # end of its last call, in monotonic nanoseconds


class Counts(Protocol):
    """Statistics of one row's calls."""

    nanoseconds: int  # the duration of all calls
    histogram: list[int]  # number of calls by duration: at index i, from 2**(i-1) to below 2**i nanoseconds


class Returned(NamedTuple):
    """The reason why the core stopped making calls, one of four.

    1. The next command needs a decision: it is in `words`, without a `row`. 2. The session has to process the result of
    a command: the command is in `words` and `row`, its result in `reply` or `error`. 3. No time is left: `left` is 0.
    4. Otherwise the replies borrow so much memory that they should be sent.
    """

    left: int  # calls that may still be made
    words: Command | None = None
    row: Callee | None = None
    reply: Any = None
    error: Exception | None = None  # raised instead of a result


class Caller:
    """Maker of the fast path's calls for one client.

    `may_run(client, what, words)` returns whether the core may make the call. `note_slow(client, what, words,
    nanoseconds)` is called after a slow call. `what` is the field of the command's row.
    """

    def __init__(
        self,
        client: CalledFor,
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
        """Make up to `left` calls of complete commands, and append their replies to `pieces`. Return None if no command
        is left.

        `first` is a command that the session has already taken from the parser, or None. `pushed` is the session's list
        of push messages, which have to follow the reply of the call that added them; a call that adds one is the last.
        `counts_of` has the statistics by name. With `ask`, `may_run` is called for all rows, otherwise for rows with
        `asks`. Calls of at least `slow_from` ns are passed to `note_slow`. A call that ends after `deadline`, in
        monotonic nanoseconds, is the last one.
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
            if (ask or row.asks) and not self._may_run(client, row.what, words):
                return Returned(left, words)
            client.last_command = row.name
            left -= 1
            counts = counts_of[row.name]
            reply = error = None
            started = monotonic_ns()
            try:
                reply = row.function(client, words[1:])
            except Exception as raised:  # noqa: BLE001 - the owner gets it
                error = raised
            client.finished = ended = monotonic_ns()
            took = ended - started
            counts.nanoseconds += took
            counts.histogram[took.bit_length()] += 1
            if took >= slow_from:
                self._note_slow(client, row.what, words, took)
            if ended > deadline:
                left = 0
            if error is not None or pushed or not client.fast_path_ok or not _is_plain(reply):
                return Returned(left, words, row, reply, error)
            encoded = _encode_reply(reply, client.protocol)
            pieces += encoded
            self._lent += lent(encoded)
            words = None
        return None if self._parser.is_idle else Returned(left)


def _is_plain(reply: object) -> bool:
    """Return whether the fast path can encode a reply: bytes, None, an int, or a tuple of up to PLAIN_REPLY_PIECES
    pieces.
    """
    if type(reply) is tuple:
        return len(reply) <= PLAIN_REPLY_PIECES
    return isinstance(reply, bytes) or reply is None or type(reply) is int


def _encode_reply(reply: bytes | int | tuple[Piece, ...] | None, protocol: int) -> tuple[Piece, ...]:
    """Return a plain reply in wire format. A tuple and a subclass of bytes have that format already."""
    if isinstance(reply, tuple):
        return reply
    if reply is None:
        return (b"_\r\n" if protocol == 3 else b"$-1\r\n",)
    if isinstance(reply, int):
        return (b":%d\r\n" % reply,)
    return (b"$%d\r\n%b\r\n" % (len(reply), reply) if type(reply) is bytes else reply,)
