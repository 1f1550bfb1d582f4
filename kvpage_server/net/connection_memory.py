"""Memory limits of connections: the size of a request, unread output, and the order in which clients are closed.

A client holds memory in three ways: for a command that it has not sent completely, for commands queued by MULTI, and
for replies that it has not read. While too much output waits for a client, the server runs no more of its commands
(`Session._output_is_full`), so only messages to subscribers and single large replies can exceed the output limits.
"""

from __future__ import annotations

import heapq
import logging
import select
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.specs import BY_WORD
from kvpage_server.commands.steps import STEP, counted
from kvpage_server.configuration.kinds import OutputLimit
from kvpage_server.core import Parser
from kvpage_server.core.protocol import TOO_LONG
from kvpage_server.system.process import MMAP_THRESHOLD, trim_malloc, tune_malloc
from kvpage_server.system.text import plural

log = logging.getLogger("kvpage")

_LARGE = 512 * 1024  # bytes: more than LMDB allocates for a piece of a value, which it frees at every commit
_SMALL = 1024  # bytes: `close_connections` closes only clients that hold more
_SLACK = 32  # `close_connections` frees 1/32 of the limit in addition: it passes over all clients, so not for each one
_GRACE = 1_000_000_000  # nanoseconds that `close_connections` adds to the time since a client's last progress


def keep_large_blocks_apart() -> None:
    """Make glibc map each allocation of _LARGE bytes or more by itself, so that freeing returns it to the system.

    By default glibc raises this threshold when it frees a large allocation, and later places large allocations between
    small ones, where freed memory cannot be returned.
    """
    tune_malloc({MMAP_THRESHOLD: _LARGE})


def hashed_commands(server: Server) -> frozenset[bytes]:
    """Return the commands whose long words the parser of a new connection hashes while it receives them."""
    if not server.config.page_checksums:
        return frozenset()
    found = {word: spec for word, spec in BY_WORD.items() if spec.hashed and isinstance(word, bytes)}
    override = server.command_override
    return frozenset(word for word, spec in found.items() if not override or override.row(spec).hashed)


def enforce_limits(client: Client) -> None:
    """Enforce the memory limits after a change of a client's memory.

    Close the client if it exceeds client-output-buffer-limit (hard) or client-query-buffer-limit. Otherwise, if all
    connections together exceed maxmemory-clients, call `close_connections`.
    """
    connection, config = client.connection, client.server.config
    if (outgoing := connection.outgoing) and 0 < output_limit(client).hard < outgoing:
        close_overflown(client)
    elif connection.incoming > config.client_query_buffer_limit:
        size = plural(connection.incoming, "byte")
        client.server.seldom.log(logging.WARNING, "client %s sent %s of one command: closed", client.address, size)
        client.server.stats.overflown_inputs += 1
        connection.abort(f"ERR Protocol error: {TOO_LONG}")
    elif client.server.in_flight > config.client_memory > 0:
        close_connections(client.server)


def output_limit(client: Client) -> OutputLimit:
    """Return the limit of a client's unread output: that of class `pubsub` for subscribers, otherwise `normal`."""
    return client.server.config.client_output_buffer_limit["pubsub" if client.listens else "normal"]


