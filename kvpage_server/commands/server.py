"""The server family: what it is, how it is configured, how it ends."""

from __future__ import annotations

import re
from fnmatch import translate
from typing import Any

from kvpage_server.commands.arguments import SYNTAX_ERROR, plain_all
from kvpage_server.commands.context import Client
from kvpage_server.commands.info import info_text
from kvpage_server.commands.registry import TABLE, Spec, command, container, subcommands, top_level
from kvpage_server.commands.usage import arguments
from kvpage_server.resp.parser import Argument
from kvpage_server.resp.reply import Reply, ReplyError, Verbatim, simple


def describe(spec: Spec) -> list[Any]:
    """A command as COMMAND replies it."""
    first, last, step = spec.keys
    return [
        spec.name,
        spec.arity,
        [simple(flag) for flag in sorted(spec.flags)],
        first,
        last,
        step,
        [simple(f"@{category}") for category in sorted(spec.categories)],
        [],
        [],
        [describe(sub) for sub in subcommands(spec.name)],
    ]


def document(spec: Spec) -> dict[str, Any]:
    """A command as COMMAND DOCS replies it."""
    docs: dict[str, Any] = {"summary": spec.summary, "since": spec.since, "group": spec.group}
    if spec.usage:
        docs["arguments"] = [_with_status_flags(argument) for argument in arguments(spec.usage)]
    if subs := subcommands(spec.name):
        docs["subcommands"] = {sub.name: document(sub) for sub in subs}
    return docs


def _with_status_flags(argument: dict[str, Any]) -> dict[str, Any]:
    shown = dict(argument)
    if "flags" in shown:
        shown["flags"] = [simple(flag) for flag in shown["flags"]]
    if "arguments" in shown:
        shown["arguments"] = [_with_status_flags(inner) for inner in shown["arguments"]]
    return shown


def _named(args: list[Argument]) -> list[tuple[bytes, Spec | None]]:
    return [(word, TABLE.get(word.lower().decode("ascii", "replace"))) for word in plain_all(args)]


@command("command", -1, "loading", group="server", summary="Describes every command.")
def command_(client: Client, args: list[Argument]) -> Reply:
    """One entry a command."""
    return [describe(spec) for spec in top_level()]


@command("command|count", 2, "loading", group="server", summary="Counts the commands.")
def command_count(client: Client, args: list[Argument]) -> Reply:
    """Subcommands are not counted."""
    return len(top_level())


@command("command|info", -2, "loading", group="server", usage="[command-name ...]", summary="Describes some commands.")
def command_info(client: Client, args: list[Argument]) -> Reply:
    """Null for one that does not exist; all of them when none is named."""
    if not args:
        return command_(client, args)
    return [describe(spec) if spec else None for _, spec in _named(args)]


@command("command|docs", -2, "loading", group="server", usage="[command-name ...]", summary="Documents commands.")
def command_docs(client: Client, args: list[Argument]) -> Reply:
    """A map by name, without those that do not exist."""
    specs = [spec for _, spec in _named(args) if spec] if args else top_level()
    return {spec.name: document(spec) for spec in specs}


@command("info", -1, "loading", group="server", usage="[section ...]", summary="Tells how the server is doing.")
def info(client: Client, args: list[Argument]) -> Reply:
    """Text in sections of `name:value` lines."""
    sections = {word.decode("ascii", "replace").lower() for word in plain_all(args)}
    return Verbatim(info_text(client.server, sections).encode())


container("config", group="server", summary="A container for configuration commands.")


@command("config|get", -3, "admin", group="server", usage="parameter [parameter ...]", summary="Returns parameters.")
def config_get(client: Client, args: list[Argument]) -> Reply:
    """A map of those whose name matches one of the patterns."""
    config = client.server.config
    patterns = [re.compile(translate(word.decode("utf-8", "replace").lower())) for word in plain_all(args)]
    return {name: config.get(name) for name in config.parameters() if any(p.match(name) for p in patterns)}


@command(
    "shutdown",
    -1,
    "admin",
    group="server",
    usage="[NOSAVE | SAVE] [NOW] [FORCE] [ABORT]",
    summary="Ends the server.",
)
def shutdown(client: Client, args: list[Argument]) -> Reply:
    """No reply: the connection closes."""
    words = {word.upper() for word in plain_all(args)}
    if not words <= {b"NOSAVE", b"SAVE", b"NOW", b"FORCE", b"ABORT"} or {b"NOSAVE", b"SAVE"} <= words:
        raise ReplyError(SYNTAX_ERROR)
    if b"ABORT" in words:
        raise ReplyError("ERR No shutdown in progress.")
    client.server.stop()
    client.close()
    return ()
