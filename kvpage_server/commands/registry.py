"""The one command table. A row says all there is to know of a command; arity errors, COMMAND and the docs come from it.

A family's module declares its commands with the `command` decorator, next to what they do::

    @command("get", 2, "readonly fast", keys=(1, 1, 1), group="string", usage="key", summary="...")
    def get(client: Client, args: list[Argument]) -> Reply: ...

`usage` spells the arguments as Redis's documentation does: ``key value [NX | XX] [EX seconds]``, ``...`` for
repetition. A subcommand is a row of its own, named ``container|sub``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpage_server.commands.arguments import plain, shorten
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import Reply, ReplyError

if TYPE_CHECKING:
    from kvpage_server.commands.context import Client

Handler = Callable[["Client", list[Argument]], Reply]


@dataclass(frozen=True, slots=True)
class Spec:
    """A row of the table."""

    name: str
    arity: int  # words with the name; negative: at least that many
    flags: frozenset[str]  # Redis's command flags
    keys: tuple[int, int, int]  # first key, last key, step; zeros when it has none or they move
    group: str
    since: str
    usage: str
    summary: str
    handler: Handler
    parent: str  # the container of a subcommand, empty for a command

    @property
    def categories(self) -> list[str]:
        """ACL categories, in the spelling of ACL CAT."""
        named = {self.group} if self.group in _GROUP_CATEGORIES else set()
        named |= self.flags & {"admin", "dangerous", "blocking", "fast", "pubsub"}
        if "admin" in self.flags:
            named.add("dangerous")
        if "write" in self.flags:
            named.add("write")
        if "readonly" in self.flags:
            named.add("read")
        if "fast" not in self.flags:
            named.add("slow")
        return sorted(f"@{category}" for category in named)


_GROUP_CATEGORIES = {"page", "string", "keyspace", "connection", "transaction", "pubsub"}

TABLE: dict[str, Spec] = {}  # every command and subcommand by its lower-case name
BY_WORD: dict[bytes, Spec] = {}  # commands by the word a client sends, as often spelt
SUBCOMMANDS: dict[str, dict[bytes, Spec]] = {}  # by container, then by word


def command(
    name: str,
    arity: int,
    flags: str,
    *,
    group: str,
    summary: str,
    usage: str = "",
    keys: tuple[int, int, int] = (0, 0, 0),
    since: str = "1.0.0",
) -> Callable[[Handler], Handler]:
    """Enter a function into the table."""

    def enter(handler: Handler) -> Handler:
        parent, _, sub = name.rpartition("|")
        spec = Spec(name, arity, frozenset(flags.split()), keys, group, since, usage, summary, handler, parent)
        TABLE[name] = spec
        words = SUBCOMMANDS.setdefault(parent, {}) if parent else BY_WORD
        for word in (sub, sub.upper()):
            words[word.encode()] = spec
        return handler

    return enter


def container(name: str, *, group: str, summary: str) -> None:
    """Enter a command that only its subcommands give a meaning."""

    @command(name, -2, "", group=group, summary=summary, usage="subcommand [argument ...]")
    def refuse(client: Client, args: list[Argument]) -> Reply:
        raise AssertionError(f"{name} was called without one of its subcommands")


def find(words: Sequence[Argument]) -> Spec:
    """The row that a client's words call. Raises ReplyError for an unknown command or a wrong number of words."""
    word = words[0]
    spec = BY_WORD.get(word) if isinstance(word, bytes) else None  # the usual spellings need no folding
    if spec is None:
        spec = BY_WORD.get(plain(word).lower())
        if spec is None:
            raise ReplyError(_unknown(words))
    if spec.name in SUBCOMMANDS and len(words) > 1:
        spec = _find_sub(spec, plain(words[1]))
    count = len(words)
    if count != spec.arity and (spec.arity > 0 or count < -spec.arity):
        raise ReplyError(f"ERR wrong number of arguments for '{spec.name}' command")
    return spec


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