def close_connections(server: Server) -> None:
    """If all connections together hold more than maxmemory-clients, close some until they hold 31/32 of it. O(n log n)
    in connections.

    First end TLS handshakes, the oldest first, because their clients have sent no command yet. Then repeatedly select
    the user whose connections hold most memory together, where all connections without a login count as one user. So
    many small connections of one user do not close a large one of another. Of this user's connections, close the one
    with the largest product of its bytes and its idle time: the seconds since its last command or drained output, plus
    one. So a large upload outlives an idle connection that holds less.
    """
    while server.handshakes and server.in_flight > server.config.client_memory:
        next(iter(server.handshakes)).end("clients hold as much memory as maxmemory-clients allows")
    now, leaving = time.monotonic_ns(), 0  # bytes of a closed connection, whose release may have led here
    of_user = defaultdict[bytes | None, list[Client]](list)
    for client in server.clients.values():
        if client.gone:
            leaving += client.held
        elif client.held > _SMALL and not client.spared:
            of_user[client.user.name if client.user else None].append(client)
    users = []  # heap of (negative bytes, number, clients): the user with the most bytes first
    for number, clients in enumerate(of_user.values()):
        clients.sort(key=lambda client: client.held * (_GRACE + now - client.finished))
        users.append((-sum(client.held for client in clients), number, clients))
    heapq.heapify(users)
    most = server.config.client_memory
    least = most - most // _SLACK if server.in_flight - leaving > most else most
    while users and server.in_flight - leaving > least:
        total, number, clients = heapq.heappop(users)
        client = clients.pop()
        if clients:
            heapq.heappush(users, (total + client.held, number, clients))
        server.seldom.log(
            logging.WARNING,
            "client %s held %d bytes, all together %d, and maxmemory-clients allows %d: closed",
            client.address,
            client.held,
            server.in_flight,
            server.config.client_memory,
        )
        server.stats.evicted_clients += 1
        client.connection.abort(f"OOM connections hold more than maxmemory-clients, {most} bytes: send less at a time")


def close_overflown(client: Client) -> None:
    """Close a client that exceeds its limit of unread output, count it, and log a warning."""
    size = plural(client.connection.outgoing, "byte")
    client.server.seldom.log(logging.WARNING, "client %s left %s unread: closed", client.address, size)
    client.server.stats.overflown_outputs += 1
    client.connection.abort()


# -- Memory of a connection: incoming and queued commands, unread replies, and names that the server keeps -------------


class ConnectionMemory:
    """The counted memory of one connection.

    Received commands that do not run yet are in the arena, but do not count against maxmemory, so they evict no keys.
    """

    __slots__ = (
        "_client",
        "_held",
        "_keyspace",
        "_parser",
        "_queued",
        "_receiving",
        "_unread",
        "is_empty",
        "kept",
        "postponed",
    )

    def __init__(self, client: Client, parser: Parser) -> None:
        self._client = client
        self._parser = parser
        self._keyspace = client.server.keyspace
        self.postponed = 0  # bytes in the arena of a received command that waits before it runs
        self._receiving = 0  # bytes of postponed and received commands, as last reported to the keyspace
        self._queued = 0  # bytes of commands queued by MULTI, as last reported to the keyspace
        self._held = 0  # `Client.passing`, as last reported to the server
        self._unread = 0  # bytes of unread replies, as last reported to the keyspace
        self.kept = 0  # `Client.kept` at the last check of the limits
        self.is_empty = True  # whether no bytes of the connection are counted

    def settle(self) -> None:
        """Report to the keyspace the bytes of commands that were received and do not run yet.

        The command that runs now does not count here, because its bytes count as the store's.
        """
        receiving = self._parser.receiving + self.postponed
        if receiving != self._receiving:
            self._keyspace.memory.receiving += receiving - self._receiving
            self._receiving = receiving
            self._update_is_empty()

    def queue(self, size: int) -> None:
        """Count `size` bytes of a command that MULTI has queued, as memory of the connection and not of the store."""
        self._queued += size
        self._keyspace.memory.receiving += size
        self._update_is_empty()

    def unqueue(self) -> int:
        """Stop counting the commands that MULTI has queued. Return their bytes."""
        queued = self._queued
        self.queue(-queued)
        return queued

    def account(self) -> None:
        """Report the bytes of this connection to the server, and enforce the memory limits.

        That may close this connection or others.
        """
        client = self._client
        if client.gone:
            return
        self.settle()
        held = client.passing
        if held != self._held or client.kept != self.kept:
            client.server.in_flight += held - self._held
            self._held, self.kept = held, client.kept
            self._note_unread(0 if client.listens else client.connection.unread)  # messages borrow no values
            self._update_is_empty()
            enforce_limits(client)

    def _note_unread(self, unread: int) -> None:
        self._keyspace.memory.unread += unread - self._unread
        self._unread = unread

    def _update_is_empty(self) -> None:
        self.is_empty = not (self._held or self._receiving or self._queued)

    def drop(self) -> None:
        """Release all memory of a closed connection."""
        self.postponed = 0
        self.settle()
        self.unqueue()
        self._client.server.in_flight -= self._held + self._client.kept
        self._note_unread(0)
        self._held = self._client.kept = 0
        self._update_is_empty()


