"""CLUSTER: refused, so that clients of Redis Cluster recognise a server that is not a node of one."""

from __future__ import annotations

from functools import partial

from kvpage_server.commands.context import Client
from kvpage_server.commands.registry import command, container
from kvpage_server.core import Argument
from kvpage_server.resp.reply import Reply, ReplyError

_cluster = partial(
    command,
    flags="stale",
    group="cluster",
    since="3.0.0",
    summary="Refused, as by a Redis without cluster support.",
)

container("cluster", group="cluster", since="3.0.0", summary="A container for Redis Cluster's commands.")


@_cluster("cluster|info", reply="bulk")
@_cluster("cluster|keyslot key", reply="integer")
@_cluster("cluster|myid", reply="bulk")
@_cluster("cluster|nodes", reply="bulk")
@_cluster("cluster|shards", since="7.0.0", reply="array of map")
@_cluster("cluster|slots", reply="array of array")
def cluster_disabled(client: Client, args: list[Argument]) -> Reply:
    """Raises ReplyError, from which a client of a cluster knows that this server stands alone."""
    raise ReplyError("ERR This instance has cluster support disabled")
