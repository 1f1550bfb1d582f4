"""The families of connections: authentication, CLIENT, publish and subscribe, tracking, transactions."""

from kvpage_server.commands.families.connections import caching, client, connection, pubsub, transaction

__all__ = ["caching", "client", "connection", "pubsub", "transaction"]
