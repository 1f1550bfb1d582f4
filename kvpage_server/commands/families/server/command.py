"""COMMAND and its subcommands, which describe the command table. redis-cli shows hints from it; cluster clients read
the positions of keys.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from kvpage_server.commands.arguments import SYNTAX_ERROR, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command, help_of
from kvpage_server.commands.specs import (
    READ,
    SUBCOMMANDS,
    TABLE,
    WRITE,
    Parts,
    Spec,
    Use,
    arguments,
    lower_name,
    schema,
    subcommands,
    top_level,
)
from kvpage_server.core import Argument
from kvpage_server.glob import glob
from kvpage_server.resp import Raw, Reply, ReplyError, encode, simple


def describe(spec: Spec) -> list[Any]:
    """Return a command's entry in the reply of COMMAND."""
    first, last, step = spec.keys
    return [
        spec.name,
        spec.arity,
        [simple(flag) for flag in sorted(spec.flags)],
        first,
        last,
        step,
        [simple(f"@{category}") for category in sorted(spec.categories)],
        list(spec.tips),
        _key_specs(spec),
        [describe(sub) for sub in subcommands(spec.name)],
    ]


_KEY_FLAGS = {READ: ["RO", "access"], WRITE: ["OW", "update"], READ | WRITE: ["RW", "access", "update"]}


def _key_specs(spec: Spec) -> list[Any]:
    """Return the key specifications of a command in Redis 7's format; none without keys at fixed positions."""
    flags = [simple(flag) for flag in _KEY_FLAGS[spec.access]]
    first, last, step = spec.keys
    if not first:
        return []
    found = {"lastkey": last - first if last > 0 else last, "keystep": step, "limit": 0}
    return [
        {
            "flags": flags,
            "begin_search": {"type": "index", "spec": {"index": first}},
            "find_keys": {"type": "range", "spec": found},
        }
    ]


def document(spec: Spec) -> dict[str, Any]:
    """Return a command's entry in the reply of COMMAND DOCS."""
    docs: dict[str, Any] = {
        "summary": spec.summary,
        "since": spec.since,
        "group": spec.group,
        "complexity": spec.complexity,
    }
    if spec.usage:
        docs["arguments"] = [_with_status_flags(argument) for argument in arguments(spec.usage)]
    if spec.reply:
        docs["reply_schema"] = schema(spec.reply)
    if subs := subcommands(spec.name):
        docs["subcommands"] = {sub.name: document(sub) for sub in subs}
    return docs


def _with_status_flags(argument: dict[str, Any]) -> dict[str, Any]:
    """Return an argument map of COMMAND DOCS with its flags as simple strings, also those of inner arguments."""
    shown = dict(argument)
    if "flags" in shown:
        shown["flags"] = [simple(flag) for flag in shown["flags"]]
    if "arguments" in shown:
        shown["arguments"] = [_with_status_flags(inner) for inner in shown["arguments"]]
    return shown


def _named(args: list[Argument]) -> list[Spec | None]:
    """Return the row of each named command, None for unknown ones."""
    return [TABLE.get(lower_name(word).decode("ascii", "replace")) for word in plain_all(args)]


_about = partial(command, flags="loading stale connection", group="server", since="2.8.13")


@_about(
    "command", arity=-1, complexity="O(N) with N commands", reply="array of array", summary="Describes every command."
)
def command_(client: Client, args: list[Argument]) -> Reply:
    """Return an array with the description of each command."""
    return _all_described(client.protocol)


@cache
def _all_described(protocol: int) -> Raw:
    """Return the reply to COMMAND, encoded for RESP `protocol`. It is encoded once, because every redis-cli requests
    it.
    """
    return _encoded([_described(spec, protocol) for spec in top_level()], protocol)


@cache
def _described(spec: Spec, protocol: int) -> Raw:
    """Return a command's entry in the reply of COMMAND, encoded once for RESP `protocol`."""
    return _encoded(describe(spec), protocol)


@cache
def _all_documented(protocol: int) -> Raw:
    """Return the reply to COMMAND DOCS, encoded once for RESP `protocol`."""
    return _encoded({spec.name: document(spec) for spec in top_level()}, protocol)


def _encoded(reply: Reply, protocol: int) -> Raw:
    """Return a reply encoded for RESP `protocol`."""
    out: list[Any] = []
    encode(reply, protocol, out)
    return Raw(b"".join(out))


