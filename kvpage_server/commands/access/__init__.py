"""Users: who may come in, and which commands, keys and channels each may use.

Knows the command table. Knows no connection: what a client is refused is decided in `dispatch/`.
"""