# -- Periodic checks of all clients: idle, slow and broken connections are closed, traffic is counted ------------------

_MUCH = 16 * 1024 * 1024  # bytes of clients' memory; only after more, freed memory is returned to the system
_LAST_WORDS = 10.0  # seconds for the client of a closing connection to read its last replies


class Watch:
    """Periodic checks of all clients. The server's service calls `look`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        # Clients above their soft limit of unread output, with the time of the first check that has found this.
        self._over: dict[Client, float] = {}
        self._most_held = 0  # most bytes in flight since memory was last returned to the system
        self._before = (time.monotonic(), 0, 0, 0)  # time, commands, bytes in and bytes out at the last check

    def look(self, now: float) -> Iterator[None]:
        """Check all clients, in steps, after each of which the caller gives other clients their turn.

        `now` is in monotonic seconds. Close broken connections, clients that are idle or above the soft limit of unread
        output for too long, and closing clients that do not read their last replies. End a CLIENT PAUSE that is over,
        and measure the traffic.
        """
        server = self._server
        if server.pause is not None and server.pause.ends <= now:
            server.end_pause()
        if server.in_flight > server.config.client_memory > 0:
            close_connections(server)  # memory of idle clients may have grown
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
        """Return freed memory to the system when the clients' memory has fallen below a quarter of its maximum."""
        held = self._server.in_flight
        self._most_held = max(self._most_held, held)
        if self._most_held > _MUCH and held < self._most_held // 4:
            self._most_held = held
            trim_malloc()

    def _measure(self, now: float) -> None:
        stats = self._server.stats
        sent = stats.bytes_out + self._server.totals.sent
        totals = (now, stats.commands, stats.bytes_in, sent)
        seconds, commands, bytes_in, bytes_out = (new - old for new, old in zip(totals, self._before, strict=True))
        self._before = totals
        if seconds > 0:
            # The differences are negative after CONFIG RESETSTAT.
            commands, bytes_in, bytes_out = (max(0, more) for more in (commands, bytes_in, bytes_out))
            self._server.rates = (round(commands / seconds), bytes_in / seconds, bytes_out / seconds)

    def _end_slow_readers(self, clients: Iterable[Client], now: float, over: Mapping[Client, float]) -> None:
        """Close clients whose unread output has exceeded their soft limit for the limit's number of seconds.

        `over` maps the clients that exceeded it at the last check to the time of the first such check. All times are in
        monotonic seconds.
        """
        for client in clients:
            limit = output_limit(client)
            if limit.soft and client.connection.outgoing > limit.soft:
                self._over[client] = since = over.get(client, now)
                if now - since >= limit.seconds:
                    close_overflown(client)

    def _end_idle(self, clients: Iterable[Client], now: float) -> None:
        timeout = self._server.config.timeout
        if not timeout:
            return
        for client in clients:
            if now - client.active > timeout and not client.listens and not client.closing:
                log.debug("client %s was idle for %s: closed", client.address, plural(timeout, "second"))
                self._server.stats.idle_closed += 1
                client.close()


def _end_broken(clients: Iterable[Client]) -> None:
    """Close connections that their peers have reset.

    libuv reports a socket error once and stops polling (`uv__poll_io`), so a session that waits for more bytes after a
    reset would wait for ever.
    """
    by_descriptor = {client.descriptor: client for client in clients}
    errors = select.poll()
    for descriptor in by_descriptor:
        errors.register(descriptor, 0)  # poll reports errors and hang-ups without a flag
    for descriptor, _ in errors.poll(0):
        by_descriptor[descriptor].connection.abort()
