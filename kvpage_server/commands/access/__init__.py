"""Users: who can log in, and which commands, keys and channels each user may use.

Knows the command table, and no connections. `dispatch/` decides whether a client's command is refused.
"""
