"""The subcommands of ACL: users, their rights, and the log of refused commands."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kvpage_server.commands.access.user import RuleError, User, change_of
from kvpage_server.commands.access.users import DEFAULT, Refusal, UserFileError, lines_of, save_file
from kvpage_server.commands.arguments import as_integer, escaped, integer, plain, plain_all, shorten
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.specs import CATEGORIES, TABLE, find
from kvpage_server.commands.steps import STEP, Steps, each, in_thread, stepwise
from kvpage_server.core import Argument
from kvpage_server.resp import OK, Reply, ReplyError, Stream

_ADMIN = "admin noscript loading stale"
_NO_FILE = (
    "ERR This instance is not configured to use an ACL file. You may want to specify users via the ACL SETUSER command "
    "and then issue a CONFIG REWRITE (assuming you have a configuration file set) in order to store users in the "
    "configuration."
)

_SHORT = 1024  # bytes of rules that are compiled at once
_FEW = 8  # subscribers that a step checks

_own = partial(command, flags="noscript loading stale", group="server", since="6.0.0")
_admin = partial(command, flags=_ADMIN, group="server", since="6.0.0")


container("acl", group="server", since="6.0.0", summary="A container for access list commands.")


@_own("acl|whoami", reply="bulk", summary="Returns the connection's user.")
def acl_whoami(client: Client, args: list[Argument]) -> Reply:
    """Return the name of the client's user."""
    assert client.user is not None
    return client.user.name


@_admin("acl|users", complexity="O(N log N) with N users", reply="array of bulk", summary="Lists the users' names.")
def acl_users(client: Client, args: list[Argument]) -> Reply:
    """Return the names of all users, sorted."""
    return sorted(client.server.users.by_name)


@_admin(
    "acl|list",
    complexity="O(N log N) with N users",
    reply="array of bulk",
    summary="Lists users as lines of a configuration.",
)
def acl_list(client: Client, args: list[Argument]) -> Reply:
    """Return the line of a configuration file for each user, with hashed passwords, sorted by name."""
    users = client.server.users.by_name
    return Stream(len(users), map(bytes, [users[name] for name in sorted(users)]))


def _lines(client: Client) -> Steps[list[bytes]]:
    """Return, in steps, the line of a configuration file for each user, sorted by name."""
    by_name = client.server.users.by_name
    return (yield from each(sorted(by_name), lambda names: [bytes(by_name[name]) for name in names if name in by_name]))


@_admin(
    "acl|getuser username", complexity="O(N) with N rules", reply="map | null", summary="Describes a user's rights."
)
def acl_getuser(client: Client, args: list[Argument]) -> Reply:
    """Return a map with a user's passwords and rights; null if there is no such user."""
    user = client.server.users.by_name.get(plain(args[0]))
    return None if user is None else _describe(user)


def _describe(user: User) -> dict[str, Any]:
    """Return ACL GETUSER's map of a user."""
    return {
        "flags": ["on" if user.enabled else "off", *(["nopass"] if user.no_password else [])],
        "passwords": list(user.passwords),
        "commands": user.command_rules,
        "keys": user.key_rules,
        "channels": user.channel_rules,
        "selectors": [],
    }


@_admin(
    "acl|setuser username [rule [rule ...]]",
    flags=_ADMIN + " secret",
    complexity="O(N) with N rules",
    reply="OK",
    summary="Creates or changes a user.",
)
def acl_setuser(client: Client, args: list[Argument]) -> Reply:
    """Create a user or change its rights, and return OK. Either all rules are applied or none, immediately for all
    connections of the user.
    """
    name, *rules = plain_all(args)

    def steps() -> Steps[Reply]:
        changes = yield from each(rules, lambda some: [(rule, change_of(rule)) for rule in some], at_once=1)
        try:
            user = client.server.users.set(name, changes)
        except RuleError as error:
            raise ReplyError(f"ERR {error}") from None
        yield from _apply_changed_rights(client, {user.name})
        return OK

    return stepwise(steps(), small=sum(map(len, rules)) <= _SHORT and _is_quiet(client), whole=True)


