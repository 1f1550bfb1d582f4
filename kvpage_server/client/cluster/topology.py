"""The URL of a cluster, and its map: the nodes of each slot."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from redis.crc import key_slot

from kvpage_server.client.errors import WrongReply
from kvpage_server.client.wire.exchange import Request, command
from kvpage_server.client.wire.reply import Values, only

# -- Options in a cluster's URL, such as ``valkey-cluster://a:7000,b:7000?node_deadline=1`` ----------------------------

_CERT_REQS = {name: name for name in ("none", "optional", "required")}
_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def _seconds(text: str) -> float:
    value = float(text) if text.isascii() else math.nan
    if not 0 < value < math.inf:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text) if text.isascii() else 0
    if value < 1:
        raise ValueError
    return value


_SECONDS = _seconds, "a number of seconds, more than 0"
_COUNT = _count, "a whole number, 1 or more"
_FLAG = _TRUTH.__getitem__, "true or false"
_TEXT = str, "a text"
_Kind = tuple[Callable[[str], Any], str]

_ALL: dict[str, _Kind] = {
    "node_deadline": _SECONDS,
    "read_from_replicas": _FLAG,
    "client_name": _TEXT,
    "max_connections": _COUNT,
    "password": _TEXT,
    "protocol": ({"2": 2, "3": 3}.__getitem__, "2 or 3"),
    "socket_connect_timeout": _SECONDS,
    "socket_keepalive": _FLAG,
    "socket_timeout": _SECONDS,
    "username": _TEXT,
}
_TLS: dict[str, _Kind] = {
    "ssl_ca_certs": _TEXT,
    "ssl_ca_path": _TEXT,
    "ssl_cert_reqs": (_CERT_REQS.__getitem__, "none, optional or required"),
    "ssl_certfile": _TEXT,
    "ssl_check_hostname": _FLAG,
    "ssl_ciphers": _TEXT,
    "ssl_keyfile": _TEXT,
    "ssl_password": _TEXT,
}


def options_of(query: str, *, tls: bool) -> dict[str, Any]:
    """Return the options in the query of a cluster's URL, with their values decoded.

    TLS options are allowed only with `tls`. Raises ValueError with the problem and the allowed values.
    """
    allowed, found = {**_ALL, **_TLS} if tls else _ALL, dict[str, Any]()
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name in _TLS and not tls:
            raise ValueError(f"the option {name} of a cluster's URL needs rediss-cluster://")
        if name not in allowed:
            raise ValueError(f"unknown option {name!r:.60} in a cluster's URL; allowed: {', '.join(allowed)}")
        if name in found:
            raise ValueError(f"the option {name} is given twice in a cluster's URL")
        read, form = allowed[name]
        try:
            if not text:
                raise ValueError
            found[name] = read(text)
        except (KeyError, ValueError):
            raise ValueError(f"the option {name} of a cluster's URL must be {form}, got {text!r:.60}") from None
    return found


SLOTS = 16384
SCHEMES = {"valkey-cluster": "redis", "redis-cluster": "redis", "rediss-cluster": "rediss"}
slot_of = key_slot  # takes a key as bytes: the CRC of the part in its first braces, or of all of it
_HOST = re.compile(r"[\w.:%-]+")  # a name or an address; no separator of a URL
_TAG = re.compile(rb"[^{]*\{[^}]+\}")


def has_tag(name: bytes) -> bool:
    """Return whether a name has a part in braces, so that all keys with this name are in the same slot."""
    return _TAG.match(name) is not None


class Node(NamedTuple):
    """The address of a server of the cluster."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Shard:
    """The servers of the same slots: a primary and its replicas."""

    primary: Node
    replicas: tuple[Node, ...] = ()


class SlotMap:
    """The map from each hash slot of the cluster to its shard, as far as known. `moved` changes it; a refresh replaces
    it.
    """

    def __init__(self, ranges: Iterable[tuple[int, int, Shard]] = ()) -> None:
        """Create a map from ranges: the first slot, the last slot, and their shard."""
        self._shards: list[Shard | None] = [None] * SLOTS
        for first, last, shard in ranges:
            self._shards[first : last + 1] = [shard] * (last + 1 - first)
        self._distinct: list[Shard] | None = None  # the shards, each once; None after a slot has moved

    def shard(self, slot: int) -> Shard | None:
        """Return the shard that serves a slot, or None if it is unknown."""
        return self._shards[slot]

    def moved(self, slot: int, to: Node) -> None:
        """Note that the node `to` serves a slot as primary. A new primary has no replicas until the map is
        refreshed.
        """
        shard = self._shards[slot]
        if shard is None or shard.primary != to:
            self._shards[slot] = Shard(to)
            self._distinct = None

    def primaries(self) -> list[Node]:
        return list(dict.fromkeys(shard.primary for shard in self._each_shard()))

    def _each_shard(self) -> list[Shard]:
        """Return every shard once, in the order of slots. To look through all slots for each call would take 10 ms."""
        if (found := self._distinct) is None:
            by_identity = {id(shard): shard for shard in self._shards if shard}
            found = self._distinct = [*dict.fromkeys(by_identity.values())]
        return found

    def nodes(self) -> list[Node]:
        """Return all nodes, primaries first."""
        shards = self._each_shard()
        return [*dict.fromkeys([*(s.primary for s in shards), *(node for s in shards for node in s.replicas)])]


