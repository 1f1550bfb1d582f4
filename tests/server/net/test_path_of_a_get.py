"""Number of Python functions that a command calls between `recv` and `send`; docs/architecture.md lists a GET's."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from turns import Turns, measured
from wire import Wire, encode_command

from kvpage_server import core

ROOT = next(parent for parent in Path(__file__).parents if (parent / "pyproject.toml").exists())
OURS = str(ROOT / "kvpage_server")
PAGE = [b"req", b"0", b"0", b"7", b"0"]
SHAPE = [b"8", b"1", b"4096", b"0", bytes(4096)]
GIB = 1 << 30


@contextmanager
def server_with(store: str, directory: Path) -> Iterator[Turns]:
    """A server with a store in memory, or with a disk tier and `maxdisk`, as by default."""
    with measured("--store", store, directory=directory if store == "tiered" else None) as turns:
        if turns.server.tiered is not None:
            turns.on_loop(lambda: setattr(turns.server.tiered.stored, "maxdisk", GIB))
        yield turns


def batch(command: bytes, each: Sequence[bytes], block: int = 7) -> list[bytes]:
    """A batch of 8 pages of one block; `each` follows the name of every page."""
    pages = (word for head in range(8) for word in (b"req", b"0", b"%d" % head, b"%d" % block, b"0", *each))
    return [command, b"8", *pages]


def path_of(turns: Turns, *words: bytes, together: int = 1) -> list[str]:
    """The functions that one of some equal commands called, in order; or so many of them `together`."""
    return shortest_path(turns, [words] * 5, together)


def shortest_path(turns: Turns, commands: Sequence[Sequence[bytes]], together: int = 1) -> list[str]:
    """The functions that one of these commands called, in order; or so many of it `together`.

    The shortest list is returned, because others contain calls of timers.
    """
    calls: list[str] = []
    paths: list[list[str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls.append(frame.f_code.co_qualname)

    with Wire(turns.server.port) as wire:
        for words in commands:
            calls.clear()
            turns.on_loop(lambda: sys.setprofile(note))
            wire.send(together * encode_command(words))
            for _ in range(together):
                assert wire.reply()[:1] in b"$+*"
            turns.on_loop(lambda: sys.setprofile(None))
            paths.append(calls[calls.index("Session.readable") :])
    return min(paths, key=len)


@pytest.mark.skipif(core.NAME != "native", reason="what the compiled core does is functions of the core in Python")
def test_a_page_passes_few_functions_between_recv_and_send() -> None:
    with measured("--store", "memory") as turns:
        path_of(turns, b"KVPAGESET", *PAGE, b"8", b"1", b"4096", b"0", bytes(4096))
        path = path_of(turns, b"KVPAGEGET", *PAGE)
        path_of(turns, b"SET", b"short", b"string")
        others = [len(path_of(turns, b"GET", key)) for key in (b"kv:" + b":".join(PAGE), b"short")]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^\d+\. `([\w.]+)`", page.partition("## What a page read passes")[2].partition("\n## ")[0], re.M
    )
    assert path == listed
    assert [len(path), *others] == [8, 9, 8]


@pytest.mark.skipif(core.NAME != "native", reason="what the compiled core does is functions of the core in Python")
@pytest.mark.parametrize(
    ("store", "most"),
    [
        ("memory", {"GET": 8, "SET": 16, "MSET": 19, "MGET": 24, "new": 28, "extends": 40}),
        ("tiered", {"GET": 9, "SET": 24, "MSET": 27, "MGET": 25, "new": 37, "extends": 49}),
    ],
    ids=["memory", "tiered"],
)
def test_small_batches_of_pages_call_few_functions(store: str, most: dict[str, int], tmp_path: Path) -> None:
    with server_with(store, tmp_path) as turns:
        calls = {
            "SET": len(path_of(turns, b"KVPAGESET", *PAGE, *SHAPE)),
            "GET": len(path_of(turns, b"KVPAGEGET", *PAGE)),
            "MSET": len(path_of(turns, *batch(b"KVPAGEMSET", SHAPE))),
            "MGET": len(path_of(turns, *batch(b"KVPAGEMGET", []))),
            "new": len(shortest_path(turns, [batch(b"KVPAGEMSET", SHAPE, 10 * i) for i in range(10, 20)])),
            "extends": len(shortest_path(turns, [batch(b"KVPAGEMSET", SHAPE, i) for i in range(300, 310)])),
        }
    assert {name: count for name, count in calls.items() if count > most[name]} == {}


@pytest.mark.skipif(core.NAME != "native", reason="what the compiled core does is functions of the core in Python")
@pytest.mark.parametrize(
    ("words", "most"), [([b"PING"], 1), ([b"GET", b"k"], 3), ([b"SET", b"k", b"v"], 9)], ids=["PING", "GET", "SET"]
)
def test_pipelined_commands_call_little_but_their_own_functions(words: list[bytes], most: int) -> None:
    with measured("--store", "memory") as turns:
        path_of(turns, b"SET", b"k", b"v")
        one, some = path_of(turns, *words), path_of(turns, *words, together=11)
    assert len(some) - len(one) <= 10 * most