def _is_quiet(client: Client) -> bool:
    """Return whether there are so few connections that one step can examine all."""
    return len(client.server.clients) <= STEP


def _apply_changed_rights(client: Client, changed: Collection[bytes]) -> Steps[None]:
    """Apply the new rights of the users named in `changed` to their connections, and cancel transactions that watch.

    Then close, in steps, the connections of deleted users, and connections with MONITOR or subscriptions that are not
    allowed any more. The calling client's is closed last, after its reply.
    """
    users, left = client.server.users.by_name, list[Client]()
    for other in client.server.clients.values():
        if other.user is None or other.user.name not in changed:
            continue
        other.user = users.get(other.user.name)
        other.watched_changed = other.watched_changed or bool(other.watching)  # it may not see whether keys change
        other.update_fast_path()
        if other is not client and (other.user is None or other.listens):
            left.append(other)
    for start in range(0, len(left), _FEW):
        for other in left[start : start + _FEW]:
            if not other.gone and _listens_too_much(other):
                other.connection.abort()
        yield ()
    if not client.gone and _listens_too_much(client):
        client.close()  # after the reply, in the last step of the command


def _listens_too_much(client: Client) -> bool:
    """Return whether a client has no user, or has MONITOR or a subscription that its user may not use."""
    if client in client.server.monitors and not client.sees_all:
        return True
    return not (client.user and all(map(client.may_subscribe, [*client.channels, *client.patterns])))


@_admin(
    "acl|deluser username [username ...]",
    complexity="O(N + M) with N users and M connections",
    reply="integer",
    summary="Removes users and ends their connections.",
)
def acl_deluser(client: Client, args: list[Argument]) -> Reply:
    """Remove users and close their connections. Return the number of removed users."""
    names = plain_all(args)
    if DEFAULT in names:
        raise ReplyError("ERR The 'default' user cannot be removed")
    removed = [name for name in names if client.server.users.by_name.pop(name, None) is not None]

    def steps() -> Steps[Reply]:
        yield from _apply_changed_rights(client, set(removed))
        return len(removed)

    return stepwise(steps(), small=_is_quiet(client), whole=True)


@_own(
    "acl|cat [category]",
    most=3,
    complexity="O(N) with N commands",
    reply="array of bulk",
    summary="Lists the categories of commands, or the commands of one.",
)
def acl_cat(client: Client, args: list[Argument]) -> Reply:
    """Return the categories, which are Redis's and `page`; with an argument, the commands of that category."""
    if not args:
        return list(CATEGORIES)
    category = escaped(plain(args[0]))
    if category.lower() not in CATEGORIES:
        raise ReplyError(f"ERR Unknown category '{category}'")
    return [spec.name for spec in TABLE.values() if category.lower() in spec.categories]


@_admin(
    "acl|dryrun username command [arg [arg ...]]",
    since="7.0.0",
    complexity="O(N) with N keys",
    reply="OK | bulk",
    summary="Says whether a user may run a command, without running it.",
)
def acl_dryrun(client: Client, args: list[Argument]) -> Reply:
    """Return OK if a user may run a command with these arguments, otherwise the text of the refusal. The command is not
    run.
    """
    name, words = plain(args[0]), args[1:]
    user = client.server.users.by_name.get(name)
    if user is None:
        raise ReplyError(f"ERR User '{escaped(name)}' not found")
    try:
        spec = find(words)
    except ReplyError as error:
        if "unknown" in str(error):
            raise ReplyError(f"ERR Command '{shorten(plain(words[0]), 1024)}' not found") from None
        raise
    denial = None if "no_auth" in spec.flags else user.denial(spec, words[spec.words :])
    if denial is None and spec.group == "set":
        denial = user.denial_of_index(spec.name, plain(words[spec.words]))
    return OK if denial is None else denial.verbose


