"""The subcommands of CONFIG, which read parameters, change them while the server runs, and write them to the file."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from functools import partial

from kvpage_server.commands.access.users import Users
from kvpage_server.commands.arguments import SYNTAX_ERROR, escaped, plain_all
from kvpage_server.commands.context import NEVER, Client, Server
from kvpage_server.commands.measure import Stats
from kvpage_server.commands.registry import command, container
from kvpage_server.commands.steps import STEP, Steps, counted, each, in_thread, stepwise
from kvpage_server.configuration import certificates, log
from kvpage_server.configuration.config import Config, ConfigError, check_separate
from kvpage_server.configuration.rewrite import rewritten
from kvpage_server.core import Argument
from kvpage_server.glob import glob
from kvpage_server.resp import OK, Reply, ReplyError
from kvpage_server.store.eviction.quotas import Rule
from kvpage_server.system.durable import remove_unfinished, replacing
from kvpage_server.system.process import raise_descriptor_limit

# File descriptors of the process, in addition to those of clients: some 35 for files, listeners and event loop, and
# others for the process that answers HTTP (its start, and connections above maxclients), KV events, and files that are
# written.
OWN_DESCRIPTORS = 64
_FLAGS = "admin noscript loading stale"
_LONGEST = 1 << 19  # bytes of all values of CONFIG SET together
_LONGEST_VALUE = 1 << 16  # bytes of a value, except for the patterns of quotas
_SHORT = 1024  # bytes of patterns that are compared in one step
_TOO_MANY_CLIENTS = "The operating system is not able to handle the specified number of clients, try with"


def apply(server: Server, names: Iterable[str]) -> None:
    """Apply changed parameters to the parts of the server that keep a copy of them."""
    config = server.config
    for name in names:
        if name == "maxmemory":
            server.keyspace.memory.limit = config.maxmemory
        elif name == "maxmemory-policy":
            server.keyspace.eviction_order.policy = config.maxmemory_policy
        elif name == "quota":
            limits = ((pattern.encode("utf-8", "surrogateescape"), limit) for pattern, limit in config.quota.items())
            server.keyspace.quotas.set_rules([Rule(pattern, limit, glob(pattern)) for pattern, limit in limits])
        elif name == "notify-keyspace-events":
            server.events.notify(config.notify_keyspace_events)
        elif name == "requirepass":
            server.users.require_password(config.requirepass)
        elif name == "loglevel":
            log.set_level(config.loglevel)
        elif name in ("slowlog-log-slower-than", "latency-monitor-threshold"):
            slow, late = config.slowlog_log_slower_than, config.latency_monitor_threshold
            server.slow_from = min(slow * 1000 if slow >= 0 else NEVER, late * 1_000_000 if late else NEVER)


_config = partial(command, flags=_FLAGS, group="server", since="2.0.0")


container("config", group="server", since="2.0.0", summary="A container for configuration commands.")


@_config(
    "config|get parameter [parameter ...]",
    complexity="O(N) with N parameters",
    reply="map",
    summary="Returns parameters.",
)
def config_get(client: Client, args: list[Argument]) -> Reply:
    """Return a map of the parameters whose names match one of the patterns. Each pattern has its own step.

    `requirepass` and `web-token` are for administrators: users with the rights to every command and every key.
    """
    config, words = client.server.config, plain_all(args)
    is_administrator = client.user is not None and client.user.is_administrator
    names = [name for name in config.parameters() if config.is_shown(name, to_administrator=is_administrator)]

    def matched(some: Sequence[bytes]) -> list[str]:
        patterns = [glob(word, ignore_case=True) for word in some]
        return [name for name in names if any(matches(name.encode()) for matches in patterns)]

    def steps() -> Steps[Reply]:
        found = set((yield from each(words, matched, at_once=1)))
        return {name: config.get(name) for name in names if name in found}

    return stepwise(steps(), small=sum(map(len, words)) <= _SHORT)


@_config(
    "config|set parameter value [parameter value ...]",
    flags=_FLAGS + " secret",
    complexity="O(N) with N parameters",
    reply="OK",
    summary="Changes parameters while the server runs.",
)
def config_set(client: Client, args: list[Argument]) -> Reply:
    """Change parameters, and return OK. Either all are changed or none. Certificates are loaded in a thread."""
    server, words = client.server, plain_all(args)
    if len(words) % 2:
        raise ReplyError(SYNTAX_ERROR)
    names = [name[:1024].decode("utf-8", "surrogateescape").lower() for name in words[::2]]
    _check_changeable(server.config, names)
    _check_lengths(names, words[1::2])
    changes = {name: value.decode("utf-8", "surrogateescape") for name, value in zip(names, words[1::2], strict=True)}
    tls = next((name for name in changes if name in certificates.PARAMETERS), None)

    def steps() -> Steps[Reply]:
        made = None if tls is None else (yield from _certificates(server.config, changes, tls))
        _change_all(server.config, changes)
        if tls is not None:
            server.tls = made
        apply(server, changes)
        return OK

    return stepwise(steps(), small=tls is None)


def _check_changeable(config: Config, names: list[str]) -> None:
    """Raise ReplyError if a parameter does not exist, is named twice, or cannot be changed while the server runs."""
    known = set[str]()
    for name in names:
        if name not in config.parameters():
            shown = escaped(name.encode("utf-8", "surrogateescape"))
            raise ReplyError(f"ERR Unknown option or number of arguments for CONFIG SET - '{shown}'")
        if name in known:
            raise _refused(name, "duplicate parameter")
        if not config.is_mutable(name):
            raise _refused(name, "can't set immutable config")
        known.add(name)


def _check_lengths(names: Sequence[str], values: Sequence[bytes]) -> None:
    """Raise ReplyError if values of parameters are so long that it takes too long to parse them."""
    for name, value in zip(names, values, strict=True):
        if len(value) > _LONGEST_VALUE and name != "quota":
            raise _refused(name, f"a value has at most {_LONGEST_VALUE} bytes, got {len(value)}")
    if (size := sum(map(len, values))) > _LONGEST:
        raise ReplyError(f"ERR all values of CONFIG SET have at most {_LONGEST} bytes, got {size}")


def _change_all(config: Config, changes: Mapping[str, str]) -> None:
    """Change all parameters in `config`. Raises ReplyError, and changes none then."""
    before = vars(config).copy()
    try:
        for name, value in changes.items():
            config.change(name, value)
            if (
                name == "maxclients"
                and (most := raise_descriptor_limit(config.maxclients, OWN_DESCRIPTORS)) < config.maxclients
            ):
                raise ConfigError(f"{_TOO_MANY_CLIENTS} {most}")
    except ConfigError as error:
        vars(config).update(before)
        raise _refused(name, str(error).removeprefix(f"{name} ")) from None


def _certificates(config: Config, changes: Mapping[str, str], name: str) -> Steps[ssl.SSLContext | None]:
    """Return the TLS context for changed parameters. Their files, which are the only ones that can be changed, are
    checked as at the start, and loaded, in a thread. Raises ReplyError, which names the parameter `name`.

    If another client changes TLS parameters meanwhile, the certificates are loaded once more.
    """

    def load(asked: Config) -> ssl.SSLContext | None:
        check_separate(asked)
        if not asked.tls_port:  # a later start may have one
            certificates.check(asked)
        return certificates.load(asked)

    while True:
        before = {one: config.words(one) for one in certificates.PARAMETERS}
        asked = copy(config)
        _change_all(asked, changes)
        try:
            made = yield from in_thread(partial(load, asked))
        except (ConfigError, certificates.CertificateError) as error:
            raise _refused(name, str(error)) from None
        # otherwise another client has changed the parameters meanwhile
        if before == {one: config.words(one) for one in certificates.PARAMETERS}:
            return made


def _refused(name: str, why: str) -> ReplyError:
    """Return the error of CONFIG SET for the parameter `name` and the reason `why`."""
    return ReplyError(f"ERR CONFIG SET failed (possibly related to argument '{name}') - {why}")


@_config("config|resetstat", complexity="O(N) with N connections", reply="OK", summary="Resets the statistics.")
def config_resetstat(client: Client, args: list[Argument]) -> Reply:
    """Set the counts in INFO to 0, and return OK. The slow log, and the counts of open connections and of damage and
    errors of the disk stay.
    """
    server = client.server

    def steps() -> Steps[Reply]:
        yield from counted(server)
        server.stats = Stats()
        server.stats.bytes_out = -server.totals.sent  # the counts of open connections are not reset
        server.refusals.forget_totals()
        server.keyspace.counters.reset()
        for quota in server.keyspace.eviction_order.quotas.all:
            quota.evicted = 0
        if server.tiered is not None:
            server.tiered.reset_statistics()
        return OK

    return stepwise(steps(), small=len(server.clients) <= STEP)


@_config(
    "config|rewrite",
    since="2.8.0",
    complexity="O(N) with N lines",
    reply="OK",
    summary="Writes the parameters into the file.",
)
def config_rewrite(client: Client, args: list[Argument]) -> Reply:
    """Write the parameters to the configuration file, and return OK. The file is replaced as a whole, and keeps its
    comments and order.
    """
    server = client.server
    path = server.config.file
    if path is None:
        raise ReplyError("ERR The server is running without a config file")
    users = [] if server.config.aclfile else _other_users(server)

    config = copy(server.config)

    def write() -> None:
        text = rewritten(path.read_bytes(), config, users)
        remove_unfinished(path.parent, path.stem)  # it may have passwords
        with replacing(path, keep_group=True) as file:
            file.write(text)

    def steps() -> Steps[Reply]:
        try:
            yield from in_thread(write)
        except OSError as error:
            raise ReplyError(f"ERR Rewriting config file: {error.strerror}") from None
        return OK

    return stepwise(steps(), small=False)


def _other_users(server: Server) -> list[bytes]:
    """Return the configuration lines of all users, without the default user if its line follows from `requirepass`."""
    usual = Users()
    usual.require_password(server.config.requirepass)
    return [line for line in server.users.lines() if line != bytes(usual.default)]
