"""The store behind a URL that names more than one server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
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
from kvpage_server.client.errors import PageClientError
from kvpage_server.client.wire.connection import PagePool
from kvpage_server.client.wire.deadline import Deadline

PAUSE = 0.05  # seconds until something is attempted again


@dataclass(frozen=True)
class Several:
    """Servers that form one store: what to ask them, and the connections."""

    calls: ClusterCalls | SideBySideCalls
    peers: Peers

    def connections(self, node: Hashable) -> PagePool:
        """Connections to a node that has keys. Raises Disconnected if it is left alone."""
        self.peers.check(node)
        return self.peers.pool(node, replica=False)

    @contextmanager
    def attempt(self, node: Hashable, end: Deadline) -> Iterator[None]:
        """To do something at a node that has to be tried again when nothing comes of it. Raises what it came to when
        that is of no use, or there is no time for it."""
        failure: PageClientError | None = None
        try:
            yield
        except PageClientError as error:
            failure = error
            if not self.calls.strayed(error) or end.seconds_left() <= PAUSE:
                raise
        finally:
            self.peers.remember(node, failure)
            del failure  # it has this frame


def names_several(url: str) -> bool:
    """Whether a URL names more than one server."""
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
