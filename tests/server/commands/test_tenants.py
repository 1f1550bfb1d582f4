"""A tenant, a user with `~kv:tenantA.*`, gets no information about other tenants from any command of the table."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import redis
from servers import RunningServer, start_server
from wire import Wire, encode_command

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import TABLE, Spec, arguments

Words = list[bytes]

SECRET = b"tenantB"  # in the name of everything that the tenant must not learn of
BODY = b"what tenantB computed"
MOST_CALLS = 24  # a command

USERS = (
    *("--user", "default", "off"),
    *("--user", "admin", "on", "nopass", "~*", "&*", "+@all"),
    *("--user", "tenantA", "on", "nopass", "~kv:tenantA.*", "&tenantA.*", "+@all"),
    *("--user", "listener", "on", "nopass", "~kv:tenantA.*", "&*", "+@all"),
    *("--user", "tenantB", "on", "nopass", "~kv:tenantB.*", "&tenantB.*", "+@all"),
)

# Values of an argument by name: the tenant's own, then another tenant's.
ARGUMENTS = {
    "key": [b"kv:tenantA.x:0:0:0:0", b"kv:tenantB.secret:0:0:0:0", b"kv:tenantB.secret:index", b"plain:tenantB"],
    "req": [b"tenantA.x", b"tenantB.secret"],
    "pattern": [b"*", b"*tenantB*"],
    "channel": [b"tenantA.news", b"tenantB.news", b"__keyevent@0__:set"],
    "username": [b"tenantB"],
    "section": [b"everything", b"keyspace"],
    "parameter": [b"*"],
    "command": [b"GET"],
    "command-name": [b"get"],
    "arg": [b"kv:tenantB.secret:0:0:0:0"],
    "client-id": [b"1"],
    "ip:port": [b"127.0.0.1:1"],
    "cursor": [b"0"],
    "count": [b"1000"],
    "type": [b"0", b"string"],
    **{name: [b"0"] for name in ("layer", "head", "page")},
    "body": [b"mine"],
    "value": [b"mine"],
    "password": [b"no"],
}


def calls_of(spec: Spec) -> list[Words]:
    """Return calls of a command with each choice, with and without its optional arguments."""
    name = [word.encode() for word in spec.name.split("|")]
    tails = _sequences(arguments(spec.usage))
    return [name + tail for tail in sorted(tails, key=lambda tail: SECRET not in b" ".join(tail))[:MOST_CALLS]]


def _sequences(tree: list[dict[str, Any]]) -> list[Words]:
    choices = [_choices(argument) for argument in tree]
    found = [[word for part in parts for word in part] for parts in _some(choices)]
    return [call for call in found if call is not None]


def _some(choices: list[list[Words]]) -> Iterator[tuple[Words, ...]]:
    """All combinations where they are few; else those in which everything is the first, or the last, of its kind."""
    count = 1
    for choice in choices:
        count *= len(choice)
    if count <= 200:
        yield from product(*choices)
    else:
        longest = max(map(len, choices))
        yield from (tuple(choice[min(i, len(choice) - 1)] for choice in choices) for i in range(longest))


def _choices(argument: dict[str, Any]) -> list[Words]:
    flags = argument.get("flags", [])
    found = _once(argument)
    if "multiple" in flags and len(found) > 1:
        found = [*found, found[0] + found[-1]]  # one's own, then another's
    return [[], *found] if "optional" in flags else found


def _once(argument: dict[str, Any]) -> list[Words]:
    token = [argument["token"].encode()] if "token" in argument else []
    if argument["type"] == "oneof":
        return [words for one in argument["arguments"] for words in _choices(one)]
    if argument["type"] == "block":
        return [token + words for words in _sequences(argument["arguments"])]
    if argument["type"] == "pure-token":
        return [token]
    return [[*token, value] for value in ARGUMENTS.get(argument["name"], [b"1"])]


def test_calls_are_made_for_every_command() -> None:
    calls = {name: calls_of(spec) for name, spec in TABLE.items()}
    assert all(calls.values())
    for name, spec in TABLE.items():
        if spec.keys[0] or spec.uses:
            assert any(SECRET in b" ".join(call) for call in calls[name]), f"{name} was never asked about another's key"


@pytest.fixture(scope="module")
def alone() -> Iterator[RunningServer]:
    """A server on which the tenant is alone."""
    with start_server(*USERS) as server:
        _fill(server, "tenantA")
        yield server


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    """A server on which others have pages, strings, connections, subscriptions, and did and were refused much."""
    options = ("--slowlog-log-slower-than", "0", "--slowlog-max-len", "1000", "--latency-monitor-threshold", "1")
    with ExitStack() as stack:
        server = stack.enter_context(start_server(*USERS, *options))
        other, listener, waiting = (stack.enter_context(Wire(server.port)) for _ in range(3))
        _fill(server, "tenantA")
        _fill(server, "tenantB")
        other.ask(b"AUTH", b"admin", b"")
        other.ask(b"SET", b"plain:tenantB", BODY)
        other.ask(b"GET", b"plain:tenantC")
        other.ask(b"CLIENT", b"SETNAME", b"tenantB")
        listener.ask(b"AUTH", b"tenantB", b"")
        listener.ask(b"GET", b"plain:tenantB")
        listener.ask(b"SUBSCRIBE", b"tenantB.news")
        waiting.ask(b"AUTH", b"tenantB", b"")
        waiting.ask(b"MULTI")
        waiting.ask(b"GET", b"kv:tenantB.secret:0:0:0:0")
        yield server


def _fill(server: RunningServer, tenant: str) -> None:
    with Wire(server.port) as wire:
        assert wire.ask(b"AUTH", tenant.encode(), b"") == b"+OK\r\n"
        req = b"tenantA.x" if tenant == "tenantA" else b"tenantB.secret"
        for page in range(3 if tenant == "tenantB" else 1):
            words = [req, b"0", b"0", b"%d" % page, b"0"]
            assert (
                wire.ask(b"KVPAGESET", *words, b"1", b"1", b"8", b"0", BODY if tenant == "tenantB" else b"mine")
                == b"+OK\r\n"
            )


def answer(server: RunningServer, user: bytes, call: Words) -> bytes:
    """Return everything that a new connection of a user receives after a call, up to the reply of a marker."""
    received = b""
    with Wire(server.port) as wire:
        assert wire.ask(b"AUTH", user, b"") == b"+OK\r\n"
        last = [[b"CLIENT", b"REPLY", b"ON"], [b"DISCARD"], [b"ECHO", b"that is all"]]
        wire.send(encode_command(call) + b"".join(map(encode_command, last)))
        while True:
            try:
                reply = wire.reply()
            except (EOFError, ConnectionResetError):
                return received
            if reply == b"$11\r\nthat is all\r\n" or reply.startswith((b"-ERR Can't execute 'echo'", b"-NOAUTH")):
                return received
            received += reply


# Values that differ between moments and processes.
MOMENTARY = re.compile(
    rb"(?<=server_time_usec:)\d+|(?<=uptime_in_seconds:)\d+|(?<=process_id:)\d+|(?<=run_id:)\w+|(?<=tcp_port:)\d+|"
    rb"(?<=master_replid:)\w+|(?<=\bid=)\d+|(?<=addr=127.0.0.1:)\d+|(?<=fd=)\d+|(?<=age=)\d+|(?<=idle=)\d+|"
    rb"(?<=\$2\r\nid\r\n:)\d+|(?<=_ms\r\n:)\d+|\$\d+(?=\r\n(?:# Server|id=))"
)
RANDOM = {"time", "acl|genpass", "client|id"}
BY_THE_CLOCK = {b"GT", b"LT"}  # whether an expiry is later than the one that was set a moment ago
YES_OR_NO = re.compile(rb"\A:[01](?=\r\n)")


def test_replies_equal_those_of_a_server_without_other_tenants(alone: RunningServer, shared: RunningServer) -> None:
    for name, spec in TABLE.items():
        for call in calls_of(spec):
            here, there = (answer(server, b"tenantA", call) for server in (alone, shared))
            assert BODY not in there, call
            assert SECRET in b" ".join(call) or SECRET not in there, call
            if BY_THE_CLOCK & {*call}:
                here, there = (YES_OR_NO.sub(b":", received) for received in (here, there))
            if name not in RANDOM:
                assert MOMENTARY.sub(b"", here) == MOMENTARY.sub(b"", there), f"{call} knows of others"


def test_the_same_calls_show_an_administrator_much(shared: RunningServer) -> None:
    """Or the test above would prove nothing."""
    reading = [name for name, spec in TABLE.items() if not spec.flags & {"write", "admin"}]
    telling = {
        name
        for name in ["slowlog|get", *reading]
        for call in calls_of(TABLE[name])
        if SECRET in (received := answer(shared, b"admin", call)).replace(b" ".join(call), b"") or BODY in received
    }
    assert {"keys", "scan", "get", "mget", "kvpageget", "kvpagemget", "slowlog|get"} <= telling


def test_a_batch_with_one_page_of_another_does_nothing(shared: RunningServer) -> None:
    mine, other = b"tenantA.y 0 0 0 0".split(), b"tenantB.secret 0 0 7 0".split()
    page = b"1 1 4 0 mine".split()
    received = answer(shared, b"tenantA", [b"KVPAGEMSET", b"2", *mine, *page, *other, *page])
    assert received.startswith(b"-NOPERM No permissions to access a key\r\n")
    assert answer(shared, b"tenantA", [b"KVPAGEEXISTS", *mine]).startswith(b":0\r\n")
    assert answer(shared, b"admin", [b"KVPAGEEXISTS", *other]).startswith(b":0\r\n")


def test_a_scan_visits_few_keys_in_a_call(shared: RunningServer) -> None:
    """A call of a tenant takes no longer than a call of another user, also in a transaction."""
    with (
        shared.client(username="admin", password="") as admin,
        shared.client(username="tenantA", password="") as tenant,
    ):
        admin.mset({f"others:{i}": "x" for i in range(20_000)})
        tenant.mset({f"kv:tenantA.k:{i}": "x" for i in range(3_000)})
        cursor, found, calls = 0, set[bytes](), 0
        while cursor or not calls:
            cursor, keys = tenant.execute_command("SCAN", cursor, "COUNT", 1_000_000, "MATCH", "kv:tenantA.k:*")
            assert len(keys) <= 1000
            found.update(keys)
            calls += 1
        assert found == {b"kv:tenantA.k:%d" % i for i in range(3_000)}
        assert calls >= 23
        assert len(tenant.execute_command("SCAN", 0, "COUNT", 1)[1]) <= 1
        admin.delete(*(f"others:{i}" for i in range(20_000)))
        tenant.delete(*found)


def test_lists_and_counts_are_of_its_own(shared: RunningServer) -> None:
    with shared.client(username="tenantA", password="") as tenant:
        mine = b"kv:tenantA.x:0:0:0:0"
        tenant.delete(*tenant.keys())
        _fill(shared, "tenantA")
        assert tenant.keys() == [mine]
        assert set(tenant.scan_iter()) == {mine}
        assert list(tenant.scan_iter(_type="set")) == [b"kv:tenantA.x:index"]
        assert tenant.dbsize() == 1
        assert tenant.randomkey() == mine
        assert {entry["user"] for entry in tenant.client_list()} == {"tenantA"}
        assert tenant.client_kill_filter(_id=1) == 0
        assert tenant.pubsub_channels() == []
        assert {"db0", "evicted_keys", "used_memory", "connected_clients"}.isdisjoint(tenant.info("all"))


def test_events_are_limited_to_its_own_keys(shared: RunningServer) -> None:
    """A right to every channel does not change this."""
    with shared.client(username="admin", password="") as admin:
        admin.config_set("notify-keyspace-events", "KEA")
        with shared.client(username="listener", password="") as listener, listener.pubsub() as events:
            events.psubscribe("*")
            assert events.get_message(timeout=60)["type"] == "psubscribe"
            admin.set("kv:tenantB.other", "x")
            admin.set("plain:tenantB", BODY)
            admin.set("kv:tenantA.note", "x")
            received = [events.get_message(timeout=60) for _ in range(2)]
            assert [message["data"] for message in received] == [b"set", b"kv:tenantA.note"]
            assert events.get_message(timeout=0.1) is None
        admin.delete("kv:tenantB.other", "kv:tenantA.note")


def test_a_pattern_for_part_of_a_request_does_not_open_all_of_it(shared: RunningServer) -> None:
    """Commands for a whole request require the right to its whole prefix."""
    with shared.client(username="admin", password="") as admin:
        admin.acl_setuser("layer0", enabled=True, nopass=True, keys=["kv:tenantB.secret:0:*"], commands=["+@all"])
        assert answer(shared, b"layer0", [b"KVPAGEGET", *b"tenantB.secret 0 0 0 0".split()]).startswith(
            b"$%d\r\n" % len(BODY)
        )
        for refused in (
            b"KVPAGEINDEX tenantB.secret",
            b"KVPAGEDEL tenantB.secret",
            b"KVPAGEGET tenantB.secret 1 0 0 0",
        ):
            assert answer(shared, b"layer0", refused.split()).startswith(b"-NOPERM")
        admin.acl_deluser("layer0")


def test_an_index_needs_the_right_to_all_its_keys(shared: RunningServer) -> None:
    index, key = "kv:tenantB.secret:index", "kv:tenantB.secret:0:0:0:0"
    with shared.client(username="admin", password="x") as admin:
        for user, pattern in (("part", "kv:tenantB.secret:[^1]*"), ("indexes", "kv:*:index"), ("all", "kv:tenantB.*")):
            admin.acl_setuser(user, enabled=True, nopass=True, keys=[pattern], commands=["+@all"])
            with shared.client(username=user, password="x") as client:
                for words in (["SMEMBERS", index], ["SSCAN", index, 0], ["SCARD", index], ["SISMEMBER", index, key]):
                    if user == "all":
                        assert client.execute_command(*words)
                        continue
                    with pytest.raises(redis.exceptions.NoPermissionError):
                        client.execute_command(*words)
            admin.acl_deluser(user)


def test_a_change_of_rights_cancels_transactions_that_watch(shared: RunningServer) -> None:
    """Otherwise the reply of EXEC shows whether a key has changed after its user has lost the right to it."""
    with shared.client(username="admin", password="x") as admin:
        admin.acl_setuser("watcher", enabled=True, nopass=True, keys=["plain:*"], commands=["+@all"])
        with Wire(shared.port) as wire:
            assert wire.ask(b"AUTH", b"watcher", b"x") == b"+OK\r\n"
            for watched in (True, False):
                if watched:
                    wire.ask(b"WATCH", b"plain:secret")
                wire.ask(b"MULTI")
                wire.ask(b"PING")
                admin.acl_setuser("watcher", reset_keys=True, keys=["other:*"])
                assert wire.ask(b"EXEC") == (b"*-1\r\n" if watched else b"*1\r\n+PONG\r\n")
        admin.acl_deluser("watcher")


def test_refusals_take_as_long_as_replies(shared: RunningServer) -> None:
    """Its many pages are checked in a batch: 256 of them cost little more than the batch itself."""
    names = [word for page in range(256) for word in (b"tenantA.x", b"0", b"0", b"%d" % page, b"0")]
    call = encode_command([b"KVPAGEMEXISTS", b"256", *names])

    def seconds(wire: Wire) -> float:
        start = time.perf_counter()
        wire.send(call)
        assert wire.reply().startswith(b"*256\r\n")
        return time.perf_counter() - start

    with Wire(shared.port) as refused, Wire(shared.port) as allowed:
        refused.ask(b"AUTH", b"tenantA", b"")
        allowed.ask(b"AUTH", b"admin", b"")
        times = [(seconds(refused), seconds(allowed)) for _ in range(100)]  # alternately, on a busy machine
    assert min(first for first, _ in times) < 5 * min(second for _, second in times)
