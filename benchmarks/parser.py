"""The parser alone: the same bytes, in pieces as a socket gives them, through ours and through hiredis's reader.

hiredis is C and hands out plain bytes; ours also puts long bodies where they will stay.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import hiredis

from benchmarks.findings import Finding, show, write
from benchmarks.servers import pin_client
from kvpage_server.core import Arena
from kvpage_server.resp.parser import Parser

INTRO = "ours / hiredis, commands a second; ratios are medians of the ratios of each round"
KIB = 1024
PIECE = 64 * KIB

_arena = Arena()  # warm, as a server's is


def spell(*words: bytes) -> bytes:
    """A command as clients send it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)


def _page(number: int, body: bytes) -> list[bytes]:
    return [b"agent-0007", b"5", b"3", b"%d" % number, b"0", b"1", b"128", b"64", b"3600", body]


def _streams() -> dict[str, tuple[bytes, int]]:
    """What is parsed, and how many commands it holds."""
    body = bytes(16 * KIB)
    pages = [word for number in range(256) for word in _page(number, body)]
    names = [word for number in range(256) for word in _page(number, b"")[:5]]
    return {
        "PING": (spell(b"PING") * 1000, 1000),
        "GET": (spell(b"GET", b"key:000000001234") * 1000, 1000),
        "SET, 3 bytes": (spell(b"SET", b"key:000000001234", b"xxx") * 1000, 1000),
        "KVPAGESET, 16 KiB": (spell(b"KVPAGESET", *_page(42, body)) * 100, 100),
        "KVPAGEMSET, 256 x 16 KiB": (spell(b"KVPAGEMSET", b"256", *pages), 1),
        "KVPAGEMGET, 256 names": (spell(b"KVPAGEMGET", b"256", *names) * 10, 10),
        "SET, 1 MiB": (spell(b"SET", b"key", bytes(KIB * KIB)) * 4, 4),
    }


def _ours(pieces: list[bytes]) -> int:
    """As a session does it: commands are taken whenever what the parser asked for has arrived."""
    parser, count = Parser(_arena.allocate), 0
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            received = 0
            for buffer in parser.buffers():
                part = rest[: len(buffer)]
                buffer[: len(part)] = part
                rest = rest[len(part) :]
                received += len(part)
            parser.received(received)
            while parser.next() is not None:
                count += 1
    return count


def _hiredis(pieces: list[bytes]) -> int:
    reader, count = hiredis.Reader(), 0
    for piece in pieces:
        reader.feed(piece)
        while reader.gets() is not False:
            count += 1
    return count


def _rate(parse: Callable[[list[bytes]], int], pieces: list[bytes], commands: int, seconds: float) -> float:
    """Commands a second."""
    runs, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        if parse(pieces) != commands:
            raise AssertionError(f"{parse.__name__} found another number of commands than {commands}")
        runs += 1
    return runs * commands / spent


def main(arguments: list[str] | None = None) -> None:
    """Print the table; write results/parser.json and .md, unless --quick is given."""
    options = argparse.ArgumentParser(prog="python -m benchmarks parser")
    options.add_argument("--quick", action="store_true")
    quick = options.parse_args(arguments).quick
    rounds, seconds = (3, 0.05) if quick else (9, 0.2)
    pin_client()
    found = []
    for name, (stream, commands) in _streams().items():
        pieces = [stream[start : start + PIECE] for start in range(0, len(stream), PIECE)]
        pairs = [[_rate(parse, pieces, commands, seconds) for parse in (_ours, _hiredis)] for _ in range(rounds + 1)]
        ours, theirs = (median(rates) for rates in zip(*pairs[1:], strict=True))
        gigabytes = len(stream) / commands * ours / 1e9
        found.append(
            Finding(
                name,
                "hiredis",
                "1000/s",
                f"{ours / 1000:.3g} / {theirs / 1000:.3g} ({gigabytes:.2f} GB/s)",
                median(one / other for one, other in pairs[1:]),
            )
        )
    show(found, INTRO)
    if not quick:
        write(found, "parser", {"rounds": rounds}, intro=INTRO)


if __name__ == "__main__":
    main()
