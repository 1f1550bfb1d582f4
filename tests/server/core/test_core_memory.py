"""Neither core leaks after whole, damaged or truncated input: no slot, no object, no memory."""

from __future__ import annotations

import ctypes
import gc
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from cores import on_each_core
from fuzz.both import AT_ONCE, HASHED, LIMITS, MOST, NOW, Plan
from fuzz.streams import Inputs
from wire import encode_command

from kvpage_server.core import ProtocolError
from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage

MORE = 200_000  # bytes that an allocator may hold on to


class Churn:
    """A core that is used again and again."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.arena = core.Arena()
        self.scratch = core.Scratch()
        self.entries: dict[bytes, Any] = {}
        self.requests: dict[bytes, dict[int, Any]] = {}
        self.commands = 0

    def take(self, data: bytes) -> None:
        plan = Plan.of(data)
        for pieces in plan.streams:
            parser, outbox = self.core.Parser(self.arena, self.scratch, LIMITS, HASHED), self.core.Outbox()
            parser.trust(plan.trusted)
            here, there = socket.socketpair()
            with here, there, suppress(ProtocolError):
                here.setblocking(False)
                for piece in pieces:
                    there.sendall(piece[:50_000])
                    parser.receive(here.fileno())
                    parser.feed(piece[50_000:])
                    while (command := parser.next()) is not None:
                        self.commands += 1
                        self._use(command)
                        outbox.add([*command])
            outbox.next()
        self.entries.clear()
        self.requests.clear()

    def _use(self, command: Sequence[Any]) -> None:
        core, count = self.core, len(command) - 2
        with suppress(BadPage):
            pages = core.NewPages(command, 2, min(count // PAGE_WORDS, AT_ONCE), self.arena, NOW, False, True)
            for at in range(len(pages)):
                pages.put(self.entries, self.requests, at, core.PageSet, [], one_block=True)
        with suppress(BadPage):
            names = core.PageNames(command, 2, min(count // NAME_WORDS, AT_ONCE))
            core.look_up(self.entries, names.keys, 0, len(names), MOST, NOW)


_MAPPED, _LENT = 4, 7  # hblkhd and uordblks of glibc's struct mallinfo2


class _Info(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_size_t * 10)]


def in_use() -> int:
    """Bytes that the system's allocator has lent, where it can be asked."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo.restype = _Info
    info = mallinfo().sizes
    return int(info[_MAPPED] + info[_LENT])


@on_each_core
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("commands", [5000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_nothing_is_kept(core: Any, commands: int) -> None:
    made, churn = Inputs(5), Churn(core)
    inputs = [made.next() for _ in range(50)]
    inputs += [b"\0\1\376" + b"".join(encode_command([b"SET", b"key-%d" % i, b"v" * (i % 700)]) for i in range(300))]
    seen = []
    for target in (commands // 5, commands):
        while churn.commands < target:
            for data in inputs:
                churn.take(data)
        assert churn.arena.used == 0
        churn.arena.trim()
        gc.collect()
        seen.append((sys.getallocatedblocks(), sys.getrefcount(None), in_use()))
    (blocks, nones, memory), (blocks_after, nones_after, memory_after) = seen
    assert blocks_after - blocks < 100
    assert nones_after - nones < 100  # a leak that no allocation shows: a lost reference to an immortal object
    assert memory_after - memory < MORE
