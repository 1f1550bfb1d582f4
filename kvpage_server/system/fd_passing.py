"""Passes sockets from one process to another over a channel, each with a few words."""

from __future__ import annotations

import socket

_WORDS = 128  # bytes of the words, padded with zeros


def hand_over(channel: socket.socket, sock: socket.socket, words: str) -> None:
    """Send a socket to the other process. The caller has to close its own descriptor. Raises OSError."""
    said = words.encode("utf-8", "surrogateescape")[:_WORDS].ljust(_WORDS, b"\0")
    if socket.send_fds(channel, [said], [sock.fileno()]) < _WORDS:
        raise OSError("the channel is full")


def take_over(channel: socket.socket) -> tuple[socket.socket, str] | None:
    """Receive the next socket and its words; return None if the other process has ended. Raises OSError."""
    said, descriptors, _, _ = socket.recv_fds(channel, _WORDS, 1)
    if not said or not descriptors:
        return None
    return socket.socket(fileno=descriptors[0]), said.rstrip(b"\0").decode("utf-8", "surrogateescape")
