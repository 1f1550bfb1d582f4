"""File descriptors: the limit of the process, and passing them to another process."""

from __future__ import annotations

import resource
import socket


def room_for(connections: int, others: int) -> int:
    """Raise the limit of file descriptors for `connections` and `others`, as far as the system allows.

    Return the number of connections that fit into the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(max(allowed - others, 1), connections)


# -- Passing of sockets, each with a short text, over a channel: a pair of unix sockets --------------------------------

_WORDS = 128  # bytes of the text, which is cut or padded with zeros


def hand_over(channel: socket.socket, sock: socket.socket, words: str) -> None:
    """Send a socket and a text to the other process. The caller closes its own descriptor. Raises OSError."""
    message = words.encode("utf-8", "surrogateescape")[:_WORDS].ljust(_WORDS, b"\0")
    if socket.send_fds(channel, [message], [sock.fileno()]) < _WORDS:
        raise OSError("the channel is full")


def take_over(channel: socket.socket) -> tuple[socket.socket, str] | None:
    """Receive the next socket and its text; return None if the other process has ended. Raises OSError."""
    message, descriptors, _, _ = socket.recv_fds(channel, _WORDS, 1)
    if not message or not descriptors:
        return None
    return socket.socket(fileno=descriptors[0]), message.rstrip(b"\0").decode("utf-8", "surrogateescape")
