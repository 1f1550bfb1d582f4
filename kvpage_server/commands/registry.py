"""The registration of commands in the table.

A family's module declares its commands with the `command` decorator, next to their functions::

    @command("get key", flags="readonly fast", keys=(1, 1, 1), group="string", reply="bulk | null", summary="...")
    def get(client: Client, args: list[Argument]) -> Reply: ...

A `partial` of the decorator contains the common fields of a module's rows. The default complexity is O(1).

A call is written as in Redis's documentation: ``set key value [NX | XX] [EX seconds]``, ``...`` for repetition. The
arity follows from it, except in the few rows that give it. `reply` is the shape of the reply, see `specs.schema`. A
subcommand has its own row, named ``container|sub``.

The flags are Redis's command flags, further ACL categories, and the flags of `_OWN`. `allkeys` marks commands that read
or change data of every key, so they require access to every key. The same holds for commands with the flag `admin`,
unless they are `filtered`: they show each user only its own data. `secret`, `hashed`, `unqueued`, `runs_queued`,
`while_subscribed` and `keeps_caching` are fields of `Spec`.
"""

from __future__ import annotations

from collections.abc import Callable

from kvpage_server.commands.context import Client
from kvpage_server.commands.specs import (
    BY_WORD,
    CATEGORIES,
    FLAGS,
    READ,
    SUBCOMMANDS,
    TABLE,
    WRITE,
    Naming,
    Needs,
    Parts,
    Spec,
    Uses,
    everything,
    nothing,
    subcommands,
)
from kvpage_server.commands.specs import arity as arity_of
from kvpage_server.core import Argument
from kvpage_server.resp import Reply, simple

_OF_SUBCOMMAND = "Depends on subcommand."  # the words of Redis

Handler = Callable[[Client, list[Argument]], Reply]

_OWN = frozenset(
    ["allkeys", "filtered", "secret", "hashed", "unqueued", "runs_queued", "while_subscribed", "keeps_caching"]
)

_CATEGORY_OF_GROUP = {name: name for name in ("page", "string", "set", "keyspace", "connection", "pubsub")} | {
    "generic": "keyspace",
    "map": "page",
    "transactions": "transaction",
}


def command(
    call: str,
    arity: int = 0,
    flags: str = "",
    *,
    group: str,
    summary: str,
    complexity: str = "O(1)",
    reply: str,
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
    """Return a decorator that enters a function into the command table as the handler of `call`.

    `call` is the command's name, lower-case, and its arguments as in Redis's documentation. `arity` 0 is computed from
    `call`, `access` 0 from `flags`. The other arguments are fields of `Spec`. The decorated function is not changed.
    """
    name, _, usage = call.partition(" ")
    given = set(flags.split())
    unknown = given - FLAGS - set(CATEGORIES) - _OWN
    assert not unknown, f"{name}: {unknown} are neither flags nor categories"

    def enter(handler: Handler) -> Handler:
        """Add the row of `handler` to the table under its name in lower and upper case, and return `handler`."""
        parent, _, sub = name.rpartition("|")
        needed = needs if keys[0] or uses else nothing
        spec = Spec(
            name=name,
            arity=arity or arity_of(name, usage),
            most=most,
            parts=parts,
            flags=frozenset(given & FLAGS),
            stores="denyoom" in given,
            writes="write" in given,
            writes_keys="write" in given and keys[0] > 0,
            writes_several="write" in given and 0 < keys[0] != keys[1],
            categories=_categories(given, group),
            keys=uses.places(2 if parent else 1) if isinstance(uses, Naming) else keys,
            uses=uses,
            access=access or _access(given),
            all_keys=_concerns_all_keys(given, group, uses),
            filtered="filtered" in given,
            secret="secret" in given,
            hashed="hashed" in given,
            unqueued="unqueued" in given,
            runs_queued="runs_queued" in given,
            while_subscribed="while_subscribed" in given,
            keeps_caching="keeps_caching" in given,
            needs=needed,
            fetches=fetches,
            preloads=not fetches and needed is not nothing,
            channels=channels,
            group=group,
            since=since,
            usage=usage,
            summary=summary,
            complexity=complexity,
            reply=reply,
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
    """Return whether the command requires access to every key: by its flags, or as a page command that names no
    keys.
    """
    if "filtered" in given:
        return False
    return bool(given & {"allkeys", "admin"}) or (group == "page" and uses is None)


def _access(given: set[str]) -> int:
    """Return READ, WRITE or both for the flags of a command; READ for neither `readonly` nor `write`."""
    return (READ if "readonly" in given else 0) | (WRITE if "write" in given else 0) or READ


def _categories(given: set[str], group: str) -> frozenset[str]:
    """Return the ACL categories of a command with these flags and this group."""
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
    """Enter a command that consists of subcommands, which have rows of their own, and its subcommand HELP."""

    @command(name, -2, "", group=group, summary=summary, since=since, complexity=_OF_SUBCOMMAND, reply="")
    def refuse(client: Client, args: list[Argument]) -> Reply:
        """Raise AssertionError. The dispatcher finds a subcommand before it calls a container."""
        raise AssertionError(f"{name} was called without one of its subcommands")

    help_of(name, group=group, since=since)


def help_of(name: str, *, group: str, since: str) -> None:
    """Enter the subcommand HELP of a container."""

    @command(
        f"{name}|help",
        flags="loading stale",
        group=group,
        since=since,
        reply="array of simple",
        summary="Prints this help.",
    )
    def help_(client: Client, args: list[Argument]) -> Reply:
        """Return the lines of the help: the call and the summary of each subcommand."""
        lines = [f"{name.upper()} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"]
        for spec in sorted(subcommands(name), key=lambda spec: (spec.name.endswith("|help"), spec.name)):
            lines += [f"{spec.name.rpartition('|')[2].upper()} {spec.usage}".rstrip(), f"    {spec.summary}"]
        return [simple(line) for line in lines]
