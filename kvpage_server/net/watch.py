"""What is done for all clients once a second: those end that are idle, too slow or gone, and traffic is measured."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable, Iterator, Mapping

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.steps import STEP
from kvpage_server.commands.totals import counted
from kvpage_server.net.limits import make_room, output_limit, overflown
from kvpage_server.system import malloc

log = logging.getLogger("kvpage")

_MUCH = 16 * 1024 * 1024  # bytes
_LAST_WORDS = 10.0  # seconds that a closed connection has to read its last replies


class Watch:
    """Looks after all clients once a second."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._over: dict[Client, float] = {}  # above their soft limit, and since when
        self._most_held = 0  # bytes, since memory was last given back
        self._before = (time.monotonic(), 0, 0, 0)  # commands, bytes in and out so far, as of the last look

    def look(self, now: float) -> Iterator[None]:
        """End, in steps, clients that are idle or leave much unread for too long, and closed ones that do not go.

        `now` is in monotonic seconds.
        """
        server = self._server
        if server.pause is not None and server.pause.ends <= now:
            server.end_pause()
        if server.in_flight > server.config.client_memory > 0:
            make_room(server)  # memory of idle clients may have grown
        yield from counted(server)
        self._measure(now)
        self._give_back_memory()
        clients, self._over, over = list(server.clients.values()), {}, self._over
        for start in range(0, len(clients), STEP):
            some = [client for client in clients[start : start + STEP] if not client.gone]
            _end_broken(some)
            self._end_slow_readers(some, now, over)
            self._end_idle(some, now)
            for client in some:
                if client.closing and now - client.active > _LAST_WORDS:
                    client.connection.abort()
            yield

    def _give_back_memory(self) -> None:
        """When clients held much and now hold little, let the C library return what lies free in between."""
        held = self._server.in_flight
        self._most_held = max(self._most_held, held)
        if self._most_held > _MUCH and held < self._most_held // 4:
            self._most_held = held
            malloc.trim()

    def _measure(self, now: float) -> None:
        stats = self._server.stats
        sent = stats.bytes_out + self._server.totals.sent
        totals = (now, stats.commands, stats.bytes_in, sent)
        seconds, commands, bytes_in, bytes_out = (new - old for new, old in zip(totals, self._before, strict=True))
        self._before = totals
        if seconds > 0:
            commands, bytes_in, bytes_out = (
                max(0, more) for more in (commands, bytes_in, bytes_out)
            )  # after RESETSTAT
            self._server.rates = (round(commands / seconds), bytes_in / seconds, bytes_out / seconds)

    def _end_slow_readers(self, clients: Iterable[Client], now: float, over: Mapping[Client, float]) -> None:
        """`over` are those that were above their soft limit when they were looked at before, and since when."""
        for client in clients:
            limit = output_limit(client)
            if limit.soft and client.connection.outgoing > limit.soft:
                self._over[client] = since = over.get(client, now)
                if now - since >= limit.seconds:
                    overflown(client)

    def _end_idle(self, clients: Iterable[Client], now: float) -> None:
        timeout = self._server.config.timeout
        if not timeout:
            return
        for client in clients:
            if now - client.active > timeout and not client.listens and not client.closing:
                log.debug("client %s was idle for %d seconds: closed", client.address, timeout)
                self._server.stats.idle_closed += 1
                client.close()


def _end_broken(clients: Iterable[Client]) -> None:
    """End connections that their peers have reset.

    libuv reports a socket's error once and looks at it no more (`uv__poll_io`); a session that then read what came
    before the reset, and waits for more, would wait for ever.
    """
    by_descriptor = {client.descriptor: client for client in clients}
    errors = select.poll()
    for descriptor in by_descriptor:
        errors.register(descriptor, 0)  # errors and hang-ups are reported unasked
    for descriptor, _ in errors.poll(0):
        by_descriptor[descriptor].connection.abort()
