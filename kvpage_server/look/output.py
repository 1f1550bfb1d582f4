"""Parts that several commands of `kvpage` use: errors, repeated output, tables, and connections without side
effects.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import redis
from rich.console import RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvpage_server.client.raw_commands import plain_client
from kvpage_server.client.wire.connection import greet
from kvpage_server.page import PageError
from kvpage_server.system.terminal import LineTable, Terminal, out, print_json


class LookError(Exception):
    """Error: a command has nothing to show. The message has the reason."""


class UsageError(Exception):
    """Error: the arguments of a command are wrong, whatever the store contains. The message has the reason."""


WRONG_ARGUMENTS = UsageError, PageError  # PageError: an argument is no name or number of a page


def watch(
    args: argparse.Namespace,
    frame: Callable[[], RenderableType],
    as_json: Callable[[], Any],
    *,
    screen: bool = False,
) -> bool:
    """Print `frame()` every `args.watch` seconds, or once if that is None, and return True.

    In a terminal, each frame replaces the last one; with `screen`, it fills the terminal. With `args.json`, print the
    JSON of `as_json()` instead, one line each time.
    """
    can_replace = out.is_terminal and not out.is_dumb_terminal  # one that cannot move its cursor shows all frames
    replaces = can_replace and not args.json and args.watch is not None
    if replaces:  # the end of `live` shows the cursor again
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    live = Live(console=Terminal(highlight=False), auto_refresh=False, screen=screen) if replaces else nullcontext()
    with live as shown:
        while True:
            if args.json:
                print_json(as_json())
            elif shown is not None:
                shown.update(frame(), refresh=True)
            else:
                out.print(frame(), soft_wrap=False)
            if args.watch is None:
                return True
            time.sleep(args.watch)


def titled(rows: Iterable[Iterable[Any]]) -> Table:
    """Return a table of `rows` without a header, with a bold first column. Strings are no markup: names may be in
    them.
    """
    table = LineTable()
    table.add_column(style="bold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def connected(url: str, **options: Any) -> redis.Redis:
    """Return a client of the server, which connects at its first command."""
    options |= {"socket_connect_timeout": 5, "max_connections": 2, "redis_connect_func": connect_without_touch}
    return plain_client(url, protocol=3, **options)


def connect_without_touch(connection: redis.Connection) -> None:
    """Connect with CLIENT NO-TOUCH, so that reads do not count as uses, if the user has the right to it.

    redis-py calls this as `redis_connect_func` for each connection of a pool, also after a reconnection.
    """
    greet(connection)
    with suppress(redis.ResponseError):
        connection.send_command("CLIENT", "NO-TOUCH", "ON")  # type: ignore[no-untyped-call]
        connection.read_response()
