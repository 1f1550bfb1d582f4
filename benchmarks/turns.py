"""An event loop that measures its turns, and the real server on it.

`python -m benchmarks.turns --dir DIR OPTIONS` is `kvpage-server --dir DIR OPTIONS` on that loop instead of uvloop: a
turn is the time between two polls of the sockets, measured in processor time of the loop's thread, so that other load
counts little. `Turns` asks it how long the longest one was.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import uvloop

from kvpage_server import app

_SOCKET = "turns"


class MeasuredLoop(asyncio.SelectorEventLoop):
    """Event loop that measures the CPU seconds of its longest turn, and of all turns."""

    longest = total = 0.0
    turns = 0

    def __init__(self) -> None:
        super().__init__(selectors.DefaultSelector())
        self._began_at = 0.0

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        took = time.thread_time() - self._began_at
        self.longest = max(self.longest, took)
        self.total += took
        self.turns += 1

    def _process_events(self, event_list: list[Any]) -> None:
        self._began_at = time.thread_time()
        super()._process_events(event_list)  # type: ignore[misc]

    def forget(self) -> None:
        """Reset the measurements."""
        self.longest = self.total = 0.0
        self.turns = 0


class Turns:
    """Client of the measurements of the server that runs in a directory."""

    def __init__(self, directory: Path) -> None:
        self._server = Client(str(directory / _SOCKET))

    def longest(self) -> float:
        """Return the milliseconds of the longest turn since the last call."""
        self._server.send(None)
        return 1000 * float(self._server.recv())


def main() -> None:
    """Run the server on the measuring loop."""
    made: list[MeasuredLoop] = []
    options = sys.argv[1:]
    listener = Listener(str(Path(options[options.index("--dir") + 1], _SOCKET)))

    def make() -> MeasuredLoop:
        made.append(MeasuredLoop())
        return made[0]

    def tell() -> None:
        with listener.accept() as peer, suppress(EOFError):
            while True:
                peer.recv()
                longest = made[0].longest
                made[0].forget()
                peer.send(longest)

    uvloop.new_event_loop = make  # type: ignore[assignment]
    threading.Thread(target=tell, daemon=True).start()
    app.main(options)


if __name__ == "__main__":
    main()
