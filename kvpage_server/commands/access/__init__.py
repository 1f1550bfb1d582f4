"""Users: their passwords, and the commands, keys and channels that each may use.

This package depends on the command table, and on no connection. `dispatch/` refuses the commands of clients.
"""