@_admin(
    "acl|log [count | RESET]",
    most=3,
    complexity="O(N) with N entries",
    reply="array of map | OK",
    summary="Lists the commands, keys, channels and logins that were refused.",
)
def acl_log(client: Client, args: list[Argument]) -> Reply:
    """Return the last refusals, the newest first, 10 by default. With RESET, remove all and return OK."""
    refusals = client.server.refusals
    if args and plain(args[0]).upper() == b"RESET":
        refusals.entries.clear()
        return OK
    count = as_integer(args[0]) if args else 10
    if count is None or count < 0:
        raise ReplyError("ERR value is out of range, must be positive")
    chosen = list(islice(refusals.entries, count))
    return Stream(len(chosen), map(_entry, chosen))


def _entry(refusal: Refusal) -> dict[str, Any]:
    """Return ACL LOG's map of a refusal."""
    return {
        "count": refusal.count,
        "reason": refusal.reason,
        "context": refusal.context,
        "object": refusal.what,
        "username": refusal.user,
        "age-seconds": round(time.monotonic() - refusal.updated, 3),
        "client-info": refusal.client,
        "entry-id": refusal.id,
        "timestamp-created": refusal.created_ms,
        "timestamp-last-updated": refusal.updated_ms,
    }


@_admin("acl|save", complexity="O(N) with N users", reply="OK", summary="Writes the users into the aclfile.")
def acl_save(client: Client, args: list[Argument]) -> Reply:
    """Write the users to the aclfile, which is replaced as a whole, and return OK."""
    path = _file(client)

    def steps() -> Steps[Reply]:
        lines = yield from _lines(client)
        try:
            yield from in_thread(lambda: save_file(path, lines))
        except OSError as error:
            raise ReplyError(f"ERR There was an error trying to save the ACLs: {error.strerror}") from None
        return OK

    return stepwise(steps(), small=False)


@_admin(
    "acl|load",
    complexity="O(N + M) with N users and M connections",
    reply="OK",
    summary="Replaces the users with those in the aclfile.",
)
def acl_load(client: Client, args: list[Argument]) -> Reply:
    """Replace the users by those in the aclfile, and return OK. An invalid line is an error, and nothing is changed
    then. Connections of removed users are closed. As at a start, a file without a line for the user `default` gives it
    every right, with the password of `requirepass` or none.
    """
    path, users = _file(client), client.server.users

    def steps() -> Steps[Reply]:
        try:
            lines = yield from in_thread(lambda: lines_of(path))
            before = users.by_name.keys()
            for _ in users.loading(lines, client.server.config.requirepass):
                yield ()
        except UserFileError as error:
            raise ReplyError(f"ERR {error}") from None
        except OSError as error:
            raise ReplyError(f"ERR The ACL file cannot be read: {error.strerror}") from None
        users.warn_of_absent()
        yield from _apply_changed_rights(client, before)
        return OK

    return stepwise(steps(), small=False, whole=True)


def _file(client: Client) -> Path:
    """Return the path of the aclfile. Raises ReplyError if none is configured."""
    if not client.server.config.aclfile:
        raise ReplyError(_NO_FILE)
    return Path(client.server.config.aclfile)


@_own("acl|genpass [bits]", most=3, reply="bulk", summary="Generates a password.")
def acl_genpass(client: Client, args: list[Argument]) -> Reply:
    """Return random hexadecimal digits for a number of bits, 256 by default."""
    bits = integer(args[0]) if args else 256
    if not 1 <= bits <= 4096:
        raise ReplyError(
            "ERR ACL GENPASS argument must be the number of bits for the output password, a positive number up to 4096"
        )
    digits = -(-bits // 4)
    return secrets.token_hex((digits + 1) // 2)[:digits]
