"""The command table. A row has everything there is to know about a command.

Arity errors, ACL checks, COMMAND and the docs are made from it. Everything that is done only for some commands is a
field of the row, too: nothing outside `families/` knows a command by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvpage_server.commands.arguments import plain, plain_all, shorten
from kvpage_server.commands.table.keys import Use, Uses, placed
from kvpage_server.commands.table.needs import Needs
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError

# Redis's categories, most of which have no command here, and the page family.
_CATEGORIES = """keyspace read write set sortedset list hash string bitmap hyperloglog geo stream pubsub admin fast slow
    blocking dangerous connection transaction scripting page"""
CATEGORIES = tuple(_CATEGORIES.split())
_FLAGS = """write readonly denyoom admin pubsub noscript blocking loading stale fast no_auth no_multi allow_busy
    no_async_loading skip_monitor skip_slowlog movablekeys may_replicate no_mandatory_keys"""
FLAGS = frozenset(_FLAGS.split())


AT_ONCE = 1024  # words of a command that is run at once; see `dispatch.parts`


@dataclass(frozen=True, slots=True)
class Parts:
    """How a command of very many words is divided. Each part has the `first` arguments, and some of the other items.

    `joined` says how the replies of the parts are joined: to their `sum`; to an `array` with `items` for each argument;
    not at all (`apart`); or only the `last` one counts. A command with an empty `joined` works in steps by itself and
    is run as a whole. Only its rights are checked part by part.
    """

    first: int = 0
    width: int = 1  # arguments of an item
    joined: str = ""
    items: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """A row of the table."""

    name: str
    arity: int  # words with the name; negative: at least that many
    most: int  # the most words of a subcommand, 0 for no limit
    parts: Parts | None  # how it is divided if it has more than AT_ONCE words; None if that is refused
    flags: frozenset[str]  # Redis's command flags
    stores: bool  # `denyoom`: it is refused when memory is full
    writes: bool  # `write`
    writes_keys: bool  # `write`, and the keys are at fixed positions
    writes_several: bool  # and there may be more than one
    categories: frozenset[str]  # ACL categories
    keys: tuple[int, int, int]  # first key, last key, step; the requests in the page family; zeros for no keys
    uses: Uses | None  # for keys made from several arguments, or used in a way that depends on them
    access: int  # READ, WRITE or both: what it does to its keys
    all_keys: bool  # it concerns every key, or something that only an administrator should see
    filtered: bool  # it shows and changes only what its user may see and change
    secret: bool  # its arguments are not shown to others
    hashed: bool  # its long words are bodies of pages, which are hashed as they arrive
    unqueued: bool  # it runs at once in a transaction; others wait for EXEC
    runs_queued: bool  # EXEC: it runs the queued commands
    while_subscribed: bool  # a RESP2 client may call it while it listens to channels
    keeps_caching: bool  # CLIENT CACHING then still holds for the next command
    needs: Needs  # what has to be in memory for it, if there is a disk
    fetches: bool  # it fetches what it needs while its reply is sent; in EXEC everything is fetched before
    waits: bool  # it needs something, and does not fetch it itself
    channels: str  # which arguments are pub/sub channels: "", "first", "all"; "patterns": all, as patterns
    group: str
    since: str
    usage: str
    summary: str
    complexity: str
    reply: str  # its shape, see `shape`; empty for a container
    tips: tuple[str, ...]  # Redis's command tips
    handler: Callable[[Any, list[Argument]], Reply]  # called with the client, whose type is not known here
    parent: str  # the container of a subcommand, empty for a command
    words: int  # of its name: 2 for a subcommand

    def fits(self, count: int) -> bool:
        """Whether it takes that many words, including its name."""
        return count == self.arity or 0 < -self.arity <= count

    def uses_of(self, args: Sequence[Argument]) -> Iterator[Use]:
        """The keys that its arguments name, and what it does to them."""
        if self.uses is not None:
            return self.uses(args, self.access)
        first, last, step = self.keys
        if not first:
            return iter(())
        before = self.words  # positions count the words of the name
        return placed(args, first - before, last - before if last >= 0 else last, step, self.access)

    def channels_of(self, args: Sequence[Argument]) -> list[bytes]:
        """The pub/sub channels, or patterns of channels, that its arguments name."""
        return plain_all(args[:1] if self.channels == "first" else args)


TABLE: dict[str, Spec] = {}  # every command and subcommand by its lower-case name
BY_WORD: dict[Argument, Spec] = {}  # commands by the word a client sends, in its usual spellings
SUBCOMMANDS: dict[str, dict[bytes, Spec]] = {}  # by container, then by word


def subcommands(name: str) -> list[Spec]:
    """The rows of a container's subcommands; none for anything else."""
    return list(dict.fromkeys(SUBCOMMANDS.get(name, {}).values()))


def top_level() -> list[Spec]:
    """Every row but the subcommands."""
    return [spec for spec in TABLE.values() if not spec.parent]


def named(word: Argument) -> Spec | None:
    """The row of a command by the word that a client sends."""
    return BY_WORD.get(word) or BY_WORD.get(plain(word).lower())  # the usual spellings need no folding


def meant(words: Sequence[Argument]) -> Spec | None:
    """The row that a client's words mean, even when there are too many or too few of them."""
    spec = named(words[0])
    if spec is None or len(words) == 1 or spec.name not in SUBCOMMANDS:
        return spec
    return SUBCOMMANDS[spec.name].get(plain(words[1]).lower())


def find(words: Sequence[Argument]) -> Spec:
    """The row for a client's words. Raises ReplyError for an unknown command or a wrong number of words."""
    spec = named(words[0])
    if spec is None:
        raise ReplyError(_unknown(words))
    if len(words) > 1 and spec.name in SUBCOMMANDS:
        spec = _find_sub(spec, plain(words[1]))
    if not spec.fits(len(words)):
        raise ReplyError(f"ERR wrong number of arguments for '{spec.name}' command")
    return spec


def too_many(spec: Spec, words: Sequence[Argument]) -> ReplyError:
    """The error for more words than `Spec.most`, worded as Redis does."""
    shown, container = shorten(plain(words[1]), 128), spec.parent.upper()
    return ReplyError(f"ERR unknown subcommand or wrong number of arguments for '{shown}'. Try {container} HELP.")


def _find_sub(spec: Spec, word: bytes) -> Spec:
    found = SUBCOMMANDS[spec.name].get(word.lower())
    if found is None:
        shown = shorten(word, 128)
        raise ReplyError(f"ERR unknown subcommand '{shown}'. Try {spec.name.upper()} HELP.")
    return found


def _unknown(words: Sequence[Argument]) -> str:
    """The error in Redis's words: the command and the first of its arguments."""
    shown, room = "", 128
    for word in words[1:]:
        if room <= 0:
            break
        shown += f"'{shorten(plain(word), room)}' "
        room = 128 - len(shown)
    return f"ERR unknown command '{shorten(plain(words[0]), 128)}', with args beginning with: {shown}"
