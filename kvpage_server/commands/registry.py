"""The one command table. A row says all there is to know of a command; arity errors, ACL checks, COMMAND and the docs
come from it.

A family's module declares its commands with the `command` decorator, next to what they do::

    @command("get", 2, "readonly fast", keys=(1, 1, 1), group="string", usage="key", summary="...")
    def get(client: Client, args: list[Argument]) -> Reply: ...

`usage` spells the arguments as Redis's documentation does: ``key value [NX | XX] [EX seconds]``, ``...`` for
repetition. A subcommand is a row of its own, named ``container|sub``.

The second words are Redis's command flags, and further ACL categories that the command belongs to. `allkeys` says that
it tells or changes something of every key, so it is for users who may use every key; administration is, too, unless it
is `filtered`: everybody is shown what is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpage_server.commands.arguments import plain, plain_all, shorten
from kvpage_server.commands.table.keys import READ, WRITE, Use, Uses, placed
from kvpage_server.commands.table.needs import Needs, everything, nothing
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError, simple

if TYPE_CHECKING:
    from kvpage_server.commands.context import Client

Handler = Callable[["Client", list[Argument]], Reply]

# Redis's categories, most of which have no command here, and the page family.
_CATEGORIES = """keyspace read write set sortedset list hash string bitmap hyperloglog geo stream pubsub admin fast slow
    blocking dangerous connection transaction scripting page"""
CATEGORIES = tuple(_CATEGORIES.split())
_FLAGS = """write readonly denyoom admin pubsub noscript blocking loading stale fast no_auth no_multi allow_busy
    no_async_loading skip_monitor skip_slowlog movablekeys may_replicate no_mandatory_keys"""
FLAGS = frozenset(_FLAGS.split())


AT_ONCE = 1024  # words of a command that is run at once; see `parts`


@dataclass(frozen=True, slots=True)
class Parts:
    """How a command of very many words is divided: every part has the `first` arguments, and some items of the rest.

    `joined` says what the replies of the parts make together: their `sum`; an `array` with `items` for each argument;
    replies that stand `apart`; or the `last` one. A command without it works in steps of its own, and is run whole:
    only rights are asked part by part.
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
    most: int  # words of a subcommand at the most, 0 where there is no such number
    parts: Parts | None  # how it is done with more than AT_ONCE words; None when it takes no more
    flags: frozenset[str]  # Redis's command flags
    stores: bool  # it is refused when memory is full: `denyoom`
    writes: bool  # `write`
    writes_keys: bool  # and the keys stand in fixed places
    categories: frozenset[str]  # ACL categories
    keys: tuple[int, int, int]  # first key, last key, step; zeros when it has none or they are spelt by `uses`
    uses: Uses | None  # the keys that arguments spell, or what else they say of their use
    access: int  # READ, WRITE or both: what it does to its keys
    all_keys: bool  # it concerns every key, or what only an administrator should see
    filtered: bool  # it shows and does what the user may see and do
    needs: Needs  # what has to be in memory for it, where there is a disk
    fetches: bool  # it sees to that itself as its reply goes on; within EXEC it has all of it before
    channels: str  # which arguments are pub/sub channels: "", "first", "all"; or "patterns", all as patterns
    group: str
    since: str
    usage: str
    summary: str
    tips: tuple[str, ...]  # Redis's command tips
    handler: Handler
    parent: str  # the container of a subcommand, empty for a command
    words: int  # of its name: 2 for a subcommand

    def fits(self, count: int) -> bool:
        """Whether it takes so many words, those of its name included."""
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
BY_WORD: dict[Argument, Spec] = {}  # commands by the word a client sends, as often spelt
SUBCOMMANDS: dict[str, dict[bytes, Spec]] = {}  # by container, then by word

_CATEGORY_OF_GROUP = {name: name for name in ("page", "string", "set", "keyspace", "connection", "pubsub")} | {
    "generic": "keyspace",
    "transactions": "transaction",
}


