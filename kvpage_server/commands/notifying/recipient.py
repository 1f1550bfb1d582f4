"""What this folder needs to know about a connection that is sent messages."""

from __future__ import annotations

from typing import Protocol

from kvpage_server.resp.reply import Reply


class Mode:
    """How a client tracks."""

    redirect = 0  # the id of the connection that gets the messages; 0 is itself
    broadcast = False
    opt_in = False  # only reads after CLIENT CACHING YES are noted
    opt_out = False  # all reads are noted, except those after CLIENT CACHING NO
    no_loop = False  # it gets no messages about its own changes
    asked = False  # CLIENT CACHING was called for the next command
    broken = False  # the connection to redirect to is gone

    def __init__(self) -> None:
        self.prefixes: dict[bytes, None] = {}

    @property
    def notes_reads(self) -> bool:
        """Whether the keys that are read now are remembered."""
        return not self.broadcast and (self.asked if self.opt_in else not (self.opt_out and self.asked))


class Recipient(Protocol):
    """A connection that may be sent messages."""

    id: int
    protocol: int
    gone: bool  # its connection is over
    channels: dict[bytes, None]  # listened to, kept by Channels
    patterns: dict[bytes, None]
    watching: set[bytes]  # keys, kept by KeyEvents
    watched_changed: bool
    watched_until: int  # when a watched index key changes because a page expires; unix milliseconds, 0 for never
    tracking: Mode | None  # kept by Tracking

    @property
    def user(self) -> object:
        """Who it is."""

    def keep(self, nbytes: int) -> None:
        """Count memory that the server keeps for it until it ends, or no longer keeps if negative."""

    def push(self, message: Reply) -> None:
        """Send a message."""

    def settle(self) -> None:
        """Note that what it listens to, watches or tracks has changed."""

    @property
    def sees_all(self) -> bool:
        """Whether it may read every key."""

    def sees(self, key: bytes) -> bool:
        """Whether it may know that a key exists."""
