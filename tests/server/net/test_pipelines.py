"""Pipelined commands get the same replies as single ones, and cost little each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from servers import NO_REDIS, REDIS_SERVER, RunningServer, start_server, start_valkey, with_constants
from wire import Wire, encode_command

END = (b"ECHO", b"end of it")
ENDED = b"$9\r\nend of it\r\n"


def answers(server: RunningServer, *lines: str) -> bytes:
    """Return all reply bytes of pipelined commands."""
    with Wire(server.port) as wire:
        wire.send(b"".join(encode_command(line.encode().split()) for line in lines) + encode_command(END))
        replies = b""
        while not replies.endswith(ENDED):
            replies += wire.reply()
    return replies.removesuffix(ENDED)


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
    ("lines", "expected"),
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
def test_a_command_that_changes_the_mode_affects_the_next_one(
    server: RunningServer, lines: list[str], expected: bytes
) -> None:
    if "SUBSCRIBE pipe" not in lines:
        assert answers(server, *lines) == expected
        return
    with Wire(server.port) as wire:
        wire.send(b"".join(encode_command(line.encode().split()) for line in lines))
        assert wire.reply() + wire.reply() == expected


@pytest.mark.parametrize("turn", [0, 60 * 10**9], ids=["command by command", "all at once"])
def test_own_reply_precedes_the_invalidation(turn: int) -> None:
    """Pipelined commands may be answered in several turns. The invalidation is sent at the end of a turn."""
    program = with_constants("kvpage_server.net.session", TURN=turn)
    with start_server(program=program) as server, Wire(server.port) as wire, Wire(server.port) as other:
        wire.ask(b"HELLO", b"3")
        myself = wire.ask(b"CLIENT", b"ID")[1:-2]
        other.ask(b"HELLO", b"3")
        assert other.ask(b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", myself) == b"+OK\r\n"
        other.ask(b"GET", b"pipe:told")
        wire.send(encode_command([b"SET", b"pipe:told", b"1"]) + encode_command([b"PING"]))
        assert wire.reply() == b"+OK\r\n"
        invalidation = b">2\r\n$10\r\ninvalidate\r\n*1\r\n$9\r\npipe:told\r\n"
        assert {wire.reply(), wire.reply()} == {b"+PONG\r\n", invalidation}


def test_a_new_monitor_sees_its_own_next_command(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        wire.send(encode_command([b"PING"]) + encode_command([b"MONITOR"]) + encode_command([b"ECHO", b"seen"]))
        assert [wire.reply(), wire.reply()] == [b"+PONG\r\n", b"+OK\r\n"]
        shown, reply = sorted([wire.reply(), wire.reply()])
        assert (shown, reply[-15:]) == (b"$4\r\nseen\r\n", b'"ECHO" "seen"\r\n')


def test_no_line_of_monitor_follows_reset_and_quit(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        wire.send(b"".join(encode_command([word]) for word in (b"MONITOR", b"RESET", b"PING", b"MONITOR", b"QUIT")))
        assert [wire.reply() for _ in range(5)] == [b"+OK\r\n", b"+RESET\r\n", b"+PONG\r\n", b"+OK\r\n", b"+OK\r\n"]
        with pytest.raises(EOFError):
            wire.reply()


def test_a_monitor_sees_exec_behind_its_commands(server: RunningServer) -> None:
    with Wire(server.port) as wire, Wire(server.port) as other:
        wire.ask(b"MONITOR")
        other.send(b"".join(encode_command(words) for words in ([b"MULTI"], [b"ECHO", b"a"], [b"EXEC"])))
        shown = [wire.reply().split(b'"')[1] for _ in range(3)]
        assert shown == [b"MULTI", b"ECHO", b"EXEC"]


def test_client_reply_off_silences_a_monitor(server: RunningServer) -> None:
    with Wire(server.port) as wire, Wire(server.port) as other:
        wire.send(encode_command([b"MONITOR"]) + encode_command([b"CLIENT", b"REPLY", b"OFF"]))
        assert wire.reply() == b"+OK\r\n"
        other.ask(b"ECHO", b"unseen")
        wire.send(encode_command([b"CLIENT", b"REPLY", b"ON"]))
        line, reply = sorted([wire.reply(), wire.reply()])
        assert reply == b"+OK\r\n"
        assert b'"CLIENT" "REPLY" "ON"' in line
        other.ask(b"ECHO", b"seen")
        assert b'"ECHO" "seen"' in wire.reply()


def test_nothing_is_run_behind_quit(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        wire.send(
            encode_command([b"SET", b"pipe:quit", b"1"])
            + encode_command([b"QUIT"])
            + encode_command([b"SET", b"pipe:quit", b"2"])
        )
        assert [wire.reply(), wire.reply()] == [b"+OK\r\n", b"+OK\r\n"]
        with pytest.raises(EOFError):
            wire.reply()
    with server.client() as client:
        assert client.get("pipe:quit") == b"1"


def all_replies(wire: Wire, *lines: str) -> bytes:
    """Every byte until the server closes the connection."""
    wire.send(b"".join(encode_command(line.encode().split()) for line in lines))
    received = b""
    while True:
        try:
            received += wire.reply()
        except (EOFError, ConnectionResetError):
            return received


def behind_a_kill(server: RunningServer, *lines: str) -> tuple[bytes, bool]:
    """The replies to commands that end their own connection, and whether a SET behind them was run."""
    with server.client() as client, Wire(server.port) as wire:
        client.flushall()
        client.execute_command("ACL", "SETUSER", "mortal", "on", "nopass", "~*", "&*", "+@all")
        wire.ask(b"AUTH", b"mortal", b"")
        number = int(wire.ask(b"CLIENT", b"ID")[1:-2])
        address = next(each["addr"] for each in client.client_list() if each["id"] == str(number))
        sent = [line.format(id=number, address=address) for line in lines]
        return all_replies(wire, *sent, "SET pipe:after 1", "PING"), client.exists("pipe:after") == 1


KILLS = {
    "by id": ["CLIENT KILL ID {id} SKIPME no"],
    "by address": ["CLIENT KILL {address}"],
    "by user": ["CLIENT KILL USER mortal SKIPME no"],
    "by several": ["CLIENT KILL ID {id} ADDR {address} TYPE normal SKIPME no"],
    "user deleted": ["ACL DELUSER mortal"],
    "in a transaction": ["MULTI", "PING", "CLIENT KILL ID {id} SKIPME no", "EXEC"],
    "quit": ["QUIT"],
    "quit in a transaction": ["MULTI", "QUIT"],
    "before a long command": ["CLIENT KILL ID {id} SKIPME no", "MSET" + " pipe:after 1" * 2000],
}


@pytest.mark.skipif(not REDIS_SERVER, reason=NO_REDIS)
@pytest.mark.parametrize("lines", KILLS.values(), ids=KILLS)
def test_nothing_is_run_behind_a_kill_of_oneself(
    server: RunningServer, redis_server: RunningServer, lines: list[str]
) -> None:
    ours, theirs = (behind_a_kill(each, *lines) for each in (server, redis_server))
    assert not ours[1]
    if "EXEC" in lines:  # Redis closes before the whole reply to EXEC is sent
        assert ours[0].startswith(theirs[0])
        assert ours[0].endswith(b"*2\r\n+PONG\r\n:1\r\n")
    else:
        assert ours == theirs


def test_nothing_is_run_behind_a_kill_among_many(server: RunningServer) -> None:
    with server.client() as client:
        others = [Wire(server.port) for _ in range(200)]
        try:
            received, was_run = behind_a_kill(server, "CLIENT KILL USER mortal SKIPME no")
            assert (received, was_run) == (b":1\r\n", False)
            assert all(other.ask(b"PING") == b"+PONG\r\n" for other in others)
        finally:
            for other in others:
                other.close()
        assert client.ping()


def test_nothing_is_run_behind_a_shutdown() -> None:
    with start_server() as server, Wire(server.port) as wire:
        wire.ask(b"SUBSCRIBE", b"unread")
        with Wire(server.port) as other:
            assert all_replies(other, "SET pipe:a 1", "SHUTDOWN", "SET pipe:a 2", "PING") == b"+OK\r\n"


@pytest.fixture(scope="module")
def valkey() -> Iterator[RunningServer]:
    with start_valkey() as server:
        yield server


@pytest.mark.parametrize("word", ["ON", "OFF", "SKIP", "NONSENSE"])
def test_client_reply_in_a_transaction_is_refused(server: RunningServer, valkey: RunningServer, word: str) -> None:
    lines = ["MULTI", f"CLIENT REPLY {word}", "SET pipe:a 1", "EXEC", "PING", "QUIT"]
    with Wire(server.port) as ours, Wire(valkey.port) as theirs:
        replies = all_replies(ours, *lines)
        assert replies == all_replies(theirs, *lines)
        assert replies.endswith(b"EXECABORT Transaction discarded because of previous errors.\r\n+PONG\r\n+OK\r\n")
        assert b"Command 'client|reply' not allowed inside a transaction" in replies


def test_monitor_in_a_transaction_is_refused(server: RunningServer) -> None:
    with Wire(server.port) as wire:
        assert all_replies(wire, "MULTI", "MONITOR", "SET pipe:a 1", "EXEC", "PING", "QUIT") == (
            b"+OK\r\n-ERR Command 'monitor' not allowed inside a transaction\r\n+QUEUED\r\n"
            b"-EXECABORT Transaction discarded because of previous errors.\r\n+PONG\r\n+OK\r\n"
        )


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
        wire.send(encode_command([b"PING"]) + encode_command(words))
        assert wire.reply() + wire.reply()
        client.flushall()
        assert client.info("memory")["arena_used"] == before
