"""`Keyspace` and its parts: values in memory, eviction, and the disk.

Knows the page contract and the core. Does not know commands, the protocol or sockets.
"""
