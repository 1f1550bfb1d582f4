"""Monitoring of a server: Prometheus, which scrapes its metrics every second, and browsers with its page open.

``python -m benchmarks.watchers PORT DASHBOARDS`` prints "watching" when each dashboard has received an event, and
watches until its input ends; then it prints the number of scrapes and events.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

DASHBOARDS = 3
TOKEN = "token-of-the-benchmarks"  # the web-token of the server
EVERY_SECONDS = 1.0


@contextmanager
def watching(port: int, dashboards: int = DASHBOARDS) -> Iterator[None]:
    """Watch the HTTP port from a process of its own while the block runs."""
    command = [sys.executable, "-m", "benchmarks.watchers", str(port), str(dashboards)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8") as process:
        assert process.stdout is not None
        if process.stdout.readline() != "watching\n":
            raise RuntimeError("the server tells nothing to who watches it")
        yield
        output, _ = process.communicate()
    scrapes, events = map(int, output.split())
    if process.returncode or scrapes < 1 or events < dashboards:
        raise RuntimeError(f"they saw {scrapes} scrapes and {events} events, and ended with {process.returncode}")


async def _watch(port: int, dashboards: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    connected = [asyncio.Event() for _ in range(1 + dashboards)]
    watchers = [_scrape(port, seen, connected[0]), *(_keep_open(port, seen, event) for event in connected[1:])]

    async def until_told_to_end() -> None:
        for event in connected:
            await event.wait()
        print("watching", flush=True)
        await asyncio.to_thread(sys.stdin.read)

    ended = asyncio.create_task(until_told_to_end())
    tasks = [ended, *map(asyncio.create_task, watchers)]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    for task in tasks:
        task.cancel()
    return seen


@asynccontextmanager
async def _asked(port: int, path: str) -> AsyncIterator[asyncio.StreamReader]:
    """Yield the reply to a request, from its headers on."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"Host: 127.0.0.1\r\nConnection: close\r\nAuthorization: Bearer {TOKEN}"
    writer.write(f"GET {path} HTTP/1.1\r\n{head}\r\n\r\n".encode())
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"{path}: {status!r}")
        yield reader
    finally:
        writer.close()


async def _scrape(port: int, seen: Counter[str], connected: asyncio.Event) -> None:
    while True:
        again = asyncio.create_task(asyncio.sleep(EVERY_SECONDS))
        async with _asked(port, "/metrics") as answer:
            seen["scrapes"] += b"kvpage_blocks" in await answer.read()
        connected.set()
        await again


async def _keep_open(port: int, seen: Counter[str], connected: asyncio.Event) -> None:
    async with _asked(port, "/page/events") as events:
        while part := await events.read(1 << 16):
            seen["events"] += part.count(b"event: overview")
            connected.set()
    raise EOFError("the server has closed a dashboard")


if __name__ == "__main__":
    found = asyncio.run(_watch(*map(int, sys.argv[1:])))
    print(found["scrapes"], found["events"])
