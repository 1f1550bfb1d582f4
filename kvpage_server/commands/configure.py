"""CONFIG: parameters read, changed while the server runs, and written back into the file."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

from kvpage_server import certificates, log
from kvpage_server.commands.arguments import SYNTAX_ERROR, plain_all
from kvpage_server.commands.context import NEVER, Client, Server
from kvpage_server.commands.measure import Stats
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.users import Users
from kvpage_server.config import Config, ConfigError
from kvpage_server.core import Argument
from kvpage_server.durable import replacing
from kvpage_server.glob import PatternTooLong, glob
from kvpage_server.resp.reply import OK, Reply, ReplyError
from kvpage_server.rewrite import rewritten
from kvpage_server.store.quota import Rule

_FLAGS = "admin noscript loading stale"


def apply(server: Server, names: Iterable[str]) -> None:
    """Let these parameters take effect where something depends on them besides the configuration itself."""
    config = server.config
    for name in names:
        if name == "maxmemory":
            server.keyspace.maxmemory = config.maxmemory
        elif name == "maxmemory-policy":
            server.keyspace.policy = config.maxmemory_policy
        elif name == "quota":
            limits = ((pattern.encode("utf-8", "surrogateescape"), limit) for pattern, limit in config.quota.items())
            server.keyspace.set_quotas([Rule(pattern, limit, glob(pattern)) for pattern, limit in limits])
        elif name == "notify-keyspace-events":
            server.events.notify(config.notify_keyspace_events)
        elif name == "requirepass":
            server.users.require_password(config.requirepass)
        elif name == "loglevel":
            log.set_level(config.loglevel)
        elif name in ("slowlog-log-slower-than", "latency-monitor-threshold"):
            slow, late = config.slowlog_log_slower_than, config.latency_monitor_threshold
            server.slow_from = min(slow * 1000 if slow >= 0 else NEVER, late * 1_000_000 if late else NEVER)


container("config", group="server", since="2.0.0", summary="A container for configuration commands.")


@command(
    "config|get",
    -3,
    _FLAGS,
    group="server",
    since="2.0.0",
    usage="parameter [parameter ...]",
    summary="Returns parameters.",
)
def config_get(client: Client, args: list[Argument]) -> Reply:
    """A map of those whose name matches one of the patterns."""
    config = client.server.config
    try:
        patterns = [glob(word, ignore_case=True) for word in plain_all(args)]
    except PatternTooLong as error:
        raise ReplyError(f"ERR {error}") from None
    return {
        name: config.get(name)
        for name in config.parameters()
        if not config.is_hidden(name) and any(matches(name.encode()) for matches in patterns)
    }


@command(
    "config|set",
    -4,
    _FLAGS,
    group="server",
    since="2.0.0",
    usage="parameter value [parameter value ...]",
    summary="Changes parameters while the server runs.",
)
def config_set(client: Client, args: list[Argument]) -> Reply:
    """All of them or none."""
    words = [word.decode("utf-8", "surrogateescape") for word in plain_all(args)]
    if len(words) % 2:
        raise ReplyError(SYNTAX_ERROR)
    config = client.server.config
    names = [name.lower() for name in words[::2]]
    _check_changeable(config, names)
    before = vars(config).copy()
    try:
        for name, value in zip(names, words[1::2], strict=True):
            _change(config, name, value)
        changed = [name for name in names if name in certificates.PARAMETERS]
        if changed:
            client.server.tls = _certificates(config, changed[0])
    except ReplyError:
        vars(config).update(before)
        raise
    apply(client.server, names)
    return OK


def _check_changeable(config: Config, names: list[str]) -> None:
    for name in names:
        if name not in config.parameters():
            shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
            raise ReplyError(f"ERR Unknown option or number of arguments for CONFIG SET - '{shown}'")
        if names.count(name) > 1:
            raise _refused(name, "duplicate parameter")
        if not config.is_mutable(name):
            raise _refused(name, "can't set immutable config")


def _change(config: Config, name: str, value: str) -> None:
    try:
        config.change(name, value)
    except ConfigError as error:
        raise _refused(name, str(error).removeprefix(f"{name} ")) from None


def _certificates(config: Config, name: str) -> ssl.SSLContext | None:
    try:
        return certificates.load(config)
    except certificates.CertificateError as error:
        raise _refused(name, str(error)) from None


def _refused(name: str, why: str) -> ReplyError:
    return ReplyError(f"ERR CONFIG SET failed (possibly related to argument '{name}') - {why}")


@command("config|resetstat", 2, _FLAGS, group="server", since="2.0.0", summary="Begins the statistics anew.")
def config_resetstat(client: Client, args: list[Argument]) -> Reply:
    """What INFO counts; not the slow log."""
    server = client.server
    fresh = Stats()
    fresh.bytes_out = -sum(client.connection.sent for client in server.clients.values())  # they go on counting
    for name in Stats.__slots__:
        setattr(server.stats, name, getattr(fresh, name))
    server.refusals.forget_totals()
    server.keyspace.counters = type(server.keyspace.counters)()
    return OK


@command("config|rewrite", 2, _FLAGS, group="server", since="2.8.0", summary="Writes the parameters into the file.")
def config_rewrite(client: Client, args: list[Argument]) -> Reply:
    """Whole or not at all; comments and order stay."""
    server = client.server
    path = server.config.file
    if path is None:
        raise ReplyError("ERR The server is running without a config file")
    users = [] if server.config.aclfile else _users_beside(server)
    try:
        text = rewritten(path.read_bytes(), server.config, users)
        with replacing(path, keep_group=True) as file:
            file.write(text)
    except OSError as error:
        raise ReplyError(f"ERR Rewriting config file: {error.strerror}") from None
    return OK


def _users_beside(server: Server) -> list[bytes]:
    """The lines of the users, but for a default one that is as requirepass makes it."""
    usual = Users()
    usual.require_password(server.config.requirepass)
    return [line for line in server.users.lines() if line != bytes(usual.default)]
