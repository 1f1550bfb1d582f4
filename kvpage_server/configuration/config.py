"""Configuration: `name value` lines as in redis.conf, `--name value` on the command line, CONFIG GET and SET.

Each parameter is declared once, as a field of `Config`, with its kind, its default, one line of documentation, and
whether CONFIG SET may change it. An invalid line raises an error with the line's number and the allowed values.
"""

from __future__ import annotations

import codecs
import errno
import logging
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from functools import lru_cache
from mmap import PAGESIZE
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from platformdirs import user_data_path

from kvpage_server import __version__
from kvpage_server.bounded import read_regular
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
    split_at_spaces,
    text,
    token,
    words,
    yes_no,
    zmq_address,
)
from kvpage_server.core.protocol import split_words
from kvpage_server.store.disk.database import FILE, NECESSARY_FILES, STORE_FILES
from kvpage_server.store.eviction.policies import POLICIES
from kvpage_server.system.durable import private_directory
from kvpage_server.system.process import usable_memory
from kvpage_server.system.text import cut

# -- Paths -------------------------------------------------------------------------------------------------------------
#
# `--check-config` reports files and directories that cannot be written, and a start reports them before the server is
# ready. The checks change no file.

_LONGEST_SOCKET = 107 if sys.platform == "linux" else 103  # bytes of a unix socket's path at most


_REMEDY = "Name another directory with --dir, or do without a disk: --store memory"
_NEW_FILE = 4096  # bytes that a new file needs
_NEW_STORE = 20 * max(PAGESIZE, 4096)  # bytes of the files of an empty store, in pages of LMDB


def check_paths(config: Config) -> None:
    """Check that the configured files and directories can be written, without changing them, and that the server
    would not write over another file.

    Raises ConfigError with the parameter, the path and the reason.
    """
    check_separate(config)
    for name, value in (("pidfile", config.pidfile), ("logfile", config.logfile)):
        if value:
            _check_file(name, Path(value).absolute())
    if config.unixsocket:
        _check_socket("unixsocket", Path(config.unixsocket))
    for name, socket in _event_sockets(config):
        _check_socket(name, socket)
    if config.store == "tiered":
        try:
            _check_store(Path(config.dir) if "dir" in config.chosen else Path.cwd())
        except ConfigError as error:
            raise (ConfigError(f"{error}. {_REMEDY}") if "dir" in config.chosen else error) from None


def check_separate(config: Config) -> None:
    """Check that no file that the server writes is another file of the configuration or of the store.

    `Path.resolve` raises RuntimeError for links that name each other, `realpath` does not.
    """
    names = [name for name in config.paths() if name != "dir" and getattr(config, name)]
    places = {name.replace("_", "-"): Path(os.path.realpath(getattr(config, name))) for name in names}
    places |= {name: Path(os.path.realpath(socket)) for name, socket in _event_sockets(config)}
    if config.file:
        places["the configuration file"] = Path(os.path.realpath(config.file))
    store = Path(os.path.realpath(config.dir))
    for name in ("pidfile", "logfile", "unixsocket", "kv-events", "kv-events-replay"):
        place = places.get(name)
        if place is None or place.is_char_device():
            continue
        if place.parent == store and place.name.startswith(STORE_FILES):
            raise ConfigError(f"{name}: {place} is a file of the store")
        for other, its_place in places.items():
            if its_place == place and other != name:
                raise ConfigError(f"{name}: {place} is also {other}")
    if config.pidfile and places["pidfile"].is_file() and not _is_pidfile(places["pidfile"]):
        raise ConfigError(f"pidfile: {config.pidfile} exists and contains no process id")


