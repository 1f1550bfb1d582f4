"""Invariants of the parser for any input: checked by `make fuzz`, and by hypothesis in test_parser.py.

An input's first bytes say how the rest is cut into pieces. The pieces give the same commands as the whole; only a
ProtocolError is raised; every command matches its frames; nothing leaks.
"""

from __future__ import annotations

import contextlib

from kvpage_server.core import Arena, Limits, Parser, ProtocolError
from kvpage_server.core.protocol import split_words
from kvpage_server.page import HEADER_SIZE, PageError, PageKey, decode_page

Commands = tuple[list[list[bytes]], str]
LIMITS = Limits(max_bulk=300_000, max_arguments=2000, max_command=400_000)  # or a few bytes would ask for gigabytes

SEEDS = [
    b"\x01\x07*1\r\n$4\r\nPING\r\n",
    b"\x03\x05\x09\x20*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$5\r\nvalue\r\n*2\r\n$3\r\nGET\r\n$3\r\nkey\r\n",
    b"\x02\x30\x50*11\r\n$9\r\nKVPAGESET\r\n$1\r\nr\r\n" + b"$1\r\n1\r\n" * 8 + b"$5000\r\n" + bytes(5000) + b"\r\n",
    b"\x02\x30\x50*6\r\n$9\r\nKVPAGEGET\r\n$1\r\nr\r\n" + b"$1\r\n0\r\n" * 4,
    b"\x01\x40*2\r\n$3\r\nSET\r\n$2000\r\n" + b"*1\r\n" * 500 + b"\r\n",
    b"\x00PING\r\nECHO \"a\\x41\\n\" 'b\\'c'\r\n\r\n*0\r\n*-1\r\n",
    b"\x03\x20\xff\xf1*1001\r\n$4\r\nMSET\r\n"
    + (b"$70\r\n" + b"k" * 70 + b"\r\n$4096\r\n" + bytes(4096) + b"\r\n") * 9,
    b"\x00*1\r\n$-1\r\n",
    b"\x00*9223372036854775808\r\n",
]
WORDS = ["*", "$", "\r\n", "$0\r\n\r\n", "*-1\r\n", "$1024\r\n", "$4096\r\n", "$8192\r\n", "$65536\r\n", "KVPG\x02"]


def parse(pieces: list[bytes], arena: Arena) -> Commands:
    """The commands of an input, and the error that it ended in."""
    parser, commands = Parser(arena, limits=LIMITS), []
    try:
        for piece in pieces:
            parser.feed(piece)
            while (command := parser.next()) is not None:
                commands.append([bytes(word if isinstance(word, bytes) else word.body) for word in command])
    except ProtocolError as error:
        return commands, str(error)
    return commands, ""


def check(data: bytes) -> None:
    """Raises AssertionError, or whatever it is that must not be raised."""
    count = data[0] % 8 if data else 0
    steps, stream = data[1 : 1 + count], data[1 + count :]
    pieces, start = [], 0
    while start < len(stream):
        step = (steps[len(pieces) % count] * 37 if count else 0) + 1
        pieces.append(stream[start : start + step])
        start += step
    arena = Arena()
    whole, cut = parse([stream], arena), parse(pieces, arena)
    assert whole[0] == cut[0]
    assert whole[1] == cut[1]
    assert arena.used == 0
    frames = b"".join(
        b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in command)
        for command in whole[0]
    )
    assert parse([frames], arena) == (whole[0], "")
    _check_what_reads_client_bytes(stream)


def _check_what_reads_client_bytes(data: bytes) -> None:
    words = split_words(data)
    assert words is None or all(isinstance(word, bytes) for word in words)
    with contextlib.suppress(PageError):
        assert bytes(PageKey.parse(data)) == data
    try:
        header, body = decode_page(data)
    except PageError:
        return
    assert bytes(header) == data[:HEADER_SIZE]
    assert bytes(body) == data[HEADER_SIZE:]
