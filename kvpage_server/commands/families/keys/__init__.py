"""The families of keys and their values, as in Redis: keys, strings, counters, sets, expiry."""

from kvpage_server.commands.families.keys import expire, inspection, keyspace, set, string

__all__ = ["expire", "inspection", "keyspace", "set", "string"]
