"""Memory that clients make grow, other than by commands and replies, is counted, bounded and freed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
import redis
from health import MIB
from servers import RunningServer, start_server
from waiting import until
from wire import Wire, encode_command, parse

from kvpage_server import core
from kvpage_server.commands.families.connections.caching import MOST_PREFIXES
from kvpage_server.commands.families.connections.connection import MOST_OF_A_NAME
from kvpage_server.commands.notifying.tracking import Prefixes

LIMIT = 16 * MIB  # of all clients


@pytest.fixture(scope="module")
def small() -> Iterator[RunningServer]:
    with start_server("--maxmemory", "64mb", "--maxmemory-clients", str(LIMIT)) as server:
        yield server


@pytest.fixture
def client(small: RunningServer) -> Iterator[redis.Redis]:
    with small.client() as client:
        client.flushall()
        until(lambda: held(client) == 0, "the end of other tests' clients")
        yield client


@pytest.fixture
def wire(small: RunningServer) -> Iterator[Wire]:
    with Wire(small.port) as wire:
        wire.ask(b"HELLO", b"3")
        yield wire


def held(client: redis.Redis) -> int:
    return int(client.info("memory")["mem_clients_normal"])


def tracked_bytes(client: redis.Redis) -> int:
    return int(client.info("stats")["tracking_total_bytes"])


def read(wire: Wire, key: bytes) -> list[bytes]:
    """Read a key that does not exist; the changed keys in messages to the client."""
    wire.send(encode_command([b"GET", key]) + encode_command([b"ECHO", b"done"]))
    received: list[bytes] = []
    while (frame := wire.reply()) != b"$4\r\ndone\r\n":
        received += parse(frame)[1] if frame.startswith(b">") else []
    return received


class TestTracking:
    def test_notes_of_long_keys_are_counted_and_bounded(self, client: redis.Redis, wire: Wire) -> None:
        wire.ask(b"CLIENT", b"TRACKING", b"ON")
        keys = [b"%03d" % i + b"k" * (MIB // 4) for i in range(40)]
        received = [key for read_key in keys for key in read(wire, read_key)]
        assert received == keys[: len(received)], "the oldest are lost first"
        assert MIB // 2 < tracked_bytes(client) <= LIMIT // 16
        assert tracked_bytes(client) <= held(client) < 2 * MIB

    @pytest.mark.parametrize("end", [[b"CLIENT", b"TRACKING", b"OFF"], [b"RESET"], [b"QUIT"]], ids=repr)
    def test_notes_are_given_back_at_the_end(self, client: redis.Redis, wire: Wire, end: list[bytes]) -> None:
        wire.ask(b"CLIENT", b"TRACKING", b"ON")
        for i in range(1000):
            read(wire, b"key:%d" % i)
        assert client.info("stats")["tracking_total_keys"] == 1000
        wire.ask(*end)
        until(lambda: not client.info("stats")["tracking_total_keys"])
        assert (tracked_bytes(client), held(client)) == (0, 0)

    def test_a_tenant_cannot_use_up_the_notes_of_others(self, small: RunningServer, client: redis.Redis) -> None:
        client.acl_setuser("narrow", enabled=True, nopass=True, keys=["narrow:*"], commands=["+@all"])
        with ExitStack() as stack:
            other, *tenants = (stack.enter_context(Wire(small.port)) for _ in range(9))
            for tenant in tenants:
                tenant.ask(b"AUTH", b"narrow", b"")
            for one in (other, *tenants):
                one.ask(b"HELLO", b"3")
                one.ask(b"CLIENT", b"TRACKING", b"ON")
            for i in range(1000):
                assert read(other, b"key:%d" % i) == []
            received = sum(len(read(tenant, b"narrow:%d" % i + b"n" * 50_000)) for i in range(20) for tenant in tenants)
            assert received > 0
            client.mset({f"key:{i}": "changed" for i in range(1000)})
            assert read(other, b"key") == [b"key:%d" % i for i in range(1000)]
        client.acl_deluser("narrow")

    def test_prefixes_are_bounded_in_bytes_and_number(self, client: redis.Redis, wire: Wire) -> None:
        def broadcast(prefixes: list[bytes]) -> bytes:
            words = [word for prefix in prefixes for word in (b"PREFIX", prefix)]
            return wire.ask(b"CLIENT", b"TRACKING", b"ON", b"BCAST", *words)

        refused = b"-ERR A prefix can have at most %d bytes, got %d\r\n" % (MOST_PREFIXES, MOST_PREFIXES + 1)
        assert broadcast([b"p" * (MOST_PREFIXES + 1)]) == refused
        for start in range(0, MOST_PREFIXES, 256):
            assert broadcast([b"%d:" % i for i in range(start, start + 256)]) == b"+OK\r\n"
        refused = b"-ERR A client can have at most %d prefixes, got %d\r\n" % (MOST_PREFIXES, MOST_PREFIXES + 1)
        assert broadcast([b"one more"]) == refused
        assert held(client) > MOST_PREFIXES * 100
        wire.ask(b"CLIENT", b"TRACKING", b"OFF")
        assert held(client) == 0


def test_a_name_is_not_compared_with_every_prefix() -> None:
    class Name(bytes):
        compared = 0

        def startswith(self, *args: object) -> bool:
            self.compared += 1
            return super().startswith(*args)  # type: ignore[arg-type]

    tree: Prefixes[bytes] = Prefixes()
    for i in range(8000):
        prefix = b"%d" % i + b"x" * i
        tree.set(prefix, prefix)
    name = Name(b"70" + b"x" * 30_000)
    assert list(tree.of(name)) == [b"70" + b"x" * 70]
    assert name.compared <= 4


NAME = b"n" * (MOST_OF_A_NAME + 1)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([b"CLIENT", b"SETNAME", NAME], b"Client names"),
        ([b"HELLO", b"3", b"SETNAME", NAME], b"Client names"),
        ([b"CLIENT", b"SETINFO", b"LIB-NAME", NAME], b"lib-name"),
        ([b"CLIENT", b"SETINFO", b"lib-ver", NAME], b"lib-ver"),
    ],
    ids=lambda words: repr(words)[:40],
)
def test_long_client_names_are_refused(wire: Wire, words: list[bytes], what: bytes) -> None:
    assert wire.ask(*words) == b"-ERR %b can have at most 1024 bytes, got 1025\r\n" % what
    assert wire.ask(*words[:-1], NAME[1:])[:1] in b"+%"


class TestNames:
    """Names of channels, patterns and watched keys, and queued commands."""

    @pytest.mark.parametrize(
        ("grow", "end"),
        [
            ([[b"WATCH", b"%d" % i] for i in range(1000)], [b"UNWATCH"]),
            ([[b"SUBSCRIBE", b"%d" % i] for i in range(1000)], [b"UNSUBSCRIBE"]),
            ([[b"PSUBSCRIBE", b"*%d" % i] for i in range(1000)], [b"PUNSUBSCRIBE"]),
            ([[b"MULTI"], *[[b"PING"]] * 1000], [b"DISCARD"]),
            ([[b"WATCH", b"%d" % i] for i in range(1000)], [b"RESET"]),
            ([[b"SUBSCRIBE", b"%d" % i] for i in range(1000)], [b"RESET"]),
        ],
        ids=lambda commands: repr(commands[0]),
    )
    def test_they_are_counted_and_given_back(
        self, client: redis.Redis, wire: Wire, grow: list[list[bytes]], end: list[bytes]
    ) -> None:
        number = parse(wire.ask(b"CLIENT", b"ID"))
        for words in [*grow, *grow[1:]]:  # a name that is there already counts once
            wire.ask(*words)
        assert 200_000 < held(client) < 1_000_000
        [line] = [line for line in client.client_list() if line["id"] == str(number)]
        assert int(line["tot-mem"]) == held(client)
        wire.ask(*end)
        until(lambda: held(client) == 0)

    @pytest.mark.skipif(core.NAME != "native", reason="a compiled regular expression takes more memory")
    @pytest.mark.parametrize("part", [b"a", b"*L", b"[a-z]", b"?"])
    def test_a_long_pattern_counts_no_more_than_it_takes(self, client: redis.Redis, wire: Wire, part: bytes) -> None:
        """Up to 17 bytes for each of its own, and not the 80 of a regular expression."""
        pattern = part * (960 // len(part))
        wire.ask(b"PSUBSCRIBE", pattern)
        assert 3 * len(pattern) < held(client) < 1000 + 17 * len(pattern)
        wire.ask(b"PUNSUBSCRIBE")
        until(lambda: held(client) == 0)

    @pytest.mark.parametrize("command", [b"WATCH", b"SUBSCRIBE"])
    def test_a_client_with_too_many_is_closed(
        self, small: RunningServer, client: redis.Redis, wire: Wire, command: bytes
    ) -> None:
        before = client.info("stats")["evicted_clients"]

        def ask_for_many() -> None:
            for i in range(100):
                wire.ask(command, b"%d" % i + b"k" * (MIB // 2))

        with pytest.raises((EOFError, OSError)):
            ask_for_many()
        assert client.info("stats")["evicted_clients"] == before + 1
        assert "held 16" in small.log
        until(lambda: held(client) == 0)


class TestWaiting:
    """Commands that wait, commands whose replies are not read, and messages behind these replies."""

    def test_messages_behind_an_unread_reply_are_counted(self, small: RunningServer, client: redis.Redis) -> None:
        for i in range(8):
            client.set(f"value:{i}", bytes(MIB))
        with Wire(small.port) as wire:
            wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.ask(b"HELLO", b"3")
            wire.ask(b"SUBSCRIBE", b"channel")
            wire.send(encode_command([b"MGET", *(b"value:%d" % (i % 8) for i in range(1000))]))
            before = client.info("stats")["evicted_clients"]

            def is_closed() -> bool:
                client.publish("channel", bytes(MIB // 2))
                return client.info("stats")["evicted_clients"] == before + 1

            assert any(is_closed() for _ in range(100))
        until(lambda: held(client) == 0)

    def test_words_of_a_command_count_until_its_reply_is_read(self, small: RunningServer, client: redis.Redis) -> None:
        client.set("value", bytes(MIB))
        with Wire(small.port) as wire:
            wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(encode_command([b"MGET", *[b"value"] * 50, *[b"absent"] * 50_000]))

            def other_bytes() -> int:
                [line] = [line for line in client.client_list() if line["cmd"] == "mget"]
                return int(line["tot-mem"]) - int(line["omem"]) - int(line["qbuf"])

            assert wire._incoming.read(10)
            assert other_bytes() > 50_000 * 48
        until(lambda: held(client) == 0)

    def test_a_paused_command_counts(self, small: RunningServer, client: redis.Redis) -> None:
        client.client_pause(60_000, all=False)
        with Wire(small.port) as wire:
            wire.send(encode_command([b"SET", b"key", bytes(4 * MIB)]))
            until(lambda: held(client) >= 4 * MIB)
            client.client_unpause()
            assert wire.reply() == b"+OK\r\n"
            until(lambda: held(client) == 0)

    def test_paused_commands_beyond_the_limit_close_clients(self, small: RunningServer, client: redis.Redis) -> None:
        client.client_pause(60_000, all=False)
        before = client.info("stats")["evicted_clients"]
        with ExitStack() as stack, suppress(OSError):
            for i in range(6):
                stack.enter_context(Wire(small.port)).send(encode_command([b"SET", b"key:%d" % i, bytes(4 * MIB)]))
            until(lambda: client.info("stats")["evicted_clients"] > before)
            assert held(client) <= LIMIT
        client.client_unpause()
        until(lambda: held(client) == 0)


def test_long_names_are_cut_in_the_acl_log(small: RunningServer, client: redis.Redis) -> None:
    client.acl_setuser("narrow", enabled=True, nopass=True, keys=["narrow:*"], commands=["+@all"])
    client.acl_log_reset()
    with Wire(small.port) as wire:
        wire.ask(b"AUTH", b"narrow", b"")
        for _ in range(3):
            wire.ask(b"GET", b"k" * 1000)
            wire.ask(b"AUTH", b"u" * 1000, b"wrong")
    by_auth, by_key = client.acl_log()
    assert (by_auth["username"], by_auth["count"]) == ("u" * 128, 3)
    assert (by_key["object"], by_key["count"]) == ("k" * 128, 3)
    client.acl_deluser("narrow")


@pytest.mark.parametrize("attacker", [None, "tenant"])
def test_small_holders_are_closed_before_another_users_large_one(attacker: str | None) -> None:
    """Strangers, or connections of one tenant, do not keep another user from sending a large value."""
    users = ("--user", "tenant", "on", ">open", "~*", "+@all", "--requirepass", "sesame")
    unfinished = b"*10\r\n" + 8 * (b"$16384\r\n" + bytes(16384) + b"\r\n")
    with (
        start_server("--maxmemory", "64mb", "--maxmemory-clients", str(LIMIT), *users) as server,
        server.client(password="sesame") as client,
        ExitStack() as stack,
    ):
        for _ in range(140):
            sock = stack.enter_context(server.connect())
            with suppress(OSError):  # the server has ended it
                if attacker:
                    sock.sendall(encode_command([b"AUTH", attacker.encode(), b"open"]))
                sock.sendall(unfinished)
        until(lambda: client.info("stats")["evicted_clients"] > 0, "more than clients may hold together")
        for _ in range(5):
            assert client.set("large", bytes(6 * MIB))
            assert len(client.get("large")) == 6 * MIB
