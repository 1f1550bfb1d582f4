"""Configuration: `name value` lines as redis.conf has them, `--name value` on the command line, CONFIG GET and SET.

Each parameter is declared once, as a field of `Config` with its kind, default, one line of documentation and whether it
may change while the server runs. A line that cannot be understood is refused with its number and what is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from kvpage_server.bounded.files import read_regular
from kvpage_server.configuration.kinds import (
    AUTO,
    Kind,
    OutputLimit,
    choice,
    integer,
    letters,
    lines,
    memory,
    memory_or_auto,
    memory_or_share,
    octal,
    origins,
    output_limits,
    path,
    quotas,
    text,
    token,
    words,
    yes_no,
)
from kvpage_server.core.inline import split_words
from kvpage_server.store.eviction.policies import POLICIES

_NO_LIMIT_COUNTS_AS = 4 * 1024**3  # bytes of maxmemory, where a share of it is asked for
_MOST_BYTES = 64 * 1024**2  # of a file
_GREAT_PAGE = 65 * 1024**2  # bytes: 64 MiB and what is around them

_NO_MAPS = "kvpage-server has no maps of slots: use servers side by side, or `store cluster` (docs/scaling.md)"
_REMOVED = {"cluster-config": _NO_MAPS, "cluster-node": _NO_MAPS}  # former parameters, and their replacement


class ConfigError(ValueError):
    """A parameter is unknown or its value is not allowed; the message says which, where, and what is."""


def option(kind: Kind, default: Any, doc: str, *, mutable: bool = False, hidden: bool = False) -> Any:
    """Declare a parameter. Its name is the field's, with dashes. CONFIG GET does not show a hidden one."""
    metadata = {"kind": kind, "doc": doc, "mutable": mutable, "hidden": hidden}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """Every parameter, with its default."""

    port: int = option(
        integer(0, 65535), 9221, "TCP port; 0 takes a free one, or none if tls-port or unixsocket is given"
    )
    bind: list[str] = option(words, ["127.0.0.1", "-::1"], "addresses to listen on; one after '-' may be missing")
    tcp_backlog: int = option(integer(1, 65535), 511, "connections that may wait to be accepted")
    unixsocket: str = option(path, "", "path of a unix socket to listen on")
    unixsocketperm: int = option(octal, 0o700, "permissions of the unix socket, in octal")
    tls_port: int = option(integer(0, 65535), 0, "port for TLS; 0 is none")
    tls_cert_file: str = option(path, "", "the server's certificate, PEM", mutable=True)
    tls_key_file: str = option(path, "", "the certificate's private key, PEM", mutable=True)
    tls_key_file_pass: str = option(text, "", "password of the private key", hidden=True, mutable=True)
    tls_ca_cert_file: str = option(path, "", "CA certificates that clients' are checked against, PEM", mutable=True)
    tls_auth_clients: str = option(
        choice("yes", "no", "optional"), "yes", "whether a client must show a certificate", mutable=True
    )
    metrics_port: int = option(integer(0, 65535), 0, "HTTP port for /metrics and the web page; 0 is none")
    metrics_bind: list[str] = option(words, ["127.0.0.1", "-::1"], "addresses of metrics-port")
    web_token: str = option(
        token, "", "token of /metrics and of the web page where no password is set; empty: a new one at each start"
    )
    web_origin: list[str] = option(
        origins, [], "sites, such as https://store.example, under which a proxy offers the web page"
    )
    protected_mode: bool = option(
        yes_no, True, "without a password, accept connections from this machine only", mutable=True
    )
    requirepass: str = option(text, "", "password of the user `default`", mutable=True)
    user: list[list[str]] = option(lines, [], "a user and its rules, as ACL SETUSER takes them", hidden=True)
    aclfile: str = option(path, "", "a file of `user` lines, instead of `user` lines in this file")
    acllog_max_len: int = option(integer(0, 100_000), 128, "number of entries in ACL LOG", mutable=True)
    maxclients: int = option(integer(1, 1_000_000), 10_000, "maximum number of connections", mutable=True)
    timeout: int = option(
        integer(0, 2**31), 0, "seconds after which an idle connection is closed; 0 is never", mutable=True
    )
    tcp_keepalive: int = option(integer(0, 2**15), 300, "seconds between probes of a silent connection; 0 is none")
    proto_max_bulk_len: int = option(memory(1024**2), 512 * 1024**2, "bytes of the longest string a client may send")
    client_query_buffer_limit: int = option(
        memory(1024**2), 1024**3, "bytes of a command that may wait until it is complete", mutable=True
    )
    client_output_buffer_limit: dict[str, OutputLimit] = option(
        output_limits,
        {
            "normal": OutputLimit(0, 64 * 1024**2, 60),
            "replica": OutputLimit(0, 0, 0),
            "pubsub": OutputLimit(32 * 1024**2, 8 * 1024**2, 60),
        },
        "unread replies a client may have, by class: hard limit, soft limit, seconds above the soft limit",
        mutable=True,
    )
    maxmemory_clients: int | str = option(
        memory_or_share,
        "25%",
        "bytes that all connections together may hold, or a share of maxmemory (of 4gb without it); 0 is no limit",
        mutable=True,
    )
    dir: str = option(path, ".", "working directory of the server")
    maxmemory: int = option(memory(), 0, "bytes of values kept in memory; 0 is no limit", mutable=True)
    maxmemory_policy: str = option(
        choice(*POLICIES), "allkeys-prefix", "how keys to evict are chosen when memory is full", mutable=True
    )
    quota: dict[str, int] = option(
        quotas,
        {},
        "bytes for the keys that match a pattern; one or more a line; a key counts for the first that matches",
        mutable=True,
    )
    store: str = option(
        choice("memory", "tiered", "cluster"),
        "tiered",
        "where values are kept: in memory, in memory and on disk, or in a Valkey or Redis Cluster",
    )
    cluster_nodes: str = option(
        text,
        "",
        "for `store cluster`: some nodes as host:port,host:port, or a URL with user and password",
        hidden=True,
    )
    appendfsync: str = option(
        choice("always", "everysec", "no"),
        "everysec",
        "when a write is on disk: before the reply, within a second, or when the operating system writes it",
    )
    maxdisk: int | str = option(
        memory_or_auto,
        AUTO,
        "bytes of the store on disk; 0 is no limit; auto is half of free space and store together, 16mb at least",
    )
    write_behind_limit: int = option(
        memory(1024**2),
        256 * 1024**2,
        "bytes that may wait to be written to disk, at most 1/4 of maxmemory and 1/8 of maxdisk; above it, writes wait",
    )
    scrub_rate: int = option(memory(1024), 4 * 1024**2, "bytes a second that are read from disk to find damage")
    page_checksums: bool = option(yes_no, True, "compute a checksum for each page written", mutable=True)
    strict_page_shape: bool = option(
        yes_no, False, "refuse a body that is not page_size x head_dim x itemsize bytes", mutable=True
    )
    notify_keyspace_events: str = option(letters("KEg$lshzxeAtdmn"), "", "keyspace events to publish", mutable=True)
    tracking_table_max_keys: int = option(
        integer(0, 2**31), 1_000_000, "keys that CLIENT TRACKING remembers; 0 is no limit in number", mutable=True
    )
    slowlog_log_slower_than: int = option(
        integer(-1, 2**53), 10_000, "microseconds a call takes to enter SLOWLOG; -1 is never", mutable=True
    )
    slowlog_max_len: int = option(integer(0, 100_000), 128, "number of entries in SLOWLOG", mutable=True)
    latency_monitor_threshold: int = option(
        integer(0, 2**31), 0, "milliseconds an event takes to enter LATENCY; 0 is never", mutable=True
    )
    loglevel: str = option(
        choice("debug", "verbose", "notice", "warning"), "notice", "how detailed the log is", mutable=True
    )
    logfile: str = option(path, "", "file of the log; empty is standard error")
    log_format: str = option(choice("text", "json"), "text", "plain text, or a JSON object a line")
    pidfile: str = option(path, "", "file for the process id")
    databases: int = option(integer(1, 1), 1, "number of databases: always one")
    save: str = option(Kind(" ".join), "", "ignored: there are no snapshots by time, see `store`")
    appendonly: bool = option(choice("no"), "no", "there is no append-only file, see `store`")

    file: Path | None = field(default=None, metadata={"line": False})  # where it came from
    given: set[str] = field(default_factory=set)  # parameters that were on the command line
    in_effect: dict[str, int] = field(default_factory=dict)  # the values of parameters that are `auto`
    chosen: set[str] = field(default_factory=set)  # parameters that were not given, and the server chose

    @classmethod
    def parameters(cls) -> dict[str, Field[Any]]:
        """Every parameter's declaration by its name in the file."""
        return {f.name.replace("_", "-"): f for f in fields(cls) if "kind" in f.metadata}

    @classmethod
    def paths(cls) -> list[str]:
        """The fields that hold the path of a file or directory."""
        return [declared.name for declared in cls.parameters().values() if declared.metadata["kind"] is path]

    def set(self, name: str, values: Sequence[str]) -> None:
        """Raises ConfigError."""
        declared = self.parameters().get(name.lower())
        if declared is None:
            hint = f"; {instead}" if (instead := _REMOVED.get(name.lower())) else ""
            raise ConfigError(f"unknown parameter '{name}'{hint}")
        kind = declared.metadata["kind"]
        try:
            value = kind.read(list(values))
        except ValueError as error:
            raise ConfigError(f"{name} {error}") from None
        setattr(self, declared.name, kind.add(getattr(self, declared.name), value) if kind.add else value)

    def split(self, name: str, value: str) -> list[str]:
        """The words of a value that came as one string, as CONFIG SET gives it."""
        kind = self.parameters()[name].metadata["kind"]
        if kind is quotas:
            return value.split() or [""]
        return value.split() if kind in (words, output_limits) else [value]

    def change(self, name: str, value: str) -> None:
        """Give a parameter a value as CONFIG SET does, in one string. Raises ConfigError."""
        declared = self.parameters()[name]
        if declared.metadata["kind"].whole:
            setattr(self, declared.name, getattr(Config(), declared.name))
        self.set(name, self.split(name, value))

    def value(self, name: str) -> Any:
        """A parameter's value."""
        return getattr(self, self.parameters()[name].name)

    def words(self, name: str) -> list[str]:
        """A parameter's value as the words of a line."""
        return self.spelled(name, self.value(name))

    @classmethod
    def spelled(cls, name: str, value: Any) -> list[str]:
        """Another value of a parameter as the words of a line."""
        return list(cls.parameters()[name].metadata["kind"].write(value))

    def get(self, name: str) -> str:
        """A parameter's value as CONFIG GET shows it: the value in effect where the parameter is `auto`."""
        return str(self.in_effect[name]) if name in self.in_effect else " ".join(self.words(name))

    @classmethod
    def is_mutable(cls, name: str) -> bool:
        return bool(cls.parameters()[name].metadata["mutable"])

    @classmethod
    def is_hidden(cls, name: str) -> bool:
        """Whether CONFIG GET hides it."""
        return bool(cls.parameters()[name].metadata["hidden"])

    @property
    def client_memory(self) -> int:
        """The bytes that all connections together may hold; 0 is no limit. A share is at least one large page."""
        if isinstance(self.maxmemory_clients, str):
            share = int(self.maxmemory_clients.rstrip("%"))
            return max((self.maxmemory or _NO_LIMIT_COUNTS_AS) * share // 100, _GREAT_PAGE)
        return self.maxmemory_clients

    @property
    def largest_command(self) -> int:
        """The most bytes of a command for which a client is not closed."""
        of_all = [self.client_memory] if self.client_memory else []
        return min(self.proto_max_bulk_len, self.client_query_buffer_limit, *of_all)

    def load(self, path: Path) -> None:
        """Take every line of a file. Raises ConfigError, which names file and line, and OSError."""
        self.file = path.absolute()
        for number, name, values in read_lines(path):
            try:
                self.set(name, values)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None


def read_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """The lines of a configuration file, without comments: number, name, values."""
    for number, line in enumerate(read_regular(path, _MOST_BYTES).splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        found = split_words(line)
        if found is None:
            raise ConfigError(f"{path}, line {number}: unbalanced quotes")
        if not found:  # NUL bytes separate words, and a crash of the machine can leave a file that ends with them
            raise ConfigError(f"{path}, line {number}: NUL bytes instead of a parameter's name")
        name, *values = (word.decode("utf-8", "surrogateescape") for word in found)
        yield number, name, values


def from_arguments(arguments: Sequence[str]) -> Config:
    """The configuration of a command line as redis-server takes it: an optional file, then `--name value ...`."""
    config = Config()
    rest = list(arguments)
    if rest and not rest[0].startswith("--"):
        config.load(Path(rest.pop(0)))
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"expected --name, got '{name}'")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        config.set(name[2:], values)
        config.given.add(name[2:].lower())
    return config
