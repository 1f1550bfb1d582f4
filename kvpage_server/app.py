"""`kvpage-server`: wires the rooms together and lives until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys

import uvloop

from kvpage_server import __version__
from kvpage_server.commands.context import Server
from kvpage_server.commands.info import human
from kvpage_server.config import Config, ConfigError, from_arguments
from kvpage_server.net.listener import Listener, ListenError
from kvpage_server.page import unix_ms
from kvpage_server.store.memory import Keyspace

SWEEP_EVERY = 0.1  # seconds
SWEEP_MOST = 2000  # keys a sweep: some milliseconds

USAGE = f"""kvpage-server {__version__}: keeps KV pages, speaks the Redis protocol

  kvpage-server [FILE] [--name value ...]   any line of conf/kvpage.conf is a --name
  kvpage-server --check-config [FILE] [--name value ...]
  kvpage-server --help | --version
"""

log = logging.getLogger("kvpage")

_LEVELS = {"debug": logging.DEBUG, "verbose": logging.DEBUG, "notice": logging.INFO, "warning": logging.WARNING}


def main(arguments: list[str] | None = None) -> None:
    """The process. Exits with 1 when the configuration or an address is refused."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    if words[:1] in (["--version"], ["-v"]):
        print(f"kvpage-server {__version__}")
        return
    check_only = words[:1] == ["--check-config"]
    try:
        config = from_arguments(words[1:] if check_only else words)
        if check_only:
            print("the configuration is valid")
            return
        os.chdir(config.dir)
        _log_to_stderr(config)
        _run(config)
    except (ConfigError, ListenError) as error:
        sys.exit(f"kvpage-server: {error}")
    except OSError as error:
        sys.exit(f"kvpage-server: {error.filename or ''}: {error.strerror}")


def _run(config: Config) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))


async def serve(config: Config) -> None:
    """Serve until SIGTERM, SIGINT or SHUTDOWN. Raises ListenError."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopping.set)
    keys = Keyspace(maxmemory=config.maxmemory, policy=config.maxmemory_policy)
    state = Server(config, keys, stopping.set)
    listener = Listener(state, loop)
    addresses = listener.start()
    _calm_the_collector()
    _greet(config, addresses)
    sweeper = asyncio.create_task(_sweep(keys))
    try:
        await stopping.wait()
    finally:
        sweeper.cancel()
        listener.stop()
        for client in list(state.clients.values()):
            client.close()
        await asyncio.sleep(0)  # the sessions send what they have
        log.info("bye: %d commands served", state.stats.commands)


async def _sweep(keys: Keyspace) -> None:
    while True:
        swept = keys.sweep(unix_ms(), SWEEP_MOST)
        await asyncio.sleep(0 if swept == SWEEP_MOST else SWEEP_EVERY)


def _calm_the_collector() -> None:
    """Pages hold no cycles; walking millions of them to look for some would stall every client."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 1_000_000)


def _greet(config: Config, addresses: list[str]) -> None:
    limit = human(config.maxmemory) if config.maxmemory else "no limit"
    log.info("kvpage-server %s, pid %d, ready on %s", __version__, os.getpid(), ", ".join(addresses))
    log.info("store: memory, limit %s, %s", limit, config.maxmemory_policy)


def _log_to_stderr(config: Config) -> None:
    logging.basicConfig(
        level=_LEVELS[config.loglevel],
        format="%(asctime)s.%(msecs)03d %(levelname).1s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


if __name__ == "__main__":
    main()