def _event_sockets(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the unix sockets of KV events, by parameter; ZMQ makes others without a file."""
    for name in ("kv-events", "kv-events-replay"):
        kind, _, place = config.value(name).partition("://")
        if kind == "ipc" and not place.startswith(("@", "*")):
            yield name, Path(place)


def _is_pidfile(path: Path) -> bool:
    """Return whether a file is empty, or has only a number. Raises ConfigError if it cannot be read."""
    try:
        content = read_regular(path, _MOST_BYTES).strip()
    except OSError as error:
        raise ConfigError(f"pidfile: {path} cannot be read: {error.strerror}") from None
    return not content or content.isdigit()


def _check_store(place: Path) -> None:
    """Check that the store in a directory can be opened, or a new one created, together with the directory."""
    _check_link("dir", place / FILE)
    for name in NECESSARY_FILES:
        if os.path.lexists(place / name):
            _check_file("dir", place / name, os.O_RDWR)
    is_new = not (place / FILE).exists()
    while not place.exists() and place != place.parent:
        place = place.parent
    _check_directory("dir", place, needs=_NEW_STORE if is_new else 0)


def _check_file(name: str, path: Path, mode: int = os.O_WRONLY) -> None:
    if not path.exists():
        target = Path(os.path.realpath(path)) if path.is_symlink() else path
        _check_link(name, target)  # a link that leads to itself
        _check_directory(name, target.parent, needs=_NEW_FILE)
    elif path.is_dir():
        raise ConfigError(f"{name}: {path} is a directory")
    elif not path.is_file() and not path.is_char_device():  # /dev/null is allowed; a pipe would wait for its reader
        raise ConfigError(f"{name}: {path} is not a regular file")
    else:
        try:
            os.close(os.open(path, mode | os.O_NOCTTY | os.O_NONBLOCK))
        except OSError as error:
            raise ConfigError(f"{name}: {path} cannot be written: {error.strerror}") from None


def _check_socket(name: str, path: Path) -> None:
    if len(os.fsencode(path)) > _LONGEST_SOCKET:
        raise ConfigError(f"{name}: {path} is longer than {_LONGEST_SOCKET} bytes")
    _check_link(name, path)
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{name}: {path} exists and is not a socket")
    _check_directory(name, path.absolute().parent)


def _check_link(name: str, path: Path) -> None:
    """Check that a path is no link to a file that does not exist. No socket can replace it, and no store should: the
    disk with the store may not be mounted.
    """
    if path.is_symlink() and not path.exists():
        raise ConfigError(
            f"{name}: {path} is a link to {os.readlink(path)}, which does not exist: is its disk mounted?"
        )


def _check_directory(name: str, path: Path, *, needs: int = 0) -> None:
    """Check that a file can be created in a directory, and has space for the bytes that a start writes at least."""
    if not path.is_dir():
        raise ConfigError(f"{name}: {path} {'is not a directory' if path.exists() else 'does not exist'}")
    try:
        with TemporaryFile(dir=path) as file:  # os.access returns True for root and /proc, where no file can be created
            file.write(bytes(needs))
    except OSError as error:
        if needs or error.errno not in (errno.ENOSPC, errno.EDQUOT):  # existing files can still be used
            raise ConfigError(f"{name}: no file can be created in {path}: {error.strerror}") from None


_NO_LIMIT_COUNTS_AS = 4 * 1024**3  # bytes of which a share of maxmemory is computed if maxmemory is 0
_MOST_BYTES = 64 * 1024**2  # bytes of a configuration file
_LARGE_PAGE_COMMAND = 65 * 1024**2  # bytes of a command with a page of 64 MiB

_NO_MAPS = "kvpage-server has no maps of slots: use servers side by side, or `store cluster` (docs/scaling.md)"
_REMOVED = {"cluster-config": _NO_MAPS, "cluster-node": _NO_MAPS}  # former parameters, and their replacement
_OTHER_VERSION = f"kvpage-server {__version__} has none of this name: remove it, `kvpage-server --help` lists all"


class ConfigError(ValueError):
    """Error: a parameter is unknown, or has an invalid value.

    The message names the parameter, its line if it is in a file, and the allowed values.
    """

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


def option(
    kind: Kind, default: Any, doc: str, *, mutable: bool = False, hidden: bool = False, secret: bool = False
) -> Any:
    """Declare a parameter. Its name is the name of the field, with dashes.

    CONFIG GET does not return a `hidden` parameter, and returns a `secret` one to administrators only.
    """
    metadata = {"kind": kind, "doc": doc, "mutable": mutable, "hidden": hidden, "secret": secret}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class Config:
    """All parameters of the server, with their defaults. Fields without `option` are no parameters."""

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
        token,
        "",
        "token of /metrics, also beside passwords, and of the page without a password; empty: a new one at each start",
        secret=True,
    )
    web_origin: list[str] = option(
        origins, [], "sites, such as https://store.example, under which a proxy offers the web page"
    )
    protected_mode: bool = option(
        yes_no, True, "without a password, accept connections from this machine only", mutable=True
    )
    requirepass: str = option(text, "", "password of the user `default`", mutable=True, secret=True)
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
        "bytes that all connections may hold, at least 64kb, or a share of maxmemory (4gb without it); 0 is no limit",
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
        "bytes of the store on disk, at least 16mb; 0 is no limit; auto is half of free space and store together",
    )
    page_code: str = option(
        choice("off", "disk", "idle", "always"),
        "off",
        "what has the lossless code, which takes 0.7 of the bytes: nothing, pages on disk, in memory also blocks that "
        "are idle, or all blocks as soon as they are on disk",
    )
    write_behind_limit: int = option(
        memory(1024**2),
        256 * 1024**2,
        "bytes that may wait to be written to disk, at most 1/4 of maxmemory and 1/8 of maxdisk; above it, writes wait",
    )
    scrub_rate: int = option(
        memory(), 4 * 1024**2, "bytes a second that are read from disk to find damage; 0 reads nothing"
    )
    page_checksums: bool = option(yes_no, True, "compute a checksum for each page written", mutable=True)
    strict_page_shape: bool = option(
        yes_no, False, "refuse a body that is not page_size x head_dim x itemsize bytes", mutable=True
    )
    notify_keyspace_events: str = option(letters("KEg$lshzxeAtdmn"), "", "keyspace events to publish", mutable=True)
    kv_events: str = option(
        zmq_address(may_connect=True),
        "",
        "address of ZMQ, such as tcp://127.0.0.1:5557, on which blocks that are stored and removed are published",
    )
    kv_events_replay: str = option(zmq_address(), "", "address of ZMQ from which subscribers get the last events again")
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

    file: Path | None = field(default=None, metadata={"line": False})  # the configuration file
    given: set[str] = field(default_factory=set)  # names of parameters on the command line
    in_effect: dict[str, int] = field(default_factory=dict)  # numbers in effect, of parameters whose value is `auto`
    chosen: set[str] = field(default_factory=set)  # names of parameters that `choose_defaults` has set
    places: list[str] = field(default_factory=list)  # file and line of the first `user` lines, which are in the file

    @classmethod
    def parameters(cls) -> dict[str, Field[Any]]:
        """Return the declarations of all parameters, by their names in the file."""
        return {f.name.replace("_", "-"): f for f in fields(cls) if "kind" in f.metadata}

    @classmethod
    def paths(cls) -> list[str]:
        """Return the names of the fields with paths of files and directories."""
        return [declared.name for declared in cls.parameters().values() if declared.metadata["kind"] is path]

    def set(self, name: str, values: Sequence[str]) -> None:
        """Set a parameter from the words of a line, or merge them into its value (`Kind.add`). Raises ConfigError."""
        declared = self.parameters().get(name.lower())
        if declared is None:
            raise ConfigError(f"unknown parameter '{name}'; {_REMOVED.get(name.lower(), _OTHER_VERSION)}")
        kind = declared.metadata["kind"]
        try:
            value = kind.read(list(values))
            value = kind.add(getattr(self, declared.name), value) if kind.add else value
        except ValueError as error:
            raise ConfigError(f"{name} {error}") from None
        setattr(self, declared.name, value)

    def split(self, name: str, value: str) -> list[str]:
        """Return the words of a value that is given as one string, as in CONFIG SET."""
        kind = self.parameters()[name].metadata["kind"]
        if kind is quotas:
            return split_at_spaces(value) or [""]
        return split_at_spaces(value) if kind in (words, output_limits) else [value]

    def change(self, name: str, value: str) -> None:
        """Change a parameter to a value that is given as one string, as in CONFIG SET. Raises ConfigError."""
        declared = self.parameters()[name]
        if declared.metadata["kind"].whole:
            setattr(self, declared.name, getattr(Config(), declared.name))
        self.set(name, self.split(name, value))

    def value(self, name: str) -> Any:
        """Return the value of the parameter with this name in the file."""
        return getattr(self, self.parameters()[name].name)

    def words(self, name: str) -> list[str]:
        """Return a parameter's value as the words of a line."""
        return self.words_of(name, self.value(name))

    @classmethod
    def words_of(cls, name: str, value: Any) -> list[str]:
        """Return the value of a parameter `name` as the words of a line of the file."""
        return list(cls.parameters()[name].metadata["kind"].write(value))

    def get(self, name: str) -> str:
        """Return a parameter's value as CONFIG GET returns it. For `auto`, that is the number in effect."""
        return str(self.in_effect[name]) if name in self.in_effect else " ".join(self.words(name))

    @classmethod
    def is_mutable(cls, name: str) -> bool:
        """Return whether CONFIG SET may change a parameter."""
        return bool(cls.parameters()[name].metadata["mutable"])

    @classmethod
    def is_shown(cls, name: str, *, to_administrator: bool) -> bool:
        """Return whether CONFIG GET returns a parameter: to an administrator, or to other users."""
        metadata = cls.parameters()[name].metadata
        return not metadata["hidden"] and (to_administrator or not metadata["secret"])

    @property
    def client_memory(self) -> int:
        """Bytes that all connections together may hold (maxmemory-clients); 0 for no limit.

        A share of maxmemory is at least the size of one large page.
        """
        return _client_memory(self.maxmemory_clients, self.maxmemory)

    @property
    def largest_command(self) -> int:
        """Bytes of the largest command that the server accepts. It closes a client that sends a larger one."""
        of_all = [self.client_memory] if self.client_memory else []
        return min(self.proto_max_bulk_len, self.client_query_buffer_limit, *of_all)

    def load(self, path: Path) -> None:
        """Set the parameters in all lines of a file. Raises OSError, or ConfigError with the file and the line."""
        self.file = path.absolute()
        for number, name, values in read_lines(path):
            try:
                self.set(name, values)
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from None
            if name.lower() == "user":
                self.places.append(f"{path}, line {number}")

    def user_lines(self) -> Iterator[tuple[str, list[bytes]]]:
        """Yield the place of each `user` line and option, for error messages, and its words after `user`.

        The place of an option is the user's name alone: rules in the same word may have a password.
        """
        for i, line in enumerate(self.user):
            name = " ".join(line[:1]).split()[:1]
            place = self.places[i] if i < len(self.places) else " ".join(["user", *name])
            yield place, [os.fsencode(word) for word in line]


@lru_cache(maxsize=16)  # it is asked for whenever bytes arrive
def _client_memory(most: int | str, maxmemory: int) -> int:
    """Return `Config.client_memory` for the values of maxmemory-clients and maxmemory."""
    if isinstance(most, str):
        return max((maxmemory or _NO_LIMIT_COUNTS_AS) * int(most.rstrip("%")) // 100, _LARGE_PAGE_COMMAND)
    return most


def read_lines(path: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (line number, name, values) for each line of a configuration file that is not empty or a comment.

    Raises OSError, or ConfigError for a line with unbalanced quotes.
    """
    content = read_regular(path, _MOST_BYTES).removeprefix(codecs.BOM_UTF8)  # some editors write it
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        found = split_words(line)
        if found is None:
            raise ConfigError(f"{path}, line {number}: unbalanced quotes")
        if not found:  # NUL bytes count as spaces; after a crash of the machine, a file may end with them
            raise ConfigError(f"{path}, line {number}: NUL bytes instead of a parameter's name")
        name, *values = (word.decode("utf-8", "surrogateescape") for word in found)
        yield number, name, values


def from_arguments(arguments: Sequence[str]) -> Config:
    """Return the configuration from command-line arguments as of redis-server: an optional file, then `--name value
    ...`.

    Raises ConfigError for an unknown parameter or an invalid value, OSError for a file that cannot be read.
    """
    config = Config()
    rest = list(arguments)
    if rest and not rest[0].startswith("--"):
        config.load(Path(rest.pop(0)))
    while rest:
        name = rest.pop(0)
        if not name.startswith("--"):
            raise ConfigError(f"expected --name, got '{name}'")
        if name in ("--check-config", "--help", "--version"):
            raise ConfigError(f"{name} is no parameter: it must be the first argument")
        values = []
        while rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        try:
            config.set(name[2:], values)
        except ConfigError as error:
            if len(values) > 1 and Path(values[-1]).is_file():
                raise ConfigError(f"{error}; a configuration file such as {values[-1]} is the first argument") from None
            raise
        config.given.add(name[2:].lower())
    return config


# -- defaults ----------------------------------------------------------------------------------------------------------
#
# Without a configuration file, two defaults depend on the machine. `maxmemory` is a quarter of the machine's memory, or
# of the control group's limit. `dir` is the platform's directory for a user's data. The command line overrides both.
#
# `maxdisk auto` is the default also with a file, because other programs need the disk, too.

log = logging.getLogger("kvpage")

SHARE = 4  # without a file, maxmemory is 1/4 of the memory
SMALL_MEMORY = 1 << 20  # bytes: a start warns of a smaller maxmemory, as that of Redis does
SMALLEST_DISK = 16 << 20  # least bytes of a store with `maxdisk auto`
_MIB = 1 << 20


def choose_defaults(config: Config) -> None:
    """Choose maxmemory and dir for a server without a configuration file, unless they were given on the command line.

    Add their names to `config.chosen`. Relative file names on the command line refer to the directory in which the
    server was started, so they become absolute.
    """
    if config.file is not None:
        return
    if "maxmemory" not in config.given:
        config.maxmemory = max(usable_memory() // SHARE // _MIB, 1) * _MIB
        config.chosen.add("maxmemory")
    if "dir" not in config.given and config.store == "tiered":
        for name in config.paths():
            if value := getattr(config, name):
                setattr(config, name, os.path.abspath(value))
        config.dir = str(data_directory())
        config.chosen.add("dir")


def enter_data_directory(config: Config) -> None:
    """Create the directory that `choose_defaults` has chosen, if any, and change to it. Raises ConfigError.

    Log a warning if the directory in which the server was started has a store: older versions have created it there,
    and its user should not think that it is lost.
    """
    if "dir" not in config.chosen:
        return
    before = Path.cwd()
    try:
        private_directory(Path(config.dir))
        os.chdir(config.dir)
    except OSError as error:
        raise ConfigError(
            f"the store belongs into {config.dir}, but {error.filename}: {error.strerror}. {_REMEDY}"
        ) from None
    if (before / FILE).exists() and not before.samefile(config.dir):
        use = f"kvpage-server --dir {shlex.quote(str(before))}"
        log.warning("%s is NOT used; this store lies in %s. To use the other: %s", before / FILE, config.dir, use)


def data_directory() -> Path:
    """Return the server's directory for data: in XDG_DATA_HOME on Linux, in Application Support on macOS."""
    return user_data_path("kvpage", appauthor=False).absolute()


def default_maxdisk(directory: Path) -> int:
    """Return the limit in bytes of a store in this directory with `maxdisk auto`.

    It is half of the sum of the store's file and the free space, but at least the size of the file, and SMALLEST_DISK.
    """
    file = directory / FILE
    holds = file.stat().st_size if file.exists() else 0
    return max((shutil.disk_usage(directory).free + holds) // 2, holds, SMALLEST_DISK)
