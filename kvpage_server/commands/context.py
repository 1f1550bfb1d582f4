"""What a command acts on: the server, and the client that asks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from kvpage_server.commands.channels import Channels
from kvpage_server.commands.events import KeyEvents
from kvpage_server.config import Config
from kvpage_server.page import unix_ms
from kvpage_server.resp.reply import Reply
from kvpage_server.store.memory import Keyspace

if TYPE_CHECKING:
    from kvpage_server.commands.transaction import Transaction


@dataclass(slots=True)
class Stats:
    """What the server did since the start (or CONFIG RESETSTAT)."""

    commands: int = 0
    connections: int = 0
    rejected: int = 0
    errors: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    calls: dict[str, int] = field(default_factory=dict)  # by command name
    page_misses: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(slots=True)
class Server:
    """The state that all clients share. `stop` asks the process to end."""

    config: Config
    keyspace: Keyspace
    stop: Callable[[], None]
    run_id: str = field(default_factory=lambda: os.urandom(20).hex())
    started_ms: int = field(default_factory=unix_ms)
    port: int = 0  # the port that is really listened on
    stats: Stats = field(default_factory=Stats)
    clients: dict[int, Client] = field(default_factory=dict)
    client_ids: count[int] = field(default_factory=lambda: count(1))
    channels: Channels = field(default_factory=Channels)
    events: KeyEvents = field(init=False)

    def __post_init__(self) -> None:
        self.events = KeyEvents(self.keyspace, self.channels)

    def forget(self, client: Client) -> None:
        """A client is gone."""
        self.clients.pop(client.id, None)
        self.channels.forget(client)
        self.events.unwatch(client)
        client.transaction = None


@dataclass(slots=True, eq=False)
class Client:
    """One connection, as commands see it. `push` sends out of band; `close` ends it once what was said is sent."""

    server: Server
    address: str
    local_address: str
    push: Callable[[Reply], None]
    close: Callable[[], None]
    id: int = 0
    protocol: int = 2
    name: bytes = b""
    lib_name: bytes = b""
    lib_version: bytes = b""
    last_command: str = ""
    connected: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)
    transaction: Transaction | None = None  # what was queued since MULTI
    watching: set[bytes] = field(default_factory=set)  # keys, kept by KeyEvents
    watched_changed: bool = False  # so the next EXEC fails
    channels: dict[bytes, None] = field(default_factory=dict)  # listened to, kept by Channels
    patterns: dict[bytes, None] = field(default_factory=dict)

    @property
    def keyspace(self) -> Keyspace:
        """The keys."""
        return self.server.keyspace
