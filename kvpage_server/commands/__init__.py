"""What each command does, a module a family; importing the package fills the command table.

Knows the store and the values of replies; knows no socket.
"""

from kvpage_server.commands import (
    acl,
    block,
    client,
    command,
    configure,
    connection,
    counter,
    diagnose,
    expire,
    guard,
    inspection,
    keyspace,
    page,
    page_query,
    pubsub,
    request,
    save,
    server,
    set,
    string,
    transaction,
    why,
)

__all__ = [
    "acl",
    "block",
    "client",
    "command",
    "configure",
    "connection",
    "counter",
    "diagnose",
    "expire",
    "guard",
    "inspection",
    "keyspace",
    "page",
    "page_query",
    "pubsub",
    "request",
    "save",
    "server",
    "set",
    "string",
    "transaction",
    "why",
]
