"""`Keyspace` and its parts: what is in memory, what decides what is evicted, and the disk.

Knows the page contract and the core. Does not know commands, the protocol or sockets.
"""
