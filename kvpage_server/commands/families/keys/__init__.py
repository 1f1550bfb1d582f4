"""The families of keys and their values as Redis has them: keys, strings, counters, sets, expiry."""

from kvpage_server.commands.families.keys import expire, inspection, keyspace, set, string

__all__ = ["expire", "inspection", "keyspace", "set", "string"]
