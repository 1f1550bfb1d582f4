"""How much a client may send, hold and leave unread, and which clients are ended when it is too much.

A client that does not read is not answered any more once about a megabyte waits for it (see `transport`), so what piles
up unasked is what it listens to, or one great reply. A client that sends holds memory until its command is complete.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import defaultdict

from kvpage_server.commands.context import Client, Server
from kvpage_server.commands.table.spec import BY_WORD
from kvpage_server.configuration.config import Config
from kvpage_server.configuration.kinds import OutputLimit
from kvpage_server.core import Limits
from kvpage_server.system import malloc

log = logging.getLogger("kvpage")

_LARGE = 512 * 1024  # bytes: more than LMDB takes for a piece of a value, which it frees at every commit
_SMALL = 16 * 1024  # bytes: a client that holds less is not ended
_GRACE = 1_000_000_000  # nanoseconds


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
        overflown(client)
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

    The next to end is always a connection of the user whose connections hold most together; connections that have not
    authenticated count as one user. So many small connections of one user do not end a large one of another. Among a
    user's connections, the first is the one with the largest product of bytes and seconds since it last finished
    something, a second added: a large upload outlives a connection that sits idle on less. O(n log n) in connections.
    """
    now = time.monotonic_ns()
    of_user = defaultdict[bytes | None, list[Client]](list)
    for client in server.clients.values():
        if client.held > _SMALL and not client.spared:
            of_user[client.user.name if client.user else None].append(client)
    users = []  # heap: the most bytes first
    for number, clients in enumerate(of_user.values()):
        clients.sort(key=lambda client: client.held * (_GRACE + now - client.finished))
        users.append((-sum(client.held for client in clients), number, clients))
    heapq.heapify(users)
    while users and server.in_flight > server.config.client_memory:
        total, number, clients = heapq.heappop(users)
        client = clients.pop()
        if clients:
            heapq.heappush(users, (total + client.held, number, clients))
        log.warning(
            "client %s held %d bytes, all together %d, and maxmemory-clients allows %d: closed",
            client.address,
            client.held,
            server.in_flight,
            server.config.client_memory,
        )
        server.stats.evicted_clients += 1
        client.connection.abort()


def overflown(client: Client) -> None:
    """End a client that leaves too much unread."""
    log.warning("client %s left %d bytes unread: closed", client.address, client.connection.outgoing)
    client.server.stats.overflown_outputs += 1
    client.connection.abort()
