"""Commands that need no decision are called one after another, and whatever is unusual is handed back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from cores import on_each_core
from wire import encode_command

from kvpage_server.core import CallAgain

LATER = 1 << 62


class AsItIs(bytes):
    """A reply that is spelt already."""


@dataclass
class Client:
    fast_path_ok: bool = True
    protocol: int = 2
    last_command: str = ""
    finished: int = 0


@dataclass
class Counts:
    nanoseconds: int = 0
    histogram: list[int] = field(default_factory=lambda: [0] * 64)


class Table:
    """Commands, and who calls them."""

    def __init__(self, core: Any, **client: Any) -> None:
        self.client = Client(**client)
        self.parser = core.Parser(core.Arena())
        self.counts = {name: Counts() for name in ("say", "free", "push", "fail", "wait", "set")}
        self.slow: list[tuple[Any, ...]] = []
        self.pieces: list[bytes] = []
        self.pushed: list[object] = []
        self.replies: dict[bytes, Any] = {
            b"raw": AsItIs(b"+OK\r\n"),
            b"none": None,
            b"int": -7,
            b"list": [1],
            b"yes": True,
        }
        rows = {
            b"SAY": core.Callee("SAY", "say", self.say, 2, 3, False),
            b"FREE": core.Callee("FREE", "free", self.give_up, 1, 1, False),
            b"PUSH": core.Callee("PUSH", "push", self.push, 1, 1, False),
            b"FAIL": core.Callee("FAIL", "fail", self.fail, 1, 1, False),
            b"WAIT": core.Callee("WAIT", "wait", self.wait, 1, 1, False),
            b"SET": core.Callee("SET", "set", lambda client, args: AsItIs(b"+SET\r\n"), 3, 3, True, 1, b":index"),
        }
        self.calls = core.Caller(self.client, self.parser, rows, self.may_run, lambda *call: self.slow.append(call))

    def say(self, client: Client, args: list[bytes]) -> Any:
        return self.replies.get(args[0], args[0])

    def give_up(self, client: Client, args: list[bytes]) -> bytes:
        client.fast_path_ok = False
        return b"free"

    def push(self, client: Client, args: list[bytes]) -> bytes:
        self.pushed.append("message")
        return b"pushed"

    def fail(self, client: Client, args: list[bytes]) -> None:
        raise KeyError("no")

    def wait(self, client: Client, args: list[bytes]) -> None:
        raise CallAgain("later")

    def may_run(self, client: Client, what: str, words: list[bytes]) -> bool:
        return words[-1] != b"full"

    def make(
        self, *commands: str, left: int = 100, deadline: int = LATER, ask: bool = False, slow_from: int = LATER
    ) -> Any:
        self.feed(*commands)
        return self.go_on(left=left, deadline=deadline, ask=ask, slow_from=slow_from)

    def feed(self, *commands: str) -> None:
        self.parser.feed(b"".join(encode_command(command.encode().split(b" ")) for command in commands))

    def go_on(self, *, first: Any = None, ask: bool = False, slow_from: int = LATER, **until: int) -> Any:
        until = {"left": 100, "deadline": LATER} | until
        made = self.calls.make(
            self.pieces, self.pushed, self.counts, first=first, ask=ask, slow_from=slow_from, **until
        )
        return None if made is None else tuple(made)


@on_each_core
def test_plain_replies_are_spelt_and_counted(core: Any) -> None:
    table = Table(core)
    assert table.make("SAY raw", "SAY none", "SAY int", "SAY text more", "SET a b") is None
    assert table.pieces == [b"+OK\r\n", b"$-1\r\n", b":-7\r\n", b"$4\r\ntext\r\n", b"+SET\r\n"]
    assert (sum(table.counts["say"].histogram), sum(table.counts["set"].histogram)) == (4, 1)
    assert table.counts["say"].nanoseconds > 0
    assert table.client.last_command == "set"
    assert 0 < table.client.finished <= time.monotonic_ns()


@on_each_core
def test_a_null_is_that_of_the_clients_protocol(core: Any) -> None:
    table = Table(core, protocol=3)
    table.make("SAY none")
    assert table.pieces == [b"_\r\n"]


@on_each_core
@pytest.mark.parametrize(
    "command", ["WHAT now", "SAY", "SAY 1 2 3", "SET kv:r:index v", "SET a full", "say x", "SAY " + "x " * 80]
)
def test_a_command_off_the_fast_path_is_handed_back(core: Any, command: str) -> None:
    table = Table(core)
    left, words, row, reply, error = table.make("SAY first", command, "SAY later")
    assert (left, [*words], row, reply, error) == (99, command.encode().split(b" "), None, None, None)
    assert table.pieces == [b"$5\r\nfirst\r\n"]
    assert table.go_on() is None
    assert table.pieces[1:] == [b"$5\r\nlater\r\n"]


@on_each_core
@pytest.mark.parametrize(
    ("command", "reply"), [("SAY list", [1]), ("SAY yes", True), ("FREE", b"free"), ("PUSH", b"pushed")]
)
def test_a_complex_reply_is_handed_back(core: Any, command: str, reply: object) -> None:
    table = Table(core)
    left, words, row, got, error = table.make("SAY first", command, "SAY later")
    assert (left, words, row.spec, got, error) == (98, command.encode().split(), command.split()[0], reply, None)
    assert table.pieces == [b"$5\r\nfirst\r\n"]


@on_each_core
def test_an_exception_is_handed_back_and_the_call_counts(core: Any) -> None:
    table = Table(core)
    left, words, row, reply, error = table.make("FAIL", "SAY later")
    assert (left, words, row.name, reply, repr(error)) == (99, [b"FAIL"], "fail", None, "KeyError('no')")
    assert sum(table.counts["fail"].histogram) == 1


@on_each_core
def test_a_call_that_is_made_again_is_not_counted(core: Any) -> None:
    table = Table(core)
    _, words, row, _, error = table.make("WAIT")
    assert (words, row.name, repr(error)) == ([b"WAIT"], "wait", "CallAgain('later')")
    assert sum(table.counts["wait"].histogram) == 0


@on_each_core
def test_a_turn_ends_after_so_many_calls_or_at_its_moment(core: Any) -> None:
    table = Table(core)
    assert table.make("SAY 1", "SAY 2", "SAY 3", left=2)[:2] == (0, None)
    assert table.pieces == [b"$1\r\n1\r\n", b"$1\r\n2\r\n"]
    assert table.go_on(deadline=0) is None
    assert len(table.pieces) == 3
    assert table.make("SAY 4", "SAY 5", deadline=0)[:2] == (0, None)
    assert len(table.pieces) == 4


@on_each_core
def test_a_command_taken_before_runs_first(core: Any) -> None:
    table = Table(core)
    table.feed("SAY 1", "SAY 2")
    assert table.go_on(first=table.parser.next()) is None
    assert table.pieces == [b"$1\r\n1\r\n", b"$1\r\n2\r\n"]


@on_each_core
def test_pieces_are_added_as_they_are_until_they_borrow_much(core: Any) -> None:
    table = Table(core)
    arena = core.Arena()
    small, large = arena.allocate(5000), arena.allocate(1 << 20)
    table.replies |= {
        b"small": (small,),
        b"parts": (b"$7\r\n", small.part(0, 7), b"\r\n"),
        b"large": (large,),
        b"many": (b"",) * 5,
    }
    assert table.make("SAY small", "SAY parts", "SAY large", "SAY later") == (97, None, None, None, None)
    assert table.pieces[0] is small
    assert [bytes(piece) for piece in (table.pieces[1], table.pieces[3])] == [b"$7\r\n", b"\r\n"]
    assert (table.pieces[2].size, table.pieces[4]) == (7, large)
    table.pieces.clear()
    assert table.go_on() is None
    assert table.pieces == [b"$5\r\nlater\r\n"]
    assert table.make("SAY many")[3] == (b"",) * 5
    assert table.make("SAY large") is None


@on_each_core
def test_calls_are_checked_on_request_and_slow_ones_are_noted(core: Any) -> None:
    table = Table(core)
    assert table.make("SAY 1", "SAY full", ask=True, slow_from=0)[:2] == (99, [b"SAY", b"full"])
    ((client, what, words, took),) = table.slow
    assert (client, what, words) == (table.client, "SAY", [b"SAY", b"1"])
    assert took >= 0


@on_each_core
def test_long_words_are_passed_as_slots(core: Any) -> None:
    table = Table(core)
    table.make("SAY " + "x" * 600)
    left, words, row, reply, _ = table.make("SAY " + "y" * 600)
    assert (left, row.name, bytes(reply.body)) == (99, "say", b"y" * 600)
    assert words[1] is reply
