"""What a server says of itself when it is ready."""

from __future__ import annotations

import logging
import os

from kvpage_server import __version__, core
from kvpage_server.commands.context import Server
from kvpage_server.commands.families.server.info import human
from kvpage_server.configuration import defaults
from kvpage_server.configuration.kinds import AUTO
from kvpage_server.system.plurals import how_many

logger = logging.getLogger("kvpage")


def greet(server: Server, addresses: list[str], http: list[str], token: str) -> None:
    """Log the limits, the access rules and the addresses: `addresses` for clients, `http` for the page, which needs the
    `token` where no password is set."""
    config, users = server.config, server.users
    limit = f"limit {human(config.maxmemory)}" if config.maxmemory else "no limit"
    if "maxmemory" in config.chosen:
        limit += f" of the {human(defaults.memory())} there are (maxmemory)"
    facts: dict[str, object] = {
        "version": __version__,
        "pid": os.getpid(),
        "addresses": addresses,
        "store": config.store,
        "maxmemory": config.maxmemory,
        "maxmemory_policy": config.maxmemory_policy,
        "maxdisk": server.tiered.stored.maxdisk if server.tiered is not None else 0,
        "page_core": core.NAME,
    }
    logger.info("kvpage-server %s, pid %d", __version__, os.getpid())
    if core.REASON:
        logger.warning("  core    python, slower than the compiled one: %s (docs/operations.md)", core.REASON)
    else:
        logger.info("  core    %s", core.NAME)
    if config.store == "cluster":
        logger.info("  store   a cluster; nothing is kept here")
    else:
        logger.info("  store   memory, %s, %s", limit, config.maxmemory_policy)
    if server.tiered is not None:
        path, maxdisk = server.tiered.disk.path.absolute(), server.tiered.stored.maxdisk
        most = f"limit {human(maxdisk)}" if maxdisk else "no limit"
        if config.maxdisk == AUTO:
            most += " (maxdisk auto: half of the free space and the store together)"
        logger.info("  disk    %s, %s, appendfsync %s", path, most, config.appendfsync)
    logger.info("  access  %s", _access(server))
    if http:
        if not users.default.no_password:
            logger.info("  page    http://%s/, for users of the store", http[0])
        elif config.web_token:
            logger.info("  page    http://%s/, log in with web-token", http[0])
        else:
            logger.info("  page    http://%s/?token=%s", http[0], token)
    logger.info("  ready on %s", ", ".join(addresses), extra={"facts": facts})
    if users.default.no_password and not config.protected_mode and not _only_local(addresses):
        logger.warning("anybody who reaches these addresses can read and change everything: see docs/security.md")


def _access(server: Server) -> str:
    others = len(server.users.by_name) - 1
    default = server.users.default
    if not default.enabled:
        first = "the default user is off"
    elif not default.no_password:
        first = "a password is needed"
    elif server.config.protected_mode:
        first = "no password, so from this machine only"
    else:
        first = "no password"
    return f"{first}, {how_many(others, 'more user')}" if others else first


def _only_local(addresses: list[str]) -> bool:
    return all(address.startswith(("127.", "[::1]", "unix ")) for address in addresses)
