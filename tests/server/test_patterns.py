"""Very many patterns, and very long ones, hold up nobody for long."""

from __future__ import annotations

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from servers import RunningServer
from wire import encode_command

from kvpage_server.commands.families.connections.pubsub import MOST_PATTERNS
from kvpage_server.glob import Patterns, glob


def confirmed(reply: bytes) -> int:
    return reply.count(b"psubscribe")


def test_a_pattern_is_made_ready_in_a_step_of_its_own(server: RunningServer, client: redis.Redis) -> None:
    """Another client is answered before all of them are."""
    patterns = [b"*L" * 500 + b"%d" % i for i in range(150)]
    with server.connect() as listener:
        listener.sendall(encode_command([b"PSUBSCRIBE", *patterns]))
        assert client.ping()
        received = listener.recv(1 << 20)
        assert confirmed(received) < len(patterns)
        while confirmed(received) < len(patterns):
            received += listener.recv(1 << 20)
        listener.sendall(b"PUNSUBSCRIBE\r\n")


def test_a_client_listens_to_so_many_patterns_and_no_more(server: RunningServer, client: redis.Redis) -> None:
    with server.connect() as listener, listener.makefile("rb") as replies:
        listener.sendall(encode_command([b"PSUBSCRIBE", *(b"p%d." % i for i in range(MOST_PATTERNS + 1))]))
        received = b"".join(replies.readline() for _ in range(MOST_PATTERNS * 6 + 1))
        assert confirmed(received) == MOST_PATTERNS
        assert received.endswith(
            b"-ERR a client may listen to 1024 patterns at the most: every message is held to all\r\n"
        )
        assert (client.publish("p1023.", "m"), client.publish("p1024.", "m")) == (1, 0)


def test_rules_of_a_user_are_made_ready_in_steps_of_their_own(server: RunningServer, client: redis.Redis) -> None:
    """Another client is answered before all of them are, and then the user has them all."""
    rules = [b"~" + b"[a-z]*" * 150 + b"%d" % i for i in range(200)]
    with server.connect() as administrator, administrator.makefile("rb") as replies:
        administrator.sendall(encode_command([b"ACL", b"SETUSER", b"patterned", *rules]))
        assert client.ping()
        assert b"patterned" not in client.execute_command("ACL USERS")
        assert replies.readline() == b"+OK\r\n"
    assert len(client.acl_getuser("patterned")["keys"]) == len(rules)
    client.acl_deluser("patterned")


@given(st.lists(st.text("ab*?[]", max_size=5).map(str.encode), max_size=12), st.text("ab", max_size=5).map(str.encode))
def test_patterns_are_found_as_if_each_was_looked_at(patterns: list[bytes], name: bytes) -> None:
    found: Patterns[bytes] = Patterns()
    for pattern in patterns:
        found.add(pattern, pattern, glob(pattern))
    for pattern in set(patterns[::3]):
        found.remove(pattern)
    left = set(patterns) - set(patterns[::3])
    copy = found.copy()
    for pattern in [*found][::2]:
        found.remove(pattern)
        found.add(pattern, pattern, glob(pattern))
    for pattern in left:
        copy.remove(pattern)  # which does not change the original
    assert sorted(found.matching(name)) == sorted(pattern for pattern in left if glob(pattern)(name))
    assert set(found) == left == set(found.copy())
    assert found.cost <= len(left)


@pytest.mark.parametrize(
    ("template", "name"),
    [(b"tenant-%04d:*", b"tenant-0042:key"), (b"tenant-%04d:*:key?", b"tenant-0042:a:key1")],
)
def test_patterns_with_other_openings_are_not_looked_at(template: bytes, name: bytes) -> None:
    tenants: Patterns[int] = Patterns()
    for tenant in range(10_000):
        tenants.add(template % tenant, tenant, glob(template % tenant))
    assert tenants.cost == 1
    assert list(tenants.matching(name)) == [42]
    assert len(list(tenants.compared(name))) == 1
