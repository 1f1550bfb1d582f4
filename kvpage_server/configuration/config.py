"""Configuration: `name value` lines as redis.conf has them, `--name value` on the command line, CONFIG GET and SET.

Each parameter is declared once, as a field of `Config` with its kind, default, one line of documentation and whether it
may change while the server runs. A line that cannot be understood is refused with its number and what is allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from kvpage_server.core.inline import split_words
from kvpage_server.glob import glob
from kvpage_server.store.eviction.policies import POLICIES

_NO_LIMIT_COUNTS_AS = 4 * 1024**3  # bytes of maxmemory, where a share of it is asked for
_GREAT_PAGE = 65 * 1024**2  # bytes: 64 MiB and what is around them


class ConfigError(ValueError):
    """A parameter is unknown or its value is not allowed; the message says which, where, and what is."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a parameter's value is read from words, and written back as words.

    Where a parameter may stand on several lines, `add` joins a line's value to what there was. CONFIG SET replaces it
    all the same where it is `whole`.
    """

    read: Callable[[list[str]], Any]
    write: Callable[[Any], list[str]] = lambda value: [str(value)]
    add: Callable[[Any, Any], Any] | None = None
    whole: bool = False


def _one(words: list[str]) -> str:
    if len(words) != 1:
        raise ValueError(f"takes one value, got {len(words)}")
    return words[0]


def integer(low: int, high: int) -> Kind:
    """A whole number in a range."""

    def read(words: list[str]) -> int:
        word = _one(words)
        if not re.fullmatch(r"-?\d{1,18}", word) or not low <= int(word) <= high:
            raise ValueError(f"must be a whole number between {low} and {high}, got '{word}'")
        return int(word)

    return Kind(read)


_UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1024, "m": 1000**2, "mb": 1024**2, "g": 1000**3, "gb": 1024**3}


def _bytes(word: str) -> int:
    found = re.fullmatch(r"(\d{1,18})([a-z]*)", word.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"must be a number of bytes such as 0, 512mb or 4gb, got '{word}'")
    return int(found[1]) * _UNITS[found[2]]


def memory(low: int = 0) -> Kind:
    """A number of bytes, with or without a unit."""

    def read(words: list[str]) -> int:
        size = _bytes(_one(words))
        if size < low:
            raise ValueError(f"must be at least {low} bytes, got {size}")
        return size

    return Kind(read)


def _read_yes_no(words: list[str]) -> bool:
    word = _one(words).lower()
    if word not in ("yes", "no"):
        raise ValueError(f"must be yes or no, got '{word}'")
    return word == "yes"


def choice(*allowed: str) -> Kind:
    """One of a few words."""

    def read(words: list[str]) -> str:
        word = _one(words).lower()
        if word not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}, got '{word}'")
        return word

    return Kind(read)


def letters(allowed: str) -> Kind:
    """Any of some letters, together."""

    def read(words: list[str]) -> str:
        word = _one(words)
        if not set(word) <= set(allowed):
            raise ValueError(f"must be made of the letters {allowed}, got '{word}'")
        return word

    return Kind(read)


def _read_octal(words: list[str]) -> int:
    word = _one(words)
    if not re.fullmatch(r"[0-7]{1,4}", word) or int(word, 8) > 0o777:
        raise ValueError(f"must be permissions in octal between 0 and 777, got '{word}'")
    return int(word, 8)


def _read_memory_or_share(words: list[str]) -> int | str:
    word = _one(words)
    if re.fullmatch(r"\d{1,2}%|100%", word):
        return word
    return _bytes(word)


class OutputLimit(NamedTuple):
    """The bytes of unread replies: never above `hard`, and above `soft` only for `seconds`. 0 is no limit."""

    hard: int
    soft: int
    seconds: int


_CLIENT_CLASSES = ("normal", "replica", "pubsub")  # of connections; there are no replicas here


def _read_output_limits(words: list[str]) -> dict[str, OutputLimit]:
    if not words or len(words) % 4:
        raise ValueError(f"takes 4 values a class of clients: class, hard limit, soft limit, seconds; got {len(words)}")
    limits = {}
    for start in range(0, len(words), 4):
        name, hard, soft, seconds = words[start : start + 4]
        name = {"slave": "replica"}.get(name.lower(), name.lower())
        if name not in _CLIENT_CLASSES:
            raise ValueError(f"classes of clients are {', '.join(_CLIENT_CLASSES)}, got '{name}'")
        if not re.fullmatch(r"\d{1,9}", seconds):
            raise ValueError(f"seconds must be a whole number, got '{seconds}'")
        limits[name] = OutputLimit(_bytes(hard), _bytes(soft), int(seconds))
    return limits


def _write_output_limits(limits: dict[str, OutputLimit]) -> list[str]:
    return [word for name, limit in limits.items() for word in (name, *map(str, limit))]


def _read_quotas(words: list[str]) -> dict[str, int]:
    if words == [""]:
        return {}
    if not words or len(words) % 2:
        raise ValueError(f"takes 2 values a quota: a pattern of keys, bytes (0 for no limit); got {len(words)}")
    quotas: dict[str, int] = {}
    for pattern, limit in zip(words[::2], words[1::2], strict=True):
        if not pattern or re.search(r"\s", pattern):
            raise ValueError(f"pattern must not be empty or have spaces (use ? instead), got '{pattern}'")
        if pattern in quotas:
            raise ValueError(f"pattern '{pattern}' is given twice")
        glob(pattern.encode("utf-8", "surrogateescape"))
        quotas[pattern] = _bytes(limit)
    return quotas


def _write_quotas(quotas: dict[str, int]) -> list[str]:
    return [word for pattern, limit in quotas.items() for word in (pattern, str(limit))] or [""]


yes_no = Kind(_read_yes_no, lambda value: ["yes" if value else "no"])
text = Kind(_one)
path = Kind(_one)
words = Kind(lambda found: found, lambda value: value)
octal = Kind(_read_octal, lambda value: [f"{value:o}"])
memory_or_share = Kind(_read_memory_or_share)
output_limits = Kind(_read_output_limits, _write_output_limits, lambda old, new: {**old, **new})
quotas = Kind(_read_quotas, _write_quotas, lambda old, new: {**old, **new}, whole=True)
lines = Kind(lambda found: [found], lambda value: [word for line in value for word in line], lambda old, new: old + new)


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
    metrics_bind: list[str] = option(
        words, ["127.0.0.1", "-::1"], "addresses of metrics-port; other machines need a user and a password"
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
    cluster_config: str = option(path, "", "file that maps slots to servers, the same for all of them")
    cluster_node: str = option(text, "", "this server's id or host:port in cluster-config")
    appendfsync: str = option(
        choice("always", "everysec", "no"),
        "everysec",
        "when a write is on disk: before the reply, within a second, or when enough has gathered",
    )
    maxdisk: int = option(memory(), 0, "bytes of the store on disk; 0 is no limit")
    write_behind_limit: int = option(
        memory(1024**2), 256 * 1024**2, "bytes that may wait to be written to disk; above it, writes wait"
    )
    scrub_rate: int = option(memory(1024), 4 * 1024**2, "bytes a second that are read from disk to find damage")
    page_checksums: bool = option(yes_no, True, "compute a checksum for each page written", mutable=True)
    strict_page_shape: bool = option(
        yes_no, False, "refuse a body that is not page_size x head_dim x itemsize bytes", mutable=True
    )
    notify_keyspace_events: str = option(letters("KEg$lshzxeAtdmn"), "", "keyspace events to publish", mutable=True)
    tracking_table_max_keys: int = option(
        integer(0, 2**31), 1_000_000, "keys that CLIENT TRACKING remembers, 500 bytes each; 0 is no limit", mutable=True
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
            raise ConfigError(f"unknown parameter '{name}'")
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

    def words(self, name: str) -> list[str]:
        """A parameter's value as the words of a line."""
        declared = self.parameters()[name]
        return list(declared.metadata["kind"].write(getattr(self, declared.name)))

    def get(self, name: str) -> str:
        """A parameter's value as CONFIG GET tells it."""
        return " ".join(self.words(name))

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
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        found = split_words(line)
        if found is None:
            raise ConfigError(f"{path}, line {number}: unbalanced quotes")
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