def command(
    name: str,
    arity: int,
    flags: str,
    *,
    group: str,
    summary: str,
    usage: str = "",
    keys: tuple[int, int, int] = (0, 0, 0),
    uses: Uses | None = None,
    access: int = 0,
    needs: Needs = everything,
    fetches: bool = False,
    channels: str = "",
    since: str = "1.0.0",
    tips: str = "",
    most: int = 0,
    parts: Parts | None = None,
) -> Callable[[Handler], Handler]:
    """Enter a function into the table. `access` is what `flags` say unless it is given."""
    given = set(flags.split())
    unknown = given - FLAGS - set(CATEGORIES) - {"allkeys", "filtered"}
    assert not unknown, f"{name}: {unknown} are neither flags nor categories"

    def enter(handler: Handler) -> Handler:
        parent, _, sub = name.rpartition("|")
        spec = Spec(
            name=name,
            arity=arity,
            most=most,
            parts=parts,
            flags=frozenset(given & FLAGS) | ({"movablekeys"} if uses and not keys[0] else set()),
            stores="denyoom" in given,
            writes="write" in given,
            writes_keys="write" in given and keys[0] > 0,
            categories=_categories(given, group),
            keys=keys,
            uses=uses,
            access=access or _access(given),
            all_keys=_concerns_all_keys(given, group, uses),
            filtered="filtered" in given,
            needs=needs if keys[0] or uses else nothing,
            fetches=fetches,
            channels=channels,
            group=group,
            since=since,
            usage=usage,
            summary=summary,
            tips=tuple(tips.split()),
            handler=handler,
            parent=parent,
            words=2 if parent else 1,
        )
        TABLE[name] = spec
        words = SUBCOMMANDS.setdefault(parent, {}) if parent else BY_WORD
        for word in (sub, sub.upper()):
            words[word.encode()] = spec
        return handler

    return enter


def _concerns_all_keys(given: set[str], group: str, uses: Uses | None) -> bool:
    if "filtered" in given:
        return False
    return bool(given & {"allkeys", "admin"}) or (group == "page" and uses is None)


def _access(given: set[str]) -> int:
    return (READ if "readonly" in given else 0) | (WRITE if "write" in given else 0) or READ


def _categories(given: set[str], group: str) -> frozenset[str]:
    named = given & set(CATEGORIES)
    if group in _CATEGORY_OF_GROUP:
        named.add(_CATEGORY_OF_GROUP[group])
    if "admin" in given:
        named.add("dangerous")
    if "readonly" in given:
        named.add("read")
    if "fast" not in given:
        named.add("slow")
    return frozenset(named)


def container(name: str, *, group: str, summary: str, since: str = "1.0.0") -> None:
    """Enter a command that only its subcommands give a meaning, and its HELP."""

    @command(name, -2, "", group=group, summary=summary, since=since)
    def refuse(client: Client, args: list[Argument]) -> Reply:
        raise AssertionError(f"{name} was called without one of its subcommands")

    help_of(name, group=group, since=since)


def help_of(name: str, *, group: str, since: str) -> None:
    """Enter the HELP of a command that has subcommands."""

    @command(f"{name}|help", 2, "loading stale", group=group, summary="Prints this help.", since=since)
    def help_(client: Client, args: list[Argument]) -> Reply:
        lines = [f"{name.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
        for spec in sorted(subcommands(name), key=lambda spec: (spec.name.endswith("|help"), spec.name)):
            lines += [f"{spec.name.rpartition('|')[2].upper()} {spec.usage}".rstrip(), f"    {spec.summary}"]
        return [simple(line) for line in lines]


def subcommands(name: str) -> list[Spec]:
    """The rows of a container's subcommands; none for anything else."""
    return list(dict.fromkeys(SUBCOMMANDS.get(name, {}).values()))


def top_level() -> list[Spec]:
    """Every row but the subcommands."""
    return [spec for spec in TABLE.values() if not spec.parent]


def find(words: Sequence[Argument]) -> Spec:
    """The row that a client's words call. Raises ReplyError for an unknown command or a wrong number of words."""
    spec = BY_WORD.get(words[0])  # the usual spellings need no folding
    if spec is None:
        spec = BY_WORD.get(plain(words[0]).lower())
        if spec is None:
            raise ReplyError(_unknown(words))
    count = len(words)
    if count > 1 and spec.name in SUBCOMMANDS:
        spec = _find_sub(spec, plain(words[1]))
    if count != spec.arity and (spec.arity > 0 or count < -spec.arity):
        raise ReplyError(f"ERR wrong number of arguments for '{spec.name}' command")
    return spec


def too_many(spec: Spec, words: Sequence[Argument]) -> ReplyError:
    """The error for more words than `Spec.most`: one that Redis finds only when it runs the subcommand."""
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
