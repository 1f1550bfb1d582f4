"""Sockets from one process to another, over a channel between them, each with a few words about it."""

from __future__ import annotations

import socket

_WORDS = 128  # bytes: what is said of a socket, filled up with zeros


def hand_over(channel: socket.socket, sock: socket.socket, words: str) -> None:
    """Give a socket away. The caller still has its own descriptor of it, to be closed. Raises OSError."""
    said = words.encode("utf-8", "surrogateescape")[:_WORDS].ljust(_WORDS, b"\0")
    if socket.send_fds(channel, [said], [sock.fileno()]) < _WORDS:
        raise OSError("the channel is full")


def take_over(channel: socket.socket) -> tuple[socket.socket, str] | None:
    """The next socket and what is said of it; None when the other process is gone. Raises OSError."""
    said, descriptors, _, _ = socket.recv_fds(channel, _WORDS, 1)
    if not said or not descriptors:
        return None
    return socket.socket(fileno=descriptors[0]), said.rstrip(b"\0").decode("utf-8", "surrogateescape")
