"""The fast path: commands that have arrived are called one after another, as long as none needs a decision.

The table's owner defines the function and the number of words of each command. Before a call of a row that `asks` the
owner decides whether it is made. A command that is not called is handed back, and so is a reply that is not plain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import Any, NamedTuple, Protocol

from kvpage_server.core.pieces import Piece, lent
from kvpage_server.core.python.bodies import SEND_BYTES
from kvpage_server.core.python.frames import Argument, Command, Parser

FEW = 4  # pieces that a plain reply has at most


class Callee(NamedTuple):
    """Row of the fast path: the function for a command's word. `what` belongs to the owner."""

    what: Any
    name: str
    function: Callable[[Any, Any], Any]  # called with the client and the words after the first
    fewest: int  # words that it takes, with its own
    most: int
    asks: bool  # whether the owner is asked each time
    place: int = 0  # of a word that is not to end in `ending`
    ending: bytes = b""

    def is_refused(self, words: list[Argument]) -> bool:
        word = words[self.place]
        return self.place > 0 and isinstance(word, bytes) and word.endswith(self.ending)


class CalledFor(Protocol):
    """The client that is called for."""

    fast_path_ok: bool  # nothing about it has to be decided
    protocol: int
    last_command: str
    finished: int  # monotonic nanoseconds of its last call's end


class Counts(Protocol):
    """Statistics of one row's calls. `histogram[i]` counts calls of at least 2**(i-1) and below 2**i ns."""

    nanoseconds: int
    histogram: list[int]


class Returned(NamedTuple):
    """Why no more is called. `left`: calls that there was time for; 0 when that is over.

    Reason to return; without words and with time left, the replies borrow enough memory to be sent.
    """

    left: int
    words: Command | None = None  # of the next command, or of the called one
    row: Callee | None = None  # of the called command, if its result is here
    reply: Any = None
    error: Exception | None = None  # instead of a result


class Caller:
    """Caller of the fast path for one client. `may_run` gets the client, a row's `what` and the words; `note_slow` gets
    the time.
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
        self._lent = 0  # bytes that `pieces` borrow, as far as they were added here

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
        """Make up to `left` calls until a moment, and add their replies to `pieces`. None if no command is left.

        `first` is a command that was taken before. `pushed` has something when another message is to follow the reply.
        `ask` applies `may_run` to all rows; calls of at least `slow_from` ns are noted.
        """
        client, rows, words = self._client, self._rows, first
        if not pieces:
            self._lent = 0
        while left > 0 and self._lent < SEND_BYTES:
            if words is None:
                words = self._parser.next()
            if words is None:
                return None
            row = rows.get(words[0]) if type(words) is list else None
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
            spelt = _spelt(reply, client.protocol)
            pieces += spelt
            self._lent += lent(spelt)
            words = None
        return None if self._parser.is_idle else Returned(left)


def _is_plain(reply: object) -> bool:
    if type(reply) is tuple:
        return len(reply) <= FEW
    return isinstance(reply, bytes) or reply is None or type(reply) is int


def _spelt(reply: bytes | int | tuple[Piece, ...] | None, protocol: int) -> tuple[Piece, ...]:
    """Return a plain reply as it is sent. A tuple and a subclass of bytes are that already."""
    if isinstance(reply, tuple):
        return reply
    if reply is None:
        return (b"_\r\n" if protocol == 3 else b"$-1\r\n",)
    if isinstance(reply, int):
        return (b":%d\r\n" % reply,)
    return (b"$%d\r\n%b\r\n" % (len(reply), reply) if type(reply) is bytes else reply,)
