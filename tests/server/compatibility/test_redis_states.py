"""States that random commands do not reach, full memory, CLIENT REPLY, a pause: ours replies as redis-server does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_redis, start_server
from waiting import until
from wire import Wire, encode_command

pytestmark = pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)

Pair = tuple[RunningServer, RunningServer]  # redis-server and ours


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with start_redis() as theirs, start_server("--maxmemory-policy", "noeviction") as ours:
        yield theirs, ours


def answers(server: RunningServer, *commands: str, memory: int = 0) -> list[bytes]:
    """Return the replies to a new connection; `FULL` and `ROOM` make the server's memory full, or not."""
    with server.client() as client, Wire(server.port) as wire:
        replies = []
        for command in commands:
            if command in ("FULL", "ROOM"):
                client.config_set("maxmemory", int(command == "FULL"))
            else:
                replies.append(wire.ask(*command.encode().split()))
        client.config_set("maxmemory", 0)
        return replies


@pytest.mark.parametrize(
    ("commands", "refused"),
    [
        (("FULL", "MULTI", "SET a b", "EXEC"), True),
        (("FULL", "MULTI", "GET a", "PING", "EXEC"), True),
        (("FULL", "MULTI", "SET a b", "DISCARD", "GET a"), False),
        (("FULL", "MULTI", "EXEC"), False),
        (("MULTI", "SET a b", "GET a", "FULL", "EXEC", "EXEC"), True),
        (("MULTI", "GET a", "DEL a", "FULL", "EXEC"), False),
        (("FULL", "SET a b", "GET a", "DEL a"), False),
    ],
)
def test_full_memory_refuses_queued_commands_and_the_transaction(
    pair: Pair, commands: tuple[str, ...], refused: bool
) -> None:
    for server in pair:
        answers(server, "SET x y", "DEL a")
    theirs, ours = (answers(server, *commands) for server in pair)
    assert theirs == ours
    assert any(reply.startswith(b"-EXECABORT") for reply in ours) == refused


@pytest.mark.parametrize(
    "words",
    [
        ["CLIENT REPLY OFF", "PING", "SUBSCRIBE x y", "UNSUBSCRIBE x", "UNSUBSCRIBE y", "CLIENT REPLY ON"],
        ["CLIENT REPLY SKIP", "SUBSCRIBE x y", "UNSUBSCRIBE x", "UNSUBSCRIBE y", "PING"],
        ["HELLO 2", "CLIENT REPLY OFF", "PSUBSCRIBE x*", "GET a", "PUNSUBSCRIBE", "PUNSUBSCRIBE", "CLIENT REPLY ON"],
        ["CLIENT REPLY OFF", "HELLO 3", "MULTI", "SUBSCRIBE x y", "PING", "EXEC", "CLIENT REPLY ON"],
        ["CLIENT REPLY OFF", "HELLO 3", "SUBSCRIBE x", "PUBLISH x message", "CLIENT REPLY ON"],
    ],
    ids=" ".join,
)
def test_client_reply_off_suppresses_replies_and_no_pushes(pair: Pair, words: list[str]) -> None:
    received = []
    for server in pair:
        with Wire(server.port) as wire:
            wire.send(b"".join(encode_command(line.encode().split()) for line in [*words, "PING last"]))
            frames = []
            while not frames or b"last" not in frames[-1]:
                frames.append(wire.reply())
            received.append([frame for frame in frames if b"redis_version" not in frame and frame[:1] != b"%"])
    if "HELLO 2" in words:  # its reply names the version
        received = [frames[1:] for frames in received]
    assert received[0] == received[1]
    assert any(b"subscribe" in frame for frame in received[1])


@pytest.mark.parametrize("how", ["SKIP", "OFF"])
def test_reset_ends_silence_and_is_skipped_itself(pair: Pair, how: str) -> None:
    received = []
    for server in pair:
        with Wire(server.port) as wire:
            wire.send(
                b"".join(
                    encode_command(line.split()) for line in (b"CLIENT REPLY " + how.encode(), b"RESET", b"PING last")
                )
            )
            frames = [wire.reply()]
            while b"last" not in frames[-1]:
                frames.append(wire.reply())
            received.append(frames)
    assert received[0] == received[1]
    assert (b"+RESET\r\n" in received[1]) == (how == "OFF")


@pytest.mark.parametrize(("call", "reply"), [(b"SET a b", b"+OK\r\n"), (b"PUBLISH a b", b":0\r\n")])
def test_a_client_waiting_for_a_pause_is_listed_as_blocked(pair: Pair, call: bytes, reply: bytes) -> None:
    for server in pair:
        with server.client() as client, Wire(server.port) as wire:
            client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            wire.send(encode_command(call.split()))
            until(lambda: client.info("clients")["blocked_clients"] == 1)
            name = call.split()[0].decode().lower()
            assert [(it["flags"], it["cmd"]) for it in client.client_list() if it["flags"] != "N"] == [("b", name)]
            client.execute_command("CLIENT", "UNPAUSE")
            assert wire.reply() == reply
            assert client.info("clients")["blocked_clients"] == 0


def test_keys_expire_after_a_pause_and_not_during_it(pair: Pair) -> None:
    for server in pair:
        with server.client() as client:
            before = client.info("stats")["expired_keys"]
            client.flushall()
            client.set("a", "b", px=500)
            due = client.time()[0] + 3  # a second after the second in which the key is due
            client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            until(lambda due=due: client.time()[0] >= due)
            assert (client.dbsize(), client.info("stats")["expired_keys"]) == (1, before)
            client.execute_command("CLIENT", "UNPAUSE")
            until(lambda: client.dbsize() == 0)
            assert client.info("stats")["expired_keys"] == before + 1


def test_a_lowered_maxmemory_evicts_after_a_pause(pair: Pair) -> None:
    for server in pair:
        with server.client() as client:
            client.flushall()
            client.config_set("maxmemory-policy", "allkeys-lru")
            for i in range(8):
                client.set(f"k{i}", bytes(1 << 20))
            used, before = client.info("memory")["used_memory"], client.info("stats")["evicted_keys"]
            client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            client.config_set("maxmemory", used - (4 << 20))
            end = client.time()[0] + 2
            until(lambda end=end: client.time()[0] >= end)
            assert (client.dbsize(), client.info("stats")["evicted_keys"]) == (8, before)
            client.execute_command("CLIENT", "UNPAUSE")
            until(lambda before=before: client.ping() and client.info("stats")["evicted_keys"] > before)
            client.config_set("maxmemory", 0)
            client.config_set("maxmemory-policy", "noeviction")
            client.flushall()
