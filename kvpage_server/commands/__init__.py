"""What each command does, a module a family; importing the package fills the command table.

Knows the store and the values of replies; knows no socket.
"""

from kvpage_server.commands import (
    connection,
    counter,
    expire,
    inspection,
    keyspace,
    page,
    pubsub,
    server,
    string,
    transaction,
)

__all__ = [
    "connection",
    "counter",
    "expire",
    "inspection",
    "keyspace",
    "page",
    "pubsub",
    "server",
    "string",
    "transaction",
]
