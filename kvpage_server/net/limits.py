"""How much a client may send, hold and leave unread, and which clients are ended when it is too much.

A client that does not read is not answered any more once about a megabyte waits for it (see `transport`), so what piles
up unasked is what it listens to, or one great reply. A client that sends holds memory until its command is complete.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Iterable, Iterator, Mapping

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.steps import STEP
from kvpage_server.commands.table.spec import BY_WORD
from kvpage_server.commands.totals import counted
from kvpage_server.configuration.config import Config
from kvpage_server.configuration.kinds import OutputLimit
from kvpage_server.core import Limits
from kvpage_server.system import malloc

log = logging.getLogger("kvpage")

_LARGE = 512 * 1024  # bytes: more than LMDB takes for a piece of a value, which it frees at every commit
_MUCH = 16 * 1024 * 1024  # bytes
_SMALL = 16 * 1024  # bytes: a client that holds less is not ended
_GRACE = 1_000_000_000  # nanoseconds
_LAST_WORDS = 10.0  # seconds that a closed connection has to read its last replies


def keep_large_blocks_apart() -> None:
    """Have glibc map large blocks one by one, always, so that they go back to the system when they are freed.

    Left alone it raises its threshold with the first large block it frees, and lets later ones lie between small ones.
    """
    malloc.tune({malloc.MMAP_THRESHOLD: _LARGE})


def of_frames(config: Config) -> Limits:
    """What the parser of a new connection accepts."""
    return Limits(max_bulk=config.proto_max_bulk_len, max_command=config.client_query_buffer_limit)


def hashed(server: Server) -> frozenset[bytes]:
    """The commands whose long words the parser of a new connection hashes while they arrive."""
    if not server.config.page_checksums:
        return frozenset()
    found = {word: spec for word, spec in BY_WORD.items() if spec.hashed and isinstance(word, bytes)}
    return frozenset(word for word, spec in found.items() if not server.instead or server.instead.row(spec).hashed)


def keep(client: Client) -> None:
    """What a client holds has changed. End it if that is too much, or others if all together hold too much."""
    connection, config = client.connection, client.server.config
    limit = output_limit(client)
    if limit.hard and connection.outgoing > limit.hard:
        _overflown(client)
    elif connection.incoming > config.client_query_buffer_limit:
        log.warning("client %s sent %d bytes of one command: closed", client.address, connection.incoming)
        client.server.stats.overflown_inputs += 1
        connection.abort()
    elif client.server.in_flight > config.client_memory > 0:
        make_room(client.server)


def output_limit(client: Client) -> OutputLimit:
    """How much may wait to be read by a client."""
    return client.server.config.client_output_buffer_limit["pubsub" if client.listens else "normal"]


def make_room(server: Server) -> None:
    """End connections until all of them hold no more than maxmemory-clients.

    Those go first that have held most for longest: bytes times seconds since they last finished something, a second
    added. A client in the middle of a large upload outlives one that sits on a smaller one.
    """
    now = time.monotonic_ns()
    holders = [client for client in server.clients.values() if client.held > _SMALL and not client.spared]
    holders.sort(key=lambda client: client.held * (_GRACE + now - client.finished), reverse=True)
    for client in holders:
        if server.in_flight <= server.config.client_memory:
            return
        log.warning(
            "client %s held %d bytes, all together %d, and maxmemory-clients allows %d: closed",
            client.address,
            client.held,
            server.in_flight,
            server.config.client_memory,
        )
        server.stats.evicted_clients += 1
        client.connection.abort()


def _overflown(client: Client) -> None:
    log.warning("client %s left %d bytes unread: closed", client.address, client.connection.outgoing)
    client.server.stats.overflown_outputs += 1
    client.connection.abort()


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
                    _overflown(client)

    def _end_idle(self, clients: Iterable[Client], now: float) -> None:
        timeout = self._server.config.timeout
        if not timeout:
            return
        for client in clients:
            if now - client.active > timeout and not client.listens and not client.closing:
                log.debug("client %s was idle for %d seconds: closed", client.address, timeout)
                self._server.stats.idle_closed += 1
                client.close()
