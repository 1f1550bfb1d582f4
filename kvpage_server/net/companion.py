"""The HTTP process next to the server: its start, its channel to the server, and its restart after it has ended.

The process answers browsers and Prometheus. It gets their listening sockets and one end of a channel, which is a pair
of unix sockets. To query the store, it passes a socket of its own over the channel, with a text, and the server begins
a session on this socket: as the metrics user if the text is MONITOR; otherwise the text is the address of a viewer, who
authenticates as usual.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence

from kvpage_server.commands.access.user import User
from kvpage_server.net.listener import Listener
from kvpage_server.system.process import receive_socket

PROGRAM = "kvpage_server.web"
NEEDS = ("prometheus_client", "starlette", "uvicorn")  # packages that the process imports
MONITOR = "monitor"  # the text that is sent with a socket for metrics
CONFIGURED = "configured"  # the first word to the process if the token is `web-token`; otherwise it is empty
WITH_TOKEN = "token "  # the prefix of the text for a viewer with the valid token
ENGINES = b"kvpage:engines*"  # the channels on which engines publish statistics
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before a restart; the pause doubles with each restart
_STEADY = 60.0  # seconds of a run after which the next restart has the first pause again
_LAST_SECONDS = 3.0  # until a process that should end is killed

log = logging.getLogger("kvpage")


def missing() -> str:
    """Return an error text for a package in NEEDS that is not installed; empty if all are installed."""
    absent = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    return f"{absent[0]} is not installed: pip install '.[web]' in a checkout of kvpage" if absent else ""


class Companion:
    """The HTTP process. `run` starts it, and starts it again after it has ended."""

    def __init__(
        self,
        listener: Listener,
        sockets: Sequence[socket.socket],
        token: str,
        origins: Sequence[str] = (),
        *,
        configured: bool,
    ) -> None:
        """Take ownership of the listening `sockets`, which `run` closes at its end.

        `token` authenticates viewers, and opens /metrics, if the store needs no password. A `configured` token, which
        is `web-token`, opens /metrics in any case. `origins` are the origins, such as https://store.example, under
        which proxies serve the page.
        """
        self._listener = listener
        self._first = " ".join(
            [CONFIGURED if configured else "", token, *origins]
        ).encode()  # the first message to each process
        self._sockets = sockets
        commands = [b"+info", b"+ping", b"+hello", b"+client|setinfo", b"+client|setname", b"+psubscribe"]
        self._user = User(MONITOR.encode()).changed(
            [b"on", b"nopass", b"%R~*", b"resetchannels", b"&" + ENGINES, b"-@all", *commands]
        )

    async def run(self) -> None:
        """Start the process, and start it again after a pause whenever it has ended, until this task is cancelled.

        A cancellation ends the process, and closes the listening sockets.
        """
        pause = _FIRST_PAUSE
        try:
            while True:
                began = time.monotonic()
                code: object
                try:
                    code = await self._run_process()
                except OSError as error:
                    code = error
                pause = _FIRST_PAUSE if time.monotonic() - began > _STEADY else pause
                log.error("the process that answers HTTP has ended with %s; the next one in %.0f s", code, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            for sock in self._sockets:
                sock.close()

    async def _run_process(self) -> int:
        """Start a process, wait for its end, and return its exit code. Raises OSError if it cannot be started."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        loop = asyncio.get_running_loop()
        descriptors = [sock.fileno() for sock in (theirs, *self._sockets)]
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", PROGRAM),
                *map(str, descriptors),
                pass_fds=descriptors,
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
                start_new_session=True,
            )
            theirs.close()
            ours.send(self._first)  # not as an argument: every user of the machine can read arguments
            loop.add_reader(ours, self._receive_socket, ours)
            try:
                await _log_errors(process)
                return await process.wait()
            finally:
                loop.remove_reader(ours)
                ours.close()
                await asyncio.shield(_end(process))
        finally:
            theirs.close()
            ours.close()

    def _receive_socket(self, channel: socket.socket) -> None:
        """Receive a socket from the process, and begin a session on it. Stop watching a channel that has ended."""
        try:
            taken = receive_socket(channel)
        except BlockingIOError:
            return
        except OSError:
            taken = None
        if taken is None:
            asyncio.get_running_loop().remove_reader(channel)
            return
        sock, words = taken
        if words == MONITOR:
            self._listener.take(sock, words, self._user, needs_password=False)
        else:
            address = words.removeprefix(WITH_TOKEN)
            self._listener.take(sock, address, None, needs_password=address == words)


async def _log_errors(process: Process) -> None:
    """Copy the process's standard error to the log until it is closed."""
    assert process.stderr is not None
    while output := await process.stderr.read(1 << 16):
        for line in output.decode("utf-8", "backslashreplace").splitlines():
            log.warning("http: %s", line)


async def _end(process: Process) -> None:
    """Wait for the process, which exits because its channel is closed. Kill it after `_LAST_SECONDS`."""
    try:
        await asyncio.wait_for(process.wait(), _LAST_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
