"""INFO with many tenants that keep values: its cost does not grow with their number."""

from __future__ import annotations

from turns import measured
from wire import encode_command

MOST = 0.03  # seconds of the turn of INFO, for slow machines; a search for the bytes of each tenant takes 0.7 s


def kept(first: int, last: int) -> bytes:
    """Return commands that store a value for each tenant, and keep it."""
    commands = []
    for number in range(first, last):
        name = b"%05d" % number
        commands += [[b"SET", name, b"value"], [b"KVPAGEKEEP", name, b"100000", b"600", name]]
    return b"".join(map(encode_command, commands))


def test_info_is_a_short_turn_however_many_tenants() -> None:
    with measured() as turns:
        turns.cost(b"", kept(0, 2000))
        assert turns.on_loop(lambda: len(turns.server.keyspace.leases)) == 2000
        assert turns.takes_short_turns(b"", encode_command([b"INFO", b"kvpage"]), MOST)
