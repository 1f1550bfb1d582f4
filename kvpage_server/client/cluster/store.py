"""What a URL names that is more than one server."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from kvpage_server.client.calls import Calls
from kvpage_server.client.cluster.asking import Router
from kvpage_server.client.cluster.calls import ClusterCalls
from kvpage_server.client.cluster.peers import SILENCE, Peers
from kvpage_server.client.cluster.side_by_side import Rendezvous, SideBySideCalls, lists_several, servers_of
from kvpage_server.client.cluster.topology import SCHEMES, Address


@dataclass(frozen=True)
class Several:
    """Servers that are one store: what is asked of them, and the connections to them."""

    calls: ClusterCalls | SideBySideCalls
    peers: Peers


def names_several(url: str) -> bool:
    """Whether a URL names more than one server, so that nothing but pages and blocks can be asked for."""
    return urlsplit(url).scheme in SCHEMES or lists_several(url)


def several(url: str, verify: bool, options: dict[str, Any]) -> Several | None:
    """The store that a URL names; None when it is one server's. `options` are those of `PageClient`.

    Raises ValueError."""
    if not names_several(url):
        return None
    address = Address(url) if urlsplit(url).scheme in SCHEMES else None
    options = {**options, **(address.options if address else {})}  # the URL's win, as with redis-py
    silence = options.pop("node_deadline", SILENCE)
    if address:
        replicas = options.pop("read_from_replicas", False)
        peers = Peers(address.url, options, silence, address.seeds)
        return Several(ClusterCalls(Router(address, replicas), verify, Counter()), peers)
    servers = servers_of(url)
    calls = SideBySideCalls(Rendezvous(servers), Calls(connections=1, verify=verify))
    return Several(calls, Peers(attrgetter("url"), options, silence, servers))
