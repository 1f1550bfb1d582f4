"""The families of the server: information, parameters, users, commands, the disk."""

from kvpage_server.commands.families.server import acl, command, config, diagnose, server

__all__ = ["acl", "command", "config", "diagnose", "server"]
