"""`Keyspace` and its parts: values in memory, eviction, and the disk.

The package depends on the page contract and the core, and not on commands, the protocol or sockets.
"""
