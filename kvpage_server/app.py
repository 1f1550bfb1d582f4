"""`kvpage-server`: creates the parts of the server, connects them, and runs the server until a signal stops it."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

import kvpage_server.commands.families  # noqa: F401  fills the command table
from kvpage_server import __version__, core
from kvpage_server.bounded import read_regular
from kvpage_server.commands.access.users import UserFileError
from kvpage_server.commands.context import Server
from kvpage_server.commands.families.server.config import OWN_DESCRIPTORS, apply
from kvpage_server.commands.families.server.info import human
from kvpage_server.configuration import certificates, log
from kvpage_server.configuration.config import (
    SMALLEST_DISK,
    Config,
    ConfigError,
    check_paths,
    choose_defaults,
    data_directory,
    default_maxdisk,
    enter_data_directory,
    from_arguments,
)
from kvpage_server.configuration.kinds import AUTO
from kvpage_server.core import BlockChanges
from kvpage_server.kv_events import MOST_CHANGES, KVEvents, KVEventsError, events_of_store, try_to_listen
from kvpage_server.net.companion import Companion, missing
from kvpage_server.net.connection_memory import keep_large_blocks_apart
from kvpage_server.net.listener import Listener, ListenError, name_of, open_all
from kvpage_server.service import log_start, regular_work, renew_when
from kvpage_server.store.disk.database import FILE, Disk
from kvpage_server.store.disk.lmdb_file import DiskError, DiskFull
from kvpage_server.store.keyspace import Keyspace
from kvpage_server.system.durable import open_private, restrict_permissions
from kvpage_server.system.process import (
    exit_on_signals,
    handle_signals,
    ignore_all_signals,
    ignore_signals,
    raise_descriptor_limit,
)
from kvpage_server.system.program import ends_quietly
from kvpage_server.system.text import plural

if TYPE_CHECKING:  # only a gateway imports the client and redis-py, which takes as long as all other imports
    from kvpage_server.gateway.upstream import Upstream

USAGE = f"""kvpage-server {__version__}: keeps KV pages, speaks the Redis protocol

  kvpage-server [FILE] [--name value ...]    serve
  kvpage-server --check-config [FILE] ...    check the configuration
  kvpage-server --help | --version

FILE has `name value` lines, as in redis.conf. Parameters on the command line override it. Without a file, maxmemory is
a quarter of the machine's memory, and dir is {data_directory()}

