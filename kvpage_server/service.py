"""The server as a service: start message, periodic tasks, and reload at SIGHUP."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from copy import copy
from functools import partial

from kvpage_server import __version__, core
from kvpage_server.commands.context import Server
from kvpage_server.commands.families.server.info import human
from kvpage_server.configuration import certificates, log
from kvpage_server.configuration.config import SMALL_MEMORY
from kvpage_server.configuration.kinds import AUTO
from kvpage_server.net.connection_memory import Watch
from kvpage_server.page import unix_ms
from kvpage_server.store.evict import OverLimit
from kvpage_server.system.process import usable_memory
from kvpage_server.system.text import plural

# -- Start message -----------------------------------------------------------------------------------------------------

logger = logging.getLogger("kvpage")


def log_start(server: Server, addresses: list[str], http: list[str], token: str) -> None:
    """Log the limits, the access rules and the addresses of a server that has started.

    `addresses` are for clients, `http` are the addresses of the web page. The log has the page's `token` if neither a
    password nor a web-token is set.
    """
    config, users = server.config, server.users
    limit = f"limit {human(config.maxmemory)}" if config.maxmemory else "no limit"
    if "maxmemory" in config.chosen:
        limit += f" of the {human(usable_memory())} there are (maxmemory)"
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
        logger.warning("  core    python, slower than the compiled one: %s (docs/install.md)", core.REASON)
    else:
        logger.info("  core    %s", core.NAME)
    if config.store == "cluster":
        logger.info("  store   a cluster; nothing is kept here")
    else:
        logger.info("  store   memory, %s, %s", limit, config.maxmemory_policy)
        if 0 < config.maxmemory < SMALL_MEMORY:
            logger.warning(
                "  store   maxmemory is less than 1mb: %d bytes (is a unit missing, such as gb?)", config.maxmemory
            )
    if server.tiered is not None:
        path, maxdisk = server.tiered.disk.path.absolute(), server.tiered.stored.maxdisk
        most = f"limit {human(maxdisk)}" if maxdisk else "no limit"
        if config.maxdisk == AUTO:
            most += " (maxdisk auto: half of the free space and the store together, or what the store needs)"
        logger.info("  disk    %s, %s, appendfsync %s", path, most, config.appendfsync)
        space = server.tiered.account
        if maxdisk and space.used > space.limit:
            kept, held, fit = space.contents.leases.kept.nbytes, human(space.used), human(space.limit)
            if not space.may_evict:
                effect = "writes are refused until values are deleted"
            elif kept >= space.limit:
                effect = f"writes evict some, and are refused when the {human(kept)} with lifetimes are left"
            else:
                effect = "each write evicts some"
            logger.warning("  disk    %s of values, and maxdisk has space for %s: %s", held, fit, effect)
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
        logger.warning("every client that reaches these addresses can read and change everything: see docs/security.md")


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
    return f"{first}, {plural(others, 'more user')}" if others else first


def _only_local(addresses: list[str]) -> bool:
    return all(address.startswith(("127.", "[::1]", "unix ")) for address in addresses)


# -- SIGHUP to a service: it reopens its log file and reloads its certificates -----------------------------------------


async def renew_when(renewing: asyncio.Event, server: Server) -> None:
    """Reopen the log file and reload the certificates whenever SIGHUP sets the event, until cancelled."""
    while True:
        await renewing.wait()
        renewing.clear()
        for name, renew in _STEPS.items():
            try:
                await renew(server)
            except Exception:  # unexpected: log it and continue with the other steps
                logger.exception("SIGHUP: the %s could not be renewed", name)


async def _renew_log(server: Server) -> None:
    file = server.config.logfile
    if not file:
        logger.info("SIGHUP: there is no log file to begin anew")
        return
    try:
        log.reopen(server.config)
    except OSError as error:
        logger.warning("SIGHUP: the log goes on in the old file; %s: %s", file, error.strerror)


async def _renew_certificates(server: Server) -> None:
    """Load the configured certificates again, in a thread, for new connections.

    If they cannot be used, log a warning, and keep the old ones. Do nothing if CONFIG SET has changed them during the
    load.
    """
    if not server.config.tls_port:
        return
    old_config = copy(server.config)
    try:
        loaded = await asyncio.to_thread(certificates.load, old_config)
    except certificates.CertificateError as error:
        logger.warning("SIGHUP: the old certificates stay in use; %s", error)
        return
    # No CONFIG SET since.
    if all(old_config.words(name) == server.config.words(name) for name in certificates.PARAMETERS):
        server.tls = loaded
        logger.info("SIGHUP: new connections get the certificates that are there now")


_STEPS = {"log file": _renew_log, "certificates": _renew_certificates}


# -- Periodic tasks ----------------------------------------------------------------------------------------------------

SWEEP_EVERY = 0.1  # seconds between two sweeps of expired keys
SWEEP_MOST = 400  # keys that one sweep deletes at most, in some milliseconds
WATCH_EVERY = 1.0  # seconds between two checks of all clients
AGAIN_AFTER = 1.0  # seconds from an error of a task to its next start


def regular_work(server: Server) -> Iterator[Coroutine[None, None, None]]:
    """Yield the coroutines of the periodic tasks, which run until they are cancelled.

    One deletes expired keys, one evicts when memory is full, and one closes clients that exceed their limits.
    """
    yield _again(partial(_sweep, server))
    yield _again(partial(_shrink, server))
    yield _again(partial(_watch, Watch(server)))


async def _again(work: Callable[[], Awaitable[None]]) -> None:
    """Run a periodic task without end. After an exception, log it, wait AGAIN_AFTER seconds, and start it again."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("the server's regular work was interrupted, and goes on in %g s", AGAIN_AFTER)
            await asyncio.sleep(AGAIN_AFTER)


async def _sweep(server: Server) -> None:
    while True:
        server.peak_memory = max(server.peak_memory, server.keyspace.memory.used)
        swept = server.keyspace.sweep(unix_ms(), SWEEP_MOST, expires=not server.is_paused)
        await asyncio.sleep(0 if swept == SWEEP_MOST else SWEEP_EVERY)


async def _shrink(server: Server) -> None:
    """Evict or demote soon after memory has become full, and not only at the next write. CLIENT PAUSE postpones this.

    Memory becomes full when `maxmemory` is lowered, by a large write, and when values are loaded from disk.
    """
    memory = server.keyspace.memory
    while True:
        done = True
        if memory.is_full() and not server.is_paused:
            with suppress(OverLimit):
                done = memory.shrink()
        await asyncio.sleep(SWEEP_EVERY if done else 0)


async def _watch(watch: Watch) -> None:
    while True:
        await asyncio.sleep(WATCH_EVERY)
        for _ in watch.look(time.monotonic()):
            await asyncio.sleep(0)
