"""Frames that are nearly right, by the thousand, to a server with hardly any memory: nothing breaks, nobody is ended.

`make soak` sends 200,000.
"""

from __future__ import annotations

import select
import socket
from contextlib import suppress

import pytest
from mutations import Frames, batches
from servers import RunningServer, start_server
from wire import encode_command

SMALL = (
    *("--maxmemory", "8mb", "--maxmemory-clients", "32mb", "--client-query-buffer-limit", "4mb"),
    *("--proto-max-bulk-len", "1mb", "--slowlog-log-slower-than", "0"),
)
TIERED = ("--store", "tiered", "--maxdisk", "64mb", "--write-behind-limit", "1mb")
BATCH = 25  # commands, after which it is asked whether the connection lives
BROKEN = 4  # one of so many frames is


def converse(sock: socket.socket, data: bytes, until: bytes) -> bool:
    """Send all of it, and read until the answers end so; False when the connection ended before."""
    sock.setblocking(False)
    view, tail = memoryview(data), b""
    while not tail.endswith(until):
        readable, writable, _ = select.select([sock], [sock] if view else [], [], 30)
        assert readable or writable, f"no answer for half a minute; the last was {tail[-100:]!r}"
        try:
            if readable:
                received = sock.recv(1 << 18)
                if not received:
                    return False
                tail = (tail + received)[-1000:]
            if writable:
                view = view[sock.send(view[: 1 << 18]) :]
        except BlockingIOError:
            continue
        except OSError:
            return False
    return True


def send_well_framed(server: RunningServer, frames: Frames, count: int) -> None:
    """Commands in pipelines; the connection outlives them all."""
    with server.connect() as sock:
        for number, batch in enumerate(batches(frames, count, BATCH)):
            mark = b"mark-%d" % number
            lives = converse(sock, batch + encode_command([b"RESET"]) + encode_command([b"ECHO", mark]), mark + b"\r\n")
            assert lives, f"ended after {batch[:2000]!r}"


def send_broken(server: RunningServer, frames: Frames, count: int) -> None:
    """Frames that are none, on connections that may end of it."""
    while count > 0:
        with server.connect() as sock, suppress(OSError):
            data = b"".join(frames.broken() for _ in range(5))
            sock.sendall(data[:200_000])
            sock.shutdown(socket.SHUT_WR)
            sock.settimeout(30)
            while sock.recv(1 << 18):
                pass
        count -= 5


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("store", [(), TIERED], ids=["memory", "tiered"])
@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.soak)])
def test_frames_that_are_nearly_right_do_no_harm(store: tuple[str, ...], count: int) -> None:
    with start_server(*SMALL, *store) as server:  # which ends in order, and has noted no traceback
        for round_ in range(max(count // 1000, 1)):
            frames, some = Frames(seed=round_), min(count, 1000)
            send_well_framed(server, frames, some - some // BROKEN)
            send_broken(server, frames, some // BROKEN)
        with server.client() as client:
            assert client.ping()
            assert client.set("afterwards", "well")
            assert client.get("afterwards") == b"well"
        assert "internal error" not in server.log
        assert "cannot go on" not in server.log