{{parameters}}
Try it:  kvpage-server --port 9221 --maxmemory 4gb &   redis-cli -p 9221 ping
"""

_EVENTS_EVERY = 0.5  # seconds between two batches of KV events

logger = logging.getLogger("kvpage")


def main(arguments: list[str] | None = None) -> None:
    """Run the server until it is stopped.

    Exit with status 1 if the configuration is invalid, or if an address or a file cannot be used.
    """
    with ends_quietly("kvpage-server"):
        _main(sys.argv[1:] if arguments is None else arguments)


def _main(words: list[str]) -> None:
    if words[:1] in (["--help"], ["-h"]):
        print(_usage(), end="")
        return
    if words[:1] in (["--version"], ["-v"]):
        why = f" ({core.REASON})" if core.REASON else ""
        print(f"kvpage-server {__version__}, page core: {core.NAME}{why}")
        return
    ignore_signals()
    check_only = words[:1] == ["--check-config"]
    here = os.getcwd()
    try:
        config = from_arguments(words[1:] if check_only else words)
        choose_defaults(config)
        if "dir" not in config.chosen:
            try:
                os.chdir(config.dir)
            except OSError as error:
                raise ConfigError(f"dir: {config.dir}: {error.strerror}") from None
            config.dir = here = os.getcwd()
        _check(config)
        if check_only:
            _check_unused_certificates(config)
            _check_addresses(config)
        else:
            here = config.dir
            try:
                _run(config)
            except ListenError:
                _check_addresses(config)  # raises a better error if this server itself has the port
                raise
    except (
        ConfigError,
        UserFileError,
        certificates.CertificateError,
        ListenError,
        DiskError,
    ) as error:
        sys.exit(f"kvpage-server: {error}")
    except DiskFull as error:
        sys.exit(f"kvpage-server: {os.path.join(here, FILE)}: {error}")
    except OSError as error:
        where = os.path.join(here, error.filename or "")  # `here` may have been deleted
        sys.exit(f"kvpage-server: {where}: {error.strerror or error}")
    if check_only:
        print("the configuration is valid")


def _run(config: Config) -> None:
    """Run a server with a checked configuration until it is stopped. Raises the errors of a start."""
    log.start(config)
    faulthandler.enable()  # prints a crash, such as SIGBUS where the disk cannot read a page of the map
    exit_on_signals()
    _ensure_descriptors(config)
    enter_data_directory(config)
    server = Server(config, _open_store(config))
    upstream = _upstream(config)
    _load_users(server)
    server.users.warn_of_absent()
    server.tls = certificates.load(config)
    apply(server, (name for name in config.parameters() if name != "requirepass"))
    while server.keyspace.quotas.go_on():
        pass  # count the bytes of each quota before the first write
    with _kv_events(server), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(serve(server, upstream))
        finally:
            ignore_all_signals(runner.get_loop())


@contextmanager
def _kv_events(server: Server) -> Iterator[None]:
    """Publish the changes of blocks in a `with` block if `kv-events` is set, first the blocks on disk. Raises
    ConfigError.
    """
    config, index = server.config, server.keyspace.contents.index
    if not config.kv_events:
        yield
        return
    try:
        events = KVEvents(config.kv_events, config.kv_events_replay, BlockChanges, events_of_store, _EVENTS_EVERY)
    except KVEventsError as error:
        raise ConfigError(f"kv-events: {error}") from None
    server.kv_events = lambda: (events.dropped, events.nbytes)
    for req_id, page in ((req_id, page) for req_id, pages in index.requests.items() for page in pages):
        events.changes.note(req_id, page, True)
        if len(events.changes) == MOST_CHANGES:
            events.publish()
    index.changes = events.changes
    events.start()
    try:
        yield
    finally:
        events.close()


def _usage() -> str:
    rows = [f"  --{name:<28} {field.metadata['doc']}\n" for name, field in Config.parameters().items()]
    return USAGE.format(parameters="".join(rows))


def _check(config: Config) -> None:
    """Raise the errors that a start would raise, except those of the store and of addresses."""
    if config.metrics_port and (lacks := missing()):
        raise ConfigError(f"metrics-port: {lacks}")
    if isinstance(config.maxdisk, int) and 0 < config.maxdisk < SMALLEST_DISK:
        least = human(SMALLEST_DISK)
        raise ConfigError(f"maxdisk must be auto, 0 or at least {least}, got {config.maxdisk} bytes")
    if config.page_code != "off" and config.store != "tiered":
        raise ConfigError(f"page-code {config.page_code} needs `store tiered`, and store is {config.store}")
    if config.kv_events_replay and not config.kv_events:
        raise ConfigError("kv-events-replay needs kv-events")
    if config.kv_events_replay and config.kv_events_replay == config.kv_events and "*" not in config.kv_events:
        raise ConfigError(f"kv-events-replay: {config.kv_events_replay} is also kv-events")
    if config.kv_events and config.store == "cluster":
        raise ConfigError("kv-events: with `store cluster`, no blocks are stored here")
    _load_users(Server(config, Keyspace()))
    certificates.load(config)
    _upstream(config)
    check_paths(config)


def _check_unused_certificates(config: Config) -> None:
    """Check the certificates that a configuration without tls-port names: a later start may have one. Raises
    CertificateError.
    """
    if not config.tls_port:
        named = copy(config)
        if not named.tls_ca_cert_file:
            named.tls_auth_clients = "no"
        certificates.check(named)


def _check_addresses(config: Config) -> None:
    """Raise ListenError if this machine does not have a configured address.

    Ports are not tried, because the server whose configuration is checked may be running. But equal ones are: all
    sockets of a port get the same free port instead.
    """
    free: dict[int, int] = {}
    with ExitStack() as opened:
        for name in ("port", "tls-port", "metrics-port"):
            port = config.value(name)
            if port:
                bind = "metrics-bind" if name == "metrics-port" else "bind"
                try:
                    socks = open_all(config.value(bind), free.get(port, 0), config.tcp_backlog)
                except ListenError as error:
                    if port in free:
                        raise ConfigError(f"{name}: {port} is another port of this server, too") from error
                    raise ListenError(f"{bind}: {error}") from error
                for sock in socks:
                    opened.enter_context(sock)
                free[port] = socks[0].getsockname()[1]
        for name in ("kv-events", "kv-events-replay"):
            if (address := config.value(name)).startswith("tcp://"):
                try:
                    try_to_listen(address, free, opened)
                except KVEventsError as error:
                    raise ConfigError(f"{name}: {error}") from None


def _upstream(config: Config) -> Upstream | None:
    """Return the connection to the cluster behind this server if it is a gateway, otherwise None.

    Raises ConfigError.
    """
    if config.store != "cluster":
        if config.cluster_nodes:
            raise ConfigError(f"cluster-nodes needs `store cluster`, and store is {config.store}")
        return None
    if not config.cluster_nodes:
        raise ConfigError("`store cluster` needs cluster-nodes: some nodes as host:port,host:port, or a URL")
    from kvpage_server.client import PageClientError
    from kvpage_server.gateway.upstream import Upstream

    try:
        return Upstream(config.cluster_nodes)
    except (ValueError, PageClientError) as error:
        raise ConfigError(f"cluster-nodes: {error}") from None


def _open_store(config: Config) -> Keyspace:
    """Create the keyspace. With `store tiered`, load the keys of the values on disk. Raises DiskError, DiskFull."""
    if config.store != "tiered":
        shared = bool(config.unixsocket) and config.store == "memory"
        return Keyspace(maxmemory=config.maxmemory, policy=config.maxmemory_policy, shared=shared)
    began = time.monotonic()
    maxdisk = _within_file_size(config.maxdisk if isinstance(config.maxdisk, int) else default_maxdisk(Path()))
    disk = Disk(Path(), maxdisk=maxdisk, flushes=config.appendfsync != "no", codes=config.page_code != "off")
    keyspace = Keyspace(
        maxmemory=config.maxmemory,
        policy=config.maxmemory_policy,
        disk=disk,
        maxdisk=maxdisk,
        shared=bool(config.unixsocket),
    )
    tier = keyspace.tier
    assert tier is not None
    tier.load()
    if config.maxdisk == AUTO:
        tier.ensure_space_for_all()
    tier.load_lifetimes(keyspace.protection.restore)
    if config.maxdisk != tier.stored.maxdisk:
        config.in_effect["maxdisk"] = tier.stored.maxdisk
    seconds = time.monotonic() - began
    logger.info("%s found on disk, %s, in %.2f s", plural(len(keyspace), "key"), human(tier.stored.usage.used), seconds)
    return keyspace


def _within_file_size(maxdisk: int) -> int:
    """Return `maxdisk` in bytes, 0 for no limit, lowered to the size that the system allows for a file (`ulimit -f`).

    Below a limit that LMDB knows, it reserves the space that it needs for removals.
    """
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if most == resource.RLIM_INFINITY or 0 < maxdisk <= most:
        return maxdisk
    if most < SMALLEST_DISK:
        logger.warning("the store cannot grow: the system allows files of %s (ulimit -f)", human(most))
        return maxdisk
    lowered = most - most % resource.getpagesize()
    logger.warning("maxdisk is %s: the system allows no larger file (ulimit -f)", human(lowered))
    return lowered


def _load_users(server: Server) -> None:
    """Load the users of the configuration. Raises UserFileError, ConfigError."""
    config = server.config
    if config.requirepass:
        server.users.require_password(config.requirepass)
    if config.aclfile and config.user:
        raise ConfigError("users can be in `user` lines or in an aclfile, not in both")
    if config.aclfile:
        try:
            server.users.load_file(Path(config.aclfile))
        except OSError as error:
            raise ConfigError(f"aclfile: {config.aclfile}: {error.strerror or error}") from None
    else:
        server.users.load(config.user_lines())


async def serve(server: Server, upstream: Upstream | None) -> None:
    """Serve clients until a signal or SHUTDOWN, then write all queued values to disk.

    Raises ListenError if an address cannot be opened, DiskError if values could not be written at the end.
    """
    loop = asyncio.get_running_loop()
    stopping, renewing = asyncio.Event(), asyncio.Event()
    server.stop = stopping.set
    handle_signals(loop, partial(_stop, stopping), renewing.set)
    tiered, config = server.tiered, server.config
    if tiered is not None:
        tiered.connect(
            mode=config.appendfsync,
            limit=config.write_behind_limit,
            scrub_rate=config.scrub_rate,
            moved=partial(_renew_outputs, server),
            page_code=config.page_code,
        )
    if upstream is None:
        keep_large_blocks_apart()
    else:
        _become_gateway(upstream, server)
    listener = Listener(server, loop)
    addresses = listener.start()
    http = open_all(config.metrics_bind, config.metrics_port, config.tcp_backlog) if config.metrics_port else []
    pidfile = Path(config.pidfile) if config.pidfile else None
    if pidfile:
        _write_pid(pidfile)
    _limit_garbage_collection()
    token = config.web_token or secrets.token_urlsafe(24)
    log_start(server, addresses, list(map(name_of, http)), token)
    jobs = [*regular_work(server), renew_when(renewing, server)]
    if upstream is not None:
        jobs.append(upstream.begin())
    tasks = [asyncio.create_task(one) for one in jobs]
    web = Companion(listener, http, token, config.web_origin, configured=bool(config.web_token)) if http else None
    companion = asyncio.create_task(web.run()) if web else None
    try:
        await stopping.wait()
    finally:
        for task in [*tasks, *([companion] if companion else [])]:
            task.cancel()
        try:
            await _end_service(server, listener)
        finally:  # queued values are written even after an error
            lost = await tiered.close() if tiered is not None else ""
            if lost:
                logger.error(lost)
            if companion is not None:  # after the store, because a process that hangs takes seconds to end
                await asyncio.wait([companion])
            if upstream is not None:
                await upstream.client.close()
            if pidfile:
                _remove_pid(pidfile)
            if lost:
                raise DiskError(lost)
        logger.info("bye: %s served", plural(server.stats.commands, "command"))


async def _end_service(server: Server, listener: Listener) -> None:
    """Run no more commands, close the clients after their replies were sent, and complete all-or-none writes."""
    listener.stop()
    if server.tiered is not None:
        await server.tiered.behind.settle()
    for client in list(server.clients.values()):
        client.close()
    await asyncio.sleep(0)  # the sessions send their output
    await listener.complete()


def _become_gateway(upstream: Upstream, server: Server) -> None:
    from kvpage_server.gateway.rows import Rows
    from kvpage_server.gateway.upstream import keep_memory

    server.command_override = Rows(upstream)
    keep_memory()


def _stop(stopping: asyncio.Event, number: int) -> None:
    logger.info("%s: stopping", signal.Signals(number).name)
    stopping.set()


def _write_pid(path: Path) -> None:
    """Write the pidfile. Raises ConfigError, and leaves no new file then."""
    is_new = not path.exists()
    try:
        with open(path, "w", opener=open_private, encoding="utf-8") as file:
            restrict_permissions(file.fileno(), name=path)
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        if is_new:
            path.unlink(missing_ok=True)
        raise ConfigError(f"pidfile: {path} cannot be written: {error.strerror}") from None


def _remove_pid(path: Path) -> None:
    """Remove the pidfile, unless it is a device, or another server has replaced it."""
    with suppress(OSError):
        if read_regular(path, 100).strip() == b"%d" % os.getpid():
            path.unlink()


def _renew_outputs(server: Server) -> None:
    """Make every session read the addresses of its output again, because borrowed memory has moved."""
    for client in server.clients.values():
        client.connection.renew()


def _ensure_descriptors(config: Config) -> None:
    """Raise the limit of file descriptors to the number that maxclients needs. If that fails, lower maxclients.

    Raises ConfigError if there are too few for the server and a client.
    """
    most = raise_descriptor_limit(config.maxclients, OWN_DESCRIPTORS)
    given, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    why = f"the system gives {given} file descriptors, and the server needs {OWN_DESCRIPTORS}, and one for each client"
    if most < 1:
        raise ConfigError(f"maxclients: {why} (ulimit -n)")
    if most < config.maxclients:
        config.maxclients = most
        logger.warning("maxclients is %d: %s", most, why)


def _limit_garbage_collection() -> None:
    """Exclude existing objects from garbage collection, and raise the thresholds of the collector.

    Pages have no reference cycles, and a collection that visits millions of them would stall every client. The
    collector visits new objects twice: 2,000 after their creation, in 0.5 ms, and once more together with those of the
    collections before, at most 12,000, in 2 ms.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(2000, 5, 1_000_000)


if __name__ == "__main__":
    main()
