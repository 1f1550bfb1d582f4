"""Very many patterns, and very long ones, hold up nobody for long."""

from __future__ import annotations

import redis
from servers import RunningServer
from wire import spell

from kvpage_server.commands.pubsub import MOST_PATTERNS


def confirmed(reply: bytes) -> int:
    return reply.count(b"psubscribe")


def test_a_pattern_is_made_ready_in_a_step_of_its_own(server: RunningServer, client: redis.Redis) -> None:
    """Another client is answered before all of them are."""
    patterns = [b"*L" * 500 + b"%d" % i for i in range(150)]
    with server.connect() as listener:
        listener.sendall(spell([b"PSUBSCRIBE", *patterns]))
        assert client.ping()
        told = listener.recv(1 << 20)
        assert confirmed(told) < len(patterns)
        while confirmed(told) < len(patterns):
            told += listener.recv(1 << 20)
        listener.sendall(b"PUNSUBSCRIBE\r\n")


def test_a_client_listens_to_so_many_patterns_and_no_more(server: RunningServer, client: redis.Redis) -> None:
    with server.connect() as listener, listener.makefile("rb") as replies:
        listener.sendall(spell([b"PSUBSCRIBE", *(b"p%d." % i for i in range(MOST_PATTERNS + 1))]))
        told = b"".join(replies.readline() for _ in range(MOST_PATTERNS * 6 + 1))
        assert confirmed(told) == MOST_PATTERNS
        assert told.endswith(b"-ERR a client may listen to 1024 patterns at the most: every message is held to all\r\n")
        assert (client.publish("p1023.", "m"), client.publish("p1024.", "m")) == (1, 0)