def ask_slots(of: Node) -> Request[SlotMap]:
    """Return the request for a node's map of slots."""
    text = command(b"CLUSTER", b"SLOTS")
    return Request(lambda: iter((text,)), Values, lambda values: SlotMap(ranges_of(only(values), of)))


def ranges_of(value: Any, asked: Node) -> Iterator[tuple[int, int, Shard]]:
    """Yield (first slot, last slot, shard) from a reply to CLUSTER SLOTS of the node `asked`. Raises WrongReply."""
    if not isinstance(value, list):
        raise WrongReply.instead_of("the cluster's slots", value)
    for entry in value:
        try:
            first, last, *nodes = entry
            primary, *replicas = [_named(bytes(host or b"").decode(), int(port), asked) for host, port, *_ in nodes]
            if not 0 <= first <= last < SLOTS:
                raise ValueError(f"there are no slots {first} to {last}")
        except (TypeError, ValueError) as error:
            raise WrongReply(f"a range of slots makes no sense ({error}): {entry!r:.80}") from None
        yield first, last, Shard(primary, tuple(replicas))


def redirection(line: str, asked: Node) -> tuple[int, Node] | None:
    """Return the slot and the node in a MOVED or ASK error of the node `asked`; None if the error is malformed."""
    _, _, rest = line.partition(" ")
    slot, _, address = rest.partition(" ")
    host, _, port = address.rpartition(":")
    if not (slot.isascii() and slot.isdigit() and int(slot) < SLOTS):
        return None
    if not (port.isascii() and port.isdigit()):
        return None
    try:
        return int(slot), _named(host.strip("[]"), int(port), asked)
    except ValueError:
        return None


def _named(host: str, port: int, asked: Node) -> Node:
    """Return the node that `asked` names in a reply. Raises ValueError for text that is no host, and for a port that is
    none, such as 0 of a node that has only TLS.

    An empty host, or "?", which stands for an unknown host name, is that of `asked`.
    """
    if host in ("", "?"):
        host = asked.host
    elif not _HOST.fullmatch(host):
        raise ValueError(f"{host!r:.60} is not a host")
    elif ":" in host:
        ip_address(host)
    if not 0 < port < 65536:
        raise ValueError(f"{port} is not a port")
    return Node(host, port)


class Address:
    """A cluster's URL: the nodes that it names (`seeds`), and the options of the connections to each node."""

    def __init__(self, url: str) -> None:
        """Parse a URL. Raises ValueError."""
        parts = urlsplit(url)
        form = "a cluster's URL is valkey-cluster://host:port,host:port (or redis-cluster://, rediss-cluster://)"
        if parts.scheme not in SCHEMES or not parts.netloc:
            raise ValueError(f"{form}, got {parts.scheme or url}")
        if parts.path not in ("", "/", "/0") or parts.fragment:
            raise ValueError(f"{form}; a cluster has one database, 0, got {parts.path!r}")
        user, _, hosts = parts.netloc.rpartition("@")
        self._scheme, self._user = SCHEMES[parts.scheme], f"{user}@" if user else ""
        self.options = options_of(parts.query, tls=self._scheme == "rediss")
        self.seeds = [_node(host, form) for host in hosts.split(",")]

    def url(self, node: Node) -> str:
        """Return the URL of a node."""
        return f"{self._scheme}://{self._user}{node}"


def _node(text: str, form: str) -> Node:
    found = urlsplit(f"//{text}")
    try:
        host, port = found.hostname, found.port
    except ValueError as error:
        raise ValueError(f"{form}; {text!r}: {error}") from None
    if not host or port == 0:
        raise ValueError(f"{form}; {text!r} has no host or port")
    return Node(host, 6379 if port is None else port)
