"""How much has to have come before a socket counts as readable.

To be woken for every few bytes that arrive costs as much as to receive them. So who knows that more is coming waits for
some hundred kilobytes (SO_RCVLOWAT). They may never come: there is an end to the patience. Linux makes room for so
many bytes, others may not, and TLS holds some of them back itself: there every byte counts.
"""

from __future__ import annotations

import socket
import ssl
import sys

PATIENCE = 0.002  # seconds, after which what has come is enough
_MOST = 384 * 1024  # with a megabyte, what has come is copied too late
_LITTLE = 256 * 1024  # bytes that are taken as they come
_LINUX = sys.platform == "linux"


class LowWater:
    """The mark of one socket, `at` bytes."""

    def __init__(self, sock: socket.socket) -> None:
        self.at = 1
        self._sock = sock
        self._is_fixed = not _LINUX or isinstance(sock, ssl.SSLSocket)

    def expect(self, count: int) -> None:
        """`count` bytes more are coming, it seems: be readable once they are there, or enough of them."""
        at = min(count, _MOST) if count > _LITTLE and not self._is_fixed else 1
        if at != self.at:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, at)
            self.at = at
