"""A cluster that a URL names."""

from __future__ import annotations

from collections import Counter
from typing import Any
from urllib.parse import urlsplit

from kvpage_server.client.cluster.asking import Router
from kvpage_server.client.cluster.calls import ClusterCalls
from kvpage_server.client.cluster.nodes import SILENCE, Nodes
from kvpage_server.client.cluster.topology import SCHEMES, Address


def is_cluster(url: str) -> bool:
    """Whether a URL names a cluster."""
    return urlsplit(url).scheme in SCHEMES


class ClusterStore:
    """What is asked of it, and the connections to its nodes."""

    def __init__(self, url: str, verify: bool, options: dict[str, Any]) -> None:
        """`options` are those of `PageClient`. Raises ValueError."""
        options = dict(options)
        silence = options.pop("node_deadline", SILENCE)
        replicas = options.pop("read_from_replicas", False)
        address = Address(url)
        self.nodes = Nodes(address.url, options, silence)
        self.calls = ClusterCalls(Router(address, replicas), verify, Counter())
