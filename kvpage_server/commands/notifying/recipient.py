"""What this folder needs to know of a connection that is sent messages it did not ask for."""

from __future__ import annotations

from typing import Protocol

from kvpage_server.resp.reply import Reply


class Mode:
    """How a client tracks."""

    redirect = 0  # the id of the connection that is told in its place; 0 is itself
    broadcast = False
    opt_in = False  # only what is read after CLIENT CACHING YES is noted
    opt_out = False  # all is, but for what is read after CLIENT CACHING NO
    no_loop = False  # its own changes are not told
    asked = False  # CLIENT CACHING was called for the next command
    broken = False  # the connection to redirect to is gone

    def __init__(self) -> None:
        self.prefixes: dict[bytes, None] = {}

    @property
    def notes_reads(self) -> bool:
        """Whether the keys that are read now are remembered."""
        return not self.broadcast and (self.asked if self.opt_in else not (self.opt_out and self.asked))


class Recipient(Protocol):
    """A connection that may be told something."""

    id: int
    protocol: int
    gone: bool  # its connection is over
    channels: dict[bytes, None]  # listened to, kept by Channels
    patterns: dict[bytes, None]
    watching: set[bytes]  # keys, kept by KeyEvents
    watched_changed: bool
    tracking: Mode | None  # kept by Tracking

    def push(self, message: Reply) -> None:
        """Send something that was not asked for."""

    def settle(self) -> None:
        """What it listens to, watches or tracks has changed."""

    @property
    def sees_all(self) -> bool:
        """Whether it may read every key."""

    def sees(self, key: bytes) -> bool:
        """Whether it may know that a key exists."""
