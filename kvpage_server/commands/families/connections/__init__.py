"""The families of a connection: who it is, what it listens to and tracks, its transaction."""

from kvpage_server.commands.families.connections import caching, client, connection, pubsub, transaction

__all__ = ["caching", "client", "connection", "pubsub", "transaction"]
