"""The families of the server: how it is doing, its parameters, its users, its commands, its disk."""

from kvpage_server.commands.families.server import acl, command, config, diagnose, server

__all__ = ["acl", "cluster", "command", "config", "diagnose", "save", "server"]
