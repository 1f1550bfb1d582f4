"""ACL GETUSER names the command rules of a user as Valkey 9 and Redis 7.2 do, also those without an effect."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from servers import RunningServer

from benchmarks.servers import start_valkey

RULES = [
    "+@all",
    "-@all",
    "allcommands",
    "nocommands",
    "+get",
    "-get",
    "+set",
    "-set",
    "+client",
    "-client",
    "+client|id",
    "-client|id",
    "+@read",
    "-@read",
    "+@string",
    "-@string",
    "+@geo",
    "-@geo",
    "+@hash",
    "+@list",
    "-@scripting",
    "+@stream",
    "+geoadd",
    "-geoadd",
    "+script|load",
    "-function",
]


@pytest.fixture(scope="module")
def valkey() -> Iterator[redis.Redis]:
    with start_valkey() as server, redis.Redis(port=server.port, protocol=3) as client:
        yield client


def command_rules(client: redis.Redis, rules: list[str]) -> Any:
    ask: Any = client.execute_command
    ask("ACL", "DELUSER", "u")
    ask("ACL", "SETUSER", "u", *rules)
    return ask("ACL", "GETUSER", "u")[b"commands"]


def test_a_category_without_a_command_is_kept(server: RunningServer, valkey: redis.Redis) -> None:
    with server.client(protocol=3) as client:
        for rules in (["-@geo"], ["+@all", "-@geo"], ["+@all", "+get"], ["+@all", "-cluster", "-cluster|info"]):
            wanted = rules if rules[0] == "+@all" else ["-@all", *rules]
            for asked in (client, valkey):
                assert command_rules(asked, rules).decode() == " ".join(wanted), asked


def test_random_rules_read_as_on_valkey(server: RunningServer, valkey: redis.Redis) -> None:
    rng = random.Random(37)
    with server.client(protocol=3) as client:
        for _ in range(300):
            rules = rng.choices(RULES, k=rng.randint(1, 5))
            ours, theirs = command_rules(client, rules), command_rules(valkey, rules)
            assert ours == theirs, rules
        client.execute_command("ACL", "DELUSER", "u")
