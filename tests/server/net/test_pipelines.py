"""Commands that are sent together are answered like those that are sent one after another, and cost little each."""

from __future__ import annotations

import pytest
from servers import RunningServer
from wire import Wire, spell

END = (b"ECHO", b"end of it")
ENDED = b"$9\r\nend of it\r\n"


def answers(server: RunningServer, *lines: str) -> bytes:
    """Every byte that comes of commands sent at once."""
    with Wire(server.port) as wire:
        wire.send(b"".join(spell(line.encode().split()) for line in lines) + spell(END))
        came = b""
        while not came.endswith(ENDED):
            came += wire.reply()
    return came.removesuffix(ENDED)


PLAIN = [
    ("PING", b"+PONG\r\n"),
    ("SET pipe:a 1", b"+OK\r\n"),
    ("GET pipe:a", b"$1\r\n1\r\n"),
    ("GET pipe:none", b"$-1\r\n"),
    ("INCR pipe:a", b":2\r\n"),
    ("DEL pipe:a pipe:none", b":1\r\n"),
]


def test_plain_commands_are_answered_in_order(server: RunningServer) -> None:
    lines, replies = zip(*(PLAIN * 40), strict=True)
    assert answers(server, *lines) == b"".join(replies)


@pytest.mark.parametrize(
    ("lines", "came"),
    [
        (["CLIENT REPLY SKIP", "PING", "PING"], b"+PONG\r\n"),
        (["PING", "CLIENT REPLY OFF", "PING", "CLIENT REPLY ON", "PING"], b"+PONG\r\n+OK\r\n+PONG\r\n"),
        (["MULTI", "PING", "EXEC", "PING"], b"+OK\r\n+QUEUED\r\n*1\r\n+PONG\r\n+PONG\r\n"),
        (
            ["PING", "NONSENSE", "PING"],
            b"+PONG\r\n-ERR unknown command 'NONSENSE', with args beginning with: \r\n+PONG\r\n",
        ),
        (["GET", "PING"], b"-ERR wrong number of arguments for 'get' command\r\n+PONG\r\n"),
        (["SET a b c", "PING"], b"-ERR syntax error\r\n+PONG\r\n"),
        (
            ["SET kv:r:index x", "SET kv:r::index x", "DEL kv:r::index kv:r:index", "PING"],
            b"-ERR an index key is read-only: it lists the pages that its request has\r\n+OK\r\n"
            b"-ERR an index key is read-only: it lists the pages that its request has\r\n+PONG\r\n",
        ),
        (["ping", "Ping", "pInG x"], b"+PONG\r\n+PONG\r\n$1\r\nx\r\n"),
        (["SUBSCRIBE pipe", "PING"], b"*3\r\n$9\r\nsubscribe\r\n$4\r\npipe\r\n:1\r\n*2\r\n$4\r\npong\r\n$0\r\n\r\n"),
    ],
)
def test_what_changes_how_the_next_command_is_treated_does_so(
    server: RunningServer, lines: list[str], came: bytes
) -> None:
    if "SUBSCRIBE pipe" not in lines:
        assert answers(server, *lines) == came
        return
    with Wire(server.port) as wire:
        wire.send(b"".join(spell(line.encode().split()) for line in lines))
        assert wire.reply() + wire.reply() == came


def test_a_client_that_is_told_of_its_own_change_gets_the_replies_first(server: RunningServer) -> None:
    with Wire(server.port) as wire, Wire(server.port) as other:
        wire.ask(b"HELLO", b"3")
        myself = wire.ask(b"CLIENT", b"ID")[1:-2]
        other.ask(b"HELLO", b"3")
        assert other.ask(b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", myself) == b"+OK\r\n"
        other.ask(b"GET", b"pipe:told")
        wire.send(spell([b"SET", b"pipe:told", b"1"]) + spell([b"PING"]))
        assert [wire.reply() for _ in range(3)] == [
            b"+OK\r\n",
            b"+PONG\r\n",
            b">2\r\n$10\r\ninvalidate\r\n*1\r\n$9\r\npipe:told\r\n",
        ]


def test_a_client_that_begins_to_monitor_sees_what_it_sends_next(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        wire.send(spell([b"PING"]) + spell([b"MONITOR"]) + spell([b"ECHO", b"seen"]))
        assert [wire.reply(), wire.reply()] == [b"+PONG\r\n", b"+OK\r\n"]
        shown, reply = sorted([wire.reply(), wire.reply()])
        assert (shown, reply[-15:]) == (b"$4\r\nseen\r\n", b'"ECHO" "seen"\r\n')


def test_nothing_is_run_behind_quit(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        wire.send(spell([b"SET", b"pipe:quit", b"1"]) + spell([b"QUIT"]) + spell([b"SET", b"pipe:quit", b"2"]))
        assert [wire.reply(), wire.reply()] == [b"+OK\r\n", b"+OK\r\n"]
        with pytest.raises(EOFError):
            wire.reply()
    with server.client() as client:
        assert client.get("pipe:quit") == b"1"


def test_calls_of_a_pipeline_are_counted(server: RunningServer) -> None:
    with server.client() as client:
        client.config_resetstat()
        lines, _ = zip(*(PLAIN * 10), strict=True)
        answers(server, *lines)
        stats = client.info("commandstats")
        assert [stats[f"cmdstat_{name}"]["calls"] for name in ("ping", "set", "get", "incr", "del")] == [
            10,
            10,
            20,
            10,
            10,
        ]
        assert client.info("stats")["keyspace_misses"] == 10


@pytest.mark.parametrize(
    "command", ["SET pipe:kept LONG", "SET a b LONG", "GETRANGE LONG 0 x", "KVPAGEGET 0 0 0 0 LONG"]
)
def test_no_value_is_kept_by_the_connection_that_sent_it(server: RunningServer, command: str) -> None:
    words = [b"x" * 5000 if word == "LONG" else word.encode() for word in command.split()]
    with server.client() as client, Wire(server.port) as wire:
        client.flushall()
        before = client.info("memory")["arena_used"]
        wire.send(spell([b"PING"]) + spell(words))
        assert wire.reply() + wire.reply()
        client.flushall()
        assert client.info("memory")["arena_used"] == before
