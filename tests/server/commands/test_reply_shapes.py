"""Replies to clients, and COMMAND DOCS, match the command table."""

from __future__ import annotations

import random

import pytest
from random_commands import Commands
from servers import RunningServer
from wire import Wire, items, parse

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.specs import TABLE, Spec, arity, find, schema, subcommands

ROWS = [spec for spec in TABLE.values() if not subcommands(spec.name) or spec.arity == -1]
BEGINS = {  # RESP3's replies by their first bytes
    "OK": (b"+OK",),
    "simple": (b"+",),
    "bulk": (b"$",),
    "text": (b"=", b"$"),
    "integer": (b":",),
    "null": (b"_",),
    "map": (b"%",),
    "array": (b"*",),
    "set": (b"~",),
    "push": (b">",),
}
# Commands that end the connection or the server, send no reply, change the protocol, or make every client wait.
NOT_TRIED = {"shutdown", "client|kill", "client|reply", "client|pause", "hello"}
TRIES = 40


def fits(frame: bytes, shape: str) -> bool:
    return any(_fits(frame, one) for one in shape.split(" | "))


def _fits(frame: bytes, shape: str) -> bool:
    whole, _, of = shape.partition(" of ")
    if not frame.startswith(BEGINS[whole]):
        return False
    return not of or all(fits(item, of.replace(" or ", " | ")) for item in items(frame))


def a_reply(server: RunningServer, spec: Spec, rng: random.Random) -> bytes:
    """Return a reply of a command that is no error; or b"" if many calls are errors."""
    commands = Commands(rng, [TABLE["get"]])
    for _ in range(TRIES):
        with Wire(server.port) as wire:
            wire.ask(b"HELLO", b"3")
            wire.ask(b"SET", b"a", b"1")
            if spec.name in ("exec", "discard"):
                wire.ask(b"MULTI")
            words = commands.of(spec)
            if not (reply := wire.ask(*words)).startswith((b"-", b"!")) and find(words) is spec:
                return reply
    return b""


def test_every_row_has_its_complexity_and_reply() -> None:
    assert [spec.name for spec in ROWS if not (spec.complexity and spec.reply and schema(spec.reply))] == []


def test_replies_have_the_shape_in_the_table(server: RunningServer) -> None:
    rng = random.Random(1)
    answers = {spec: a_reply(server, spec, rng) for spec in ROWS if spec.name not in NOT_TRIED}
    wrong = {spec.name: reply[:100] for spec, reply in answers.items() if reply and not fits(reply, spec.reply)}
    assert wrong == {}
    never = {spec.name for spec, reply in answers.items() if not reply}
    assert len(never) < len(ROWS) // 5, never  # of a page's words few are right by chance


@pytest.mark.parametrize("name", ["get", "kvpageget", "acl"])
def test_command_docs_has_both(server: RunningServer, name: str) -> None:
    with Wire(server.port) as wire:
        received = parse(wire.ask(b"COMMAND", b"DOCS", name.encode()))[1]
    docs = dict(zip(received[::2], received[1::2], strict=True))
    assert docs[b"complexity"].decode() == TABLE[name].complexity
    assert (b"reply_schema" in docs) == bool(TABLE[name].reply)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("quit", 1),
        ("get key", 2),
        ("del key [key ...]", -2),
        ("set key value [NX | XX] [EX seconds]", -3),
        ("client|setinfo <LIB-NAME libname | LIB-VER libver>", 4),
        ("client|caching <YES | NO>", 3),
        ("client|tracking <ON | OFF> [REDIRECT client-id]", -3),
        ("kill <address | ID id>", -2),
        ("memory|usage key [SAMPLES count]", -3),
        ("hello [protover [AUTH username password]]", -1),
        ("multi N req page [req page ...]", -4),
    ],
)
def test_arity_follows_from_the_usage(call: str, words: int) -> None:
    name, _, usage = call.partition(" ")
    assert arity(name, usage) == words