@_about("command|count", reply="integer", summary="Counts the commands.")
def command_count(client: Client, args: list[Argument]) -> Reply:
    """Return the number of commands, without subcommands."""
    return len(top_level())


@_about(
    "command|info [command-name [command-name ...]]",
    parts=Parts(joined="array"),
    complexity="O(N) with N commands",
    reply="array",
    summary="Describes some commands.",
)
def command_info(client: Client, args: list[Argument]) -> Reply:
    """Return the description of each named command, null for unknown commands, and for commands that a gateway does
    not support; without names, of all commands.
    """
    if not args:
        return command_(client, args)
    override = client.server.command_override

    def described(spec: Spec | None) -> Reply:
        if spec is None:
            return None
        try:
            if override is not None:
                override.row(spec)
        except ReplyError:  # a gateway does not support it
            return None
        return _described(spec, client.protocol)

    return list(map(described, _named(args)))


@_about(
    "command|docs [command-name [command-name ...]]",
    since="7.0.0",
    complexity="O(N) with N commands",
    reply="map",
    summary="Documents commands.",
)
def command_docs(client: Client, args: list[Argument]) -> Reply:
    """Return a map with the documentation of the named commands, without unknown ones; of all commands without
    names.
    """
    if not args:
        return _all_documented(client.protocol)
    return {spec.name: document(spec) for spec in dict.fromkeys(_named(args)) if spec}


@_about(
    "command|list [FILTERBY <MODULE module-name | ACLCAT category | PATTERN pattern>]",
    since="7.0.0",
    complexity="O(N) with N commands",
    reply="array of bulk",
    summary="Names the commands.",
)
def command_list(client: Client, args: list[Argument]) -> Reply:
    """Return the names of the commands. With a filter, subcommands are included, as in Redis."""
    words = plain_all(args)
    if not words:
        return [spec.name for spec in top_level()]
    if len(words) != 3 or words[0].upper() != b"FILTERBY":
        raise ReplyError(SYNTAX_ERROR)
    by, value = words[1].upper(), words[2]
    if by == b"MODULE":
        return []
    if by == b"ACLCAT":
        category = lower_name(value).decode("ascii", "replace")
        return [spec.name for spec in TABLE.values() if category in spec.categories]
    if by == b"PATTERN":
        matches = glob(value, ignore_case=True)
        return [name for name in TABLE if matches(name.encode())]
    raise ReplyError(SYNTAX_ERROR)


def _uses(args: list[Argument]) -> list[Use]:
    """Return the keys, each with its access, that a command with these words would use. Raises ReplyError if it has no
    keys, or an invalid number of words.
    """
    name = lower_name(args[0]).decode("latin1")
    if name in SUBCOMMANDS and len(args) > 1:
        name += "|" + lower_name(args[1]).decode("latin1")
    spec = TABLE.get(name)
    if spec is None:
        raise ReplyError("ERR Invalid command specified")
    if not spec.keys[0]:
        raise ReplyError("ERR The command has no key arguments")
    if not spec.fits(len(args)):
        raise ReplyError("ERR Invalid number of arguments specified for command")
    return list(spec.uses_of(args[spec.words :]))


@_about(
    "command|getkeys command [arg [arg ...]]",
    arity=-4,
    complexity="O(N) with N arguments",
    reply="array of bulk",
    summary="Returns the keys that a command with these arguments would use.",
)
def command_getkeys(client: Client, args: list[Argument]) -> Reply:
    """Return the keys that a command with these words would use, in order; `kv:{req}:` stands for every page of a
    request.
    """
    return [bytes(key) for key, _ in _uses(args)]


@_about(
    "command|getkeysandflags command [arg [arg ...]]",
    arity=-4,
    since="7.0.0",
    complexity="O(N) with N arguments",
    reply="array of array",
    summary="Returns the keys that a command with these arguments would use, and what it does to them.",
)
def command_getkeysandflags(client: Client, args: list[Argument]) -> Reply:
    """Return each key that a command with these words would use, and the flags of the access to it."""
    return [[bytes(key), {simple(flag) for flag in _KEY_FLAGS[access]}] for key, access in _uses(args)]


help_of("command", group="server", since="5.0.0")
