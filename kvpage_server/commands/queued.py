"""The commands that a client has queued since MULTI."""

from __future__ import annotations

from kvpage_server.commands.table.spec import Spec
from kvpage_server.core import Command
from kvpage_server.core.protocol import WORD
from kvpage_server.resp.reply import QUEUED, Reply, ReplyError

MOST_QUEUED = 65_536  # words: EXEC runs them without a pause
_COMMAND = 192  # bytes of memory of a queued command beside its words


def too_much_queued() -> ReplyError:
    """The error for more than `MOST_QUEUED`."""
    return ReplyError(f"ERR a transaction takes at most {MOST_QUEUED} words: EXEC runs it without a pause")


class Transaction:
    """The commands queued since MULTI. Long arguments stay in the arena."""

    __slots__ = ("commands", "refused", "size", "words")

    def __init__(self) -> None:
        self.commands: list[tuple[Spec, Command]] = []
        self.refused = False  # a command could not be queued: EXEC will run none
        self.size = 0  # bytes of memory
        self.words = 0  # how many these are, with the commands' names

    def queue(self, spec: Spec, words: Command) -> Reply:
        self.words += len(words)
        if self.words > MOST_QUEUED:
            self.refused = True
            return too_much_queued()
        self.commands.append((spec, words))
        sizes = (len(word) if isinstance(word, bytes) else word.size for word in words)
        self.size += sum(sizes) + WORD * len(words) + _COMMAND
        return QUEUED
