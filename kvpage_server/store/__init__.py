"""Where pages live: `Keyspace`, which joins what lies in memory, what decides on what goes, and the disk.

Knows the page contract and the core; knows nothing of commands, of the protocol or of sockets.
"""
