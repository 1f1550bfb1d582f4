"""redis-cli and redis-benchmark as people use them: at a prompt, in pipes, and in every mode that looks at keys."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pexpect
import pytest
import redis
from servers import RunningServer
from waiting import until
from wire import encode_command

REDIS_CLI = shutil.which("redis-cli") or ""
REDIS_BENCHMARK = shutil.which("redis-benchmark") or ""
pytestmark = pytest.mark.skipif(
    not (REDIS_CLI and REDIS_BENCHMARK), reason="redis-cli is not installed (Debian: apt-get install redis-tools)"
)

EXAMPLE = ["test_req_001", "5", "8", "42", "0"]


class Terminal(pexpect.spawn):
    """The terminal of a person."""

    def enter(self, line: str) -> None:
        """Type a line; the terminal is in raw mode, where Enter is a carriage return."""
        self.send(line + "\r")


class Cli:
    """redis-cli on one server."""

    def __init__(self, server: RunningServer) -> None:
        self.command = [REDIS_CLI, "-p", str(server.port)]

    def raw(self, *words: str, stdin: bytes = b"") -> bytes:
        result = subprocess.run([*self.command, *words], input=stdin, capture_output=True, timeout=100)
        assert result.returncode == 0, result.stderr + result.stdout
        return result.stdout

    def __call__(self, *words: str, stdin: bytes = b"") -> str:
        return self.raw(*words, stdin=stdin).decode().rstrip("\n")

    @contextmanager
    def running(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """One that would run for ever."""
        process = subprocess.Popen(
            [*self.command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8"
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)
            assert process.stdout
            process.stdout.close()

    @contextmanager
    def in_a_terminal(self, *words: str) -> Iterator[Terminal]:
        """In one wide enough for hints."""
        child = Terminal(
            self.command[0], [*self.command[1:], *words], dimensions=(50, 250), timeout=60, encoding="utf-8"
        )
        try:
            yield child
        finally:
            child.close(force=True)

    @contextmanager
    def at_the_prompt(self) -> Iterator[Terminal]:
        """An interactive session."""
        with self.in_a_terminal() as prompt:
            prompt.expect(r"127\.0\.0\.1:\d+> ")
            yield prompt


@pytest.fixture
def cli(server: RunningServer, client: redis.Redis) -> Cli:
    """On an empty server."""
    return Cli(server)


@pytest.fixture
def stored(client: redis.Redis) -> int:
    """Three hundred short strings, a long one and two pages."""
    client.mset({f"user:{i}": "x" * i for i in range(300)})
    client.set("long", bytes(500_000))
    for page in range(2):
        client.execute_command("KVPAGESET", "agent", 0, 0, page, 0, 1, 256, 128, 0, bytes(65536))
    return 303


class TestOneCommand:
    def test_the_documented_example(self, cli: Cli) -> None:
        assert cli("KVPAGESET", *EXAMPLE, "1", "128", "64", "3600", "BLOB_DATA") == "OK"
        assert cli("KVPAGEGET", *EXAMPLE) == "BLOB_DATA"
        assert cli("KVPAGEEXISTS", *EXAMPLE) == "1"
        assert cli("--no-raw", "KVPAGEGET", "absent", "5", "8", "42", "0") == "(nil)"
        assert cli("--no-raw", "TTL", "kv:test_req_001:5:8:42:0") in ("(integer) 3600", "(integer) 3599")

    def test_errors(self, cli: Cli) -> None:
        assert cli("--no-raw", "NOSUCH", "a").startswith("(error) ERR unknown command 'NOSUCH', with args beginning")
        refused = subprocess.run([*cli.command, "-e", "KVPAGEGET", "a", "b", "0", "0", "0"], capture_output=True)
        assert refused.returncode == 1
        assert b"ERR layer_idx must be an integer between 0 and 65535, got 'b'" in refused.stdout + refused.stderr

    def test_the_last_argument_from_standard_input(self, cli: Cli, client: redis.Redis) -> None:
        body = bytes(range(256)) * 400
        assert cli("-x", "KVPAGESET", *EXAMPLE, "1", "400", "128", "0", stdin=body) == "OK"
        assert client.execute_command("KVPAGEGET", *EXAMPLE) == body
        assert cli.raw("--raw", "KVPAGEGET", *EXAMPLE) == body + b"\n"
        assert cli("-X", "TAG", "SET", "TAG", "value", stdin=b"key") == "OK"
        assert client.get("key") == b"value"

    def test_formats(self, cli: Cli) -> None:
        cli("MSET", "a", "1", "b", "two words")
        assert cli("--csv", "MGET", "a", "b", "c") == '"1","two words",NULL'
        assert json.loads(cli("--json", "MGET", "a", "b", "c")) == ["1", "two words", None]
        assert json.loads(cli("--json", "-3", "CONFIG", "GET", "databases")) == {"databases": "1"}
        assert json.loads(cli("--json", "HELLO", "3"))["proto"] == 3
        assert "redis_version:" in cli("INFO", "server")
        assert cli("-r", "3", "INCR", "counter").split() == ["1", "2", "3"]

    def test_every_command_is_described(self, cli: Cli) -> None:
        commands = json.loads(cli("--json", "COMMAND"))
        docs = json.loads(cli("--json", "-3", "COMMAND", "DOCS"))
        assert len(commands) == int(cli("COMMAND", "COUNT")) > 90
        assert {command[0] for command in commands} == set(docs)
        assert all(entry["summary"] and entry["since"] and entry["group"] for entry in docs.values())


class TestPrompt:
    def test_commands_and_their_replies(self, cli: Cli) -> None:
        with cli.at_the_prompt() as prompt:
            for typed, shown in [
                ("ping", "PONG"),
                ('set greeting "hello \\x41\\n"', "OK"),
                ("get greeting", r'"hello A\\n"'),
                ("get absent", r"\(nil\)"),
                ("incr greeting", r"\(error\) ERR value is not an integer or out of range"),
                ("kvpageset r 0 0 0 0 1 2 1 0 body", "OK"),
                ("kvpagemget 2 r 0 0 0 0 r 0 0 1 0", r'1\) "body"\s+2\) \(nil\)'),
                ("hello 3", r'1# "server" => "redis"'),
                ("config get databases", r'1# "databases" => "1"'),
            ]:
                prompt.enter(typed)
                prompt.expect(shown)

    def test_hints_say_which_arguments_follow(self, cli: Cli) -> None:
        with cli.at_the_prompt() as prompt:
            for typed, hint in [
                ("kvpageset ", "req layer head page type dtype page_size head_dim ttl body"),
                ("kvpageset r 5 ", "head page type dtype page_size head_dim ttl body"),
                ("kvpagemget ", "N req layer head page type"),
                ("set ", r"key value \[NX\|XX\]"),
                ("expire key ", r"seconds \[NX\|XX\|GT\|LT\]"),
                ("client setname ", "connection-name|name"),
            ]:
                prompt.send(typed)
                prompt.expect(hint)
                prompt.sendcontrol("u")

    def test_tab_completes_commands(self, cli: Cli) -> None:
        with cli.at_the_prompt() as prompt:
            prompt.send("kvpageex\t")
            prompt.expect("KVPAGEEXISTS|kvpageexists")
            prompt.enter(" r 0 0 0 0")
            prompt.expect(r"\(integer\) 0")

    def test_help_describes_a_command(self, cli: Cli) -> None:
        with cli.at_the_prompt() as prompt:
            prompt.enter("help kvpageget")
            prompt.expect(r"KVPAGEGET\S* \S*req layer head page type")
            prompt.expect("summary:.*Returns a page's body")
            prompt.expect("since:")
            prompt.enter("help @string")
            prompt.expect("GETRANGE")

    def test_transactions_show_in_the_prompt(self, cli: Cli) -> None:
        with cli.at_the_prompt() as prompt:
            prompt.enter("multi")
            prompt.expect(r"\(TX\)> ")
            prompt.enter("incr n")
            prompt.expect("QUEUED")
            prompt.enter("exec")
            prompt.expect(r"1\) \(integer\) 1")

    def test_messages(self, cli: Cli, client: redis.Redis) -> None:
        with cli.at_the_prompt() as prompt:
            prompt.enter("subscribe news")
            prompt.expect(r'1\) "subscribe"\s+2\) "news"\s+3\) \(integer\) 1')
            assert client.publish("news", "hello") == 1
            prompt.expect(r'1\) "message"\s+2\) "news"\s+3\) "hello"')

    def test_it_connects_again_when_it_was_ended(self, cli: Cli, client: redis.Redis) -> None:
        with cli.at_the_prompt() as prompt:
            prompt.enter("client id")
            prompt.expect(r"\(integer\) (\d+)")
            assert client.client_kill_filter(_id=prompt.match[1]) == 1
            prompt.enter("ping")
            prompt.expect("not connected> ")
            prompt.enter("ping")
            prompt.expect("PONG")


@pytest.mark.usefixtures("stored")
class TestLookingAtKeys:
    def test_scan(self, cli: Cli) -> None:
        assert len(cli("--scan").split("\n")) == 303
        assert sorted(cli("--scan", "--pattern", "user:1?").split("\n")) == [f"user:{i}" for i in range(10, 20)]
        assert sorted(cli("--scan", "--pattern", "kv:*").split("\n")) == ["kv:agent:0:0:0:0", "kv:agent:0:0:1:0"]

    def test_bigkeys(self, cli: Cli) -> None:
        received = cli("--bigkeys")
        assert "Sampled 303 keys in the keyspace!" in received
        assert "Biggest string found '\"long\"' has 500000 bytes" in received
        assert "303 strings with " in received

    def test_memkeys(self, cli: Cli) -> None:
        received = cli("--memkeys")
        assert "Sampled 303 keys in the keyspace!" in received
        found = re.search(r"""Biggest string found '"long"' has (\d+) bytes""", received)
        assert found
        assert 500_000 <= int(found[1]) < 700_000

    def test_stat(self, cli: Cli) -> None:
        with cli.in_a_terminal("--stat", "-i", "0.2") as terminal:
            terminal.expect(r"keys\s+mem\s+clients\s+blocked\s+requests\s+connections")
            for _ in range(3):
                terminal.expect(r"303\s+\d+\.\d+[KMG]\s+\d+\s+0\s+\d+ \(\+\d+\)\s+\d+")

    def test_latency(self, cli: Cli) -> None:
        low, high, average, samples = cli("--latency", "-i", "1").split()
        assert 0 <= float(low) <= float(average) <= float(high)
        assert int(samples) > 0

    def test_monitor(self, cli: Cli, client: redis.Redis) -> None:
        with cli.running("MONITOR") as process:
            assert process.stdout
            assert process.stdout.readline() == "OK\n"
            client.set("watched", "\x00\nå")
            client.execute_command("KVPAGEGET", *EXAMPLE)
            address = r"\d+\.\d{6} \[0 127\.0\.0\.1:\d+\]"
            seen = [process.stdout.readline() for _ in range(2)]
        assert re.fullmatch(address + r' "SET" "watched" "\\x00\\n\\xc3\\xa5"\n', seen[0]), seen
        assert re.fullmatch(address + r' "KVPAGEGET" "test_req_001" "5" "8" "42" "0"\n', seen[1]), seen


class TestPipe:
    def test_ten_thousand_writes(self, cli: Cli, client: redis.Redis) -> None:
        commands = b"".join(encode_command([b"SET", b"p:%d" % i, b"v%d" % i]) for i in range(10_000))
        received = cli("--pipe", stdin=commands)
        assert "errors: 0, replies: 10000" in received
        assert client.dbsize() == 10_000

    def test_pages(self, cli: Cli, client: redis.Redis) -> None:
        words = [[b"KVPAGESET", b"r", b"0", b"0", b"%d" % i, b"0", b"1", b"256", b"128", b"0"] for i in range(200)]
        commands = b"".join(encode_command([*name, bytes([i]) * 65536]) for i, name in enumerate(words))
        assert "errors: 0, replies: 200" in cli("--pipe", stdin=commands)
        for i in (0, 99, 199):
            assert client.execute_command("KVPAGEGET", "r", 0, 0, i, 0) == bytes([i]) * 65536

    def test_errors_are_counted_and_the_rest_is_run(self, cli: Cli, client: redis.Redis) -> None:
        commands = (
            encode_command([b"SET", b"a", b"1"]) + encode_command([b"NOSUCH"]) + encode_command([b"SET", b"b", b"2"])
        )
        result = subprocess.run([*cli.command, "--pipe"], input=commands, capture_output=True, timeout=100)
        assert b"errors: 1, replies: 3" in result.stdout
        assert client.mget("a", "b") == [b"1", b"2"]

    def test_lines_on_standard_input(self, cli: Cli) -> None:
        lines = b'SET a "two words"\nGET a\nNOSUCH\nKVPAGESET r 0 0 0 0 1 2 1 0 body\nKVPAGEGET r 0 0 0 0\n'
        received = cli(stdin=lines).split("\n")
        assert received[:2] == ["OK", "two words"]
        assert received[2].startswith("ERR unknown command")
        assert received[-2:] == ["OK", "body"]


class TestBenchmark:
    def run(self, server: RunningServer, *words: str) -> str:
        command = [REDIS_BENCHMARK, "-p", str(server.port), "--csv", *words]
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100)
        assert result.returncode == 0, result.stderr
        assert "error" not in (result.stdout + result.stderr).lower()
        return result.stdout

    @pytest.mark.parametrize(
        "options", [[], ["-P", "16"], ["-d", "5000"], ["-3"], ["-r", "10000"], ["--threads", "2"]], ids=" ".join
    )
    def test_runs_without_an_error(self, server: RunningServer, client: redis.Redis, options: list[str]) -> None:
        received = self.run(server, "-t", "ping,set,get,incr,mset", "-n", "2000", *options)
        rows = [line.split(",")[0].strip('"') for line in received.splitlines()[1:]]
        assert rows == ["PING_INLINE", "PING_MBULK", "SET", "GET", "INCR", "MSET (10 keys)"]
        assert client.exists("key:__rand_int__", "key:000000000000") or client.dbsize() > 500

    def test_without_keeping_connections(self, server: RunningServer) -> None:
        self.run(server, "-t", "ping", "-n", "1000", "-k", "0")

    def test_pages(self, server: RunningServer, client: redis.Redis) -> None:
        words = ["KVPAGESET", "bench__rand_int__", "0", "0", "0", "0", "1", "128", "64", "0", "x" * 16384]
        self.run(server, "-n", "4000", "-r", "100", "-P", "8", *words)
        assert 90 <= client.dbsize() <= 100


def test_the_tools_leave_no_connection_open(server: RunningServer, client: redis.Redis) -> None:
    until(lambda: len(client.client_list()) <= 5)
