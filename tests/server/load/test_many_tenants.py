"""INFO with many tenants that keep values: its cost does not grow with their number."""

from __future__ import annotations

from turns import Cost, Turns, measured
from wire import encode_command

MOST = 0.03  # seconds of the turn of INFO, for slow machines; a search for the bytes of each tenant takes 0.7 s
TRIES = 5  # a long turn is long each time, unless this machine did something else


def kept(first: int, last: int) -> bytes:
    """Return commands that store a value for each tenant, and keep it."""
    commands = []
    for number in range(first, last):
        name = b"%05d" % number
        commands += [[b"SET", name, b"value"], [b"KVPAGEKEEP", name, b"100000", b"600", name]]
    return b"".join(map(encode_command, commands))


def asked(turns: Turns) -> Cost:
    tries = [turns.cost(b"", encode_command([b"INFO", b"kvpage"])) for _ in range(TRIES)]
    return min(tries, key=lambda cost: cost.longest)


def test_info_is_a_short_turn_however_many_tenants() -> None:
    with measured() as turns:
        turns.cost(b"", kept(0, 2000))
        assert turns.on_loop(lambda: len(turns.server.keyspace.leases)) == 2000
        assert asked(turns).longest < MOST
