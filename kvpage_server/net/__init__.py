"""Connections: listeners, sessions, transports, and the memory limits of connections.

The package runs commands through `commands.dispatch`; `commands` does not import it.
"""
