"""Users: their passwords, and the commands, keys and channels that each may use.

This package depends on the command table, and not on connections. `dispatch/` uses it to refuse commands of clients.
"""
