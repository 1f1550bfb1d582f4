"""The families of the server: INFO, CONFIG, ACL, COMMAND, SLOWLOG, LATENCY, MONITOR, SAVE, CLUSTER."""

from kvpage_server.commands.families.server import acl, command, config, diagnose, server

__all__ = ["acl", "command", "config", "diagnose", "server"]
