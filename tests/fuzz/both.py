"""The same input for both cores: the commands, errors, pages and replies must be equal.

An input's first byte says how the cores are used, some more where the rest is cut. The rest is the input of one
connection, or of several in turns. The words of every command are parsed as names of pages and as pages.
"""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from cores import CORES

from kvpage_server.core import Limits, ProtocolError
from kvpage_server.core.arguments import NAME_WORDS, PAGE_WORDS, BadPage

LIMITS = Limits(max_bulk=300_000, max_arguments=2000, max_command=400_000)  # or a few bytes would ask for gigabytes
HASHED = frozenset((b"KVPAGESET", b"KVPAGEMSET", b"BATCH"))
NOW = 1_700_000_000_000
AT_ONCE = 50  # pages that are read of a command at a time
LEFT = 777  # bytes that remain of those offered to a socket
MOST = 20_000  # bytes that are looked up at a time


@dataclass
class Plan:
    """The use of the cores, decoded from an input's first bytes, and the input of each connection."""

    received: bool  # by the core, from a socket
    trusted: bool
    strict: bool
    hashes: bool
    streams: list[list[bytes]]

    @classmethod
    def of(cls, data: bytes) -> Plan:
        flags, count = (*data[:1], 0)[0], (*data[1:2], 0)[0] % 8
        steps, sent = data[2 : 2 + count], data[2 + count :]
        parts = 1 + (flags >> 4) % 3
        length = -(-len(sent) // parts)
        streams = [[*_cut(sent[i * length : (i + 1) * length], steps)] for i in range(parts)]
        return cls(bool(flags & 1), not flags & 2, bool(flags & 4), not flags & 8, streams)


def _cut(data: bytes, steps: bytes) -> Iterator[bytes]:
    start = number = 0
    while start < len(data):
        step = steps[number % len(steps)] ** 2 + 1 if steps else len(data)
        yield data[start : start + step]
        start, number = start + step, number + 1


@dataclass
class Run:
    """A core with a plan. `seen` is its behaviour, in words that can be compared."""

    core: ModuleType
    plan: Plan
    seen: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.arena = self.core.Arena()
        self.outbox = self.core.Outbox()
        self.entries: dict[bytes, Any] = {}
        self.blocks: dict[Any, Any] = {}

    def go(self) -> list[Any]:
        """Do it all. Nothing is held afterwards, or something was lost."""
        scratch = self.core.Scratch()
        with ExitStack() as sockets:
            connections = [Connection(self, scratch, pieces, sockets) for pieces in self.plan.streams]
            out, peer = (sockets.enter_context(end) for end in socket.socketpair())
            out.setblocking(False)
            while connections:
                connections = [one for one in connections if one.step()]
                self._send(out, peer)
        self.entries.clear()
        self.blocks.clear()
        if self.arena.used:
            gc.collect()
        assert self.arena.used == 0, f"{self.arena.used} bytes of slots are lost"
        return self.seen

    def _send(self, out: socket.socket, peer: socket.socket) -> None:
        """Send queued output: by the core, or as TLS does."""
        waiting, sent = self.outbox.nbytes, b""
        while self.outbox.nbytes:
            if self.plan.received:
                count = self.outbox.send(out.fileno())
                received = b""
                while len(received) < count:
                    received += peer.recv(1 << 20)
                sent += received
            else:
                offered = b"".join(self.outbox.next())
                taken = offered[:-LEFT] or offered
                self.outbox.sent(len(taken))
                sent += taken
            self.outbox.renew()
        assert len(sent) == waiting
        self.seen.append(("sent", sent))

    def try_(self, what: str, do: Callable[[], Any]) -> Any:
        """Note a function's result, or its error."""
        try:
            done = do()
        except BadPage as error:
            self.seen.append((what, str(error), error.place))
            return None
        except IndexError:
            return IndexError
        return done

    def take(self, command: Sequence[Any]) -> None:
        self.seen.append((type(command).__name__, [self.shown(word) for word in command]))
        self.outbox.add([*command, *(word.part(1, word.size - 1) for word in command if type(word) is self.core.Slot)])
        if type(command) is self.core.Words:
            self._look_at(command)
        for first in (1, 2):
            for start in range(first, len(command), AT_ONCE * 10):
                self._find(command, start)
                self._store(command, start)
                self._find(command, start)

    def shown(self, word: Any) -> Any:
        if isinstance(word, self.core.Slot):
            return bytes(word.body), word.digest, bytes(word.view), word.size, word.footprint, word.expires
        return word

    def _look_at(self, words: Any) -> None:
        for part in (words[3:], words[-5:5], words[::7], words[::-1], words[5:2], words[1:][2:-1]):
            self.seen.append((type(part).__name__, [self.shown(word) for word in part]))
        self.seen.append([self.shown(word) for word in words + [b"x"]])  # noqa: RUF005
        self.seen.append((words[2:] == words[2:], words == [*words], words == words[1:], len(words)))
        for place in (0, -1, len(words), -len(words) - 1):
            self.seen.append(self.shown(self.try_("index", lambda place=place: words[place])))

    def _find(self, command: Sequence[Any], start: int) -> None:
        most = min((len(command) - start) // NAME_WORDS, AT_ONCE)  # whole ones: commands have counted their words
        names = self.try_("names", lambda: self.core.PageNames(command, start, most))
        if names is None:
            return
        self.seen.append((names.keys, [tuple(names.name(i)) for i in range(len(names))]))
        self.seen.append(names.runs(range(len(names))))
        found, blocks, absent, others = self.core.look_up(self.entries, names.keys, 0, AT_ONCE, MOST, NOW + 5000)
        self.seen.append(([slot and self.shown(slot) for slot in found], absent, others))
        self.seen.append([(block.req_id, block.page) for block in blocks])

    def _store(self, command: Sequence[Any], start: int) -> None:
        plan, most = self.plan, min((len(command) - start) // PAGE_WORDS, AT_ONCE)
        pages = self.try_(
            "pages",
            lambda: self.core.NewPages(command, start, most, self.arena, NOW, plan.strict, plan.hashes),
        )
        at = 0
        while pages is not None and at < len(pages):
            fresh: list[bytes] = []
            stop, blocks, made, beside, *sums = pages.put(
                self.entries, self.blocks, at, self.core.PageSet, fresh, one_block=plan.strict
            )
            shown = [(block.bits, block.pages, block.footprint, block.soonest) for block in blocks]
            self.seen.append((stop, shown, made, [(block.req_id, block.page) for block in beside], sums, fresh))
            if stop == at:
                del self.entries[pages.keys[at]]
            at = stop
        if pages is not None:
            headers = [bytes(slot.header) for slot in pages.slots]
            self.seen.append((headers, [pages.expires(i) for i in range(len(pages))]))


class Connection:
    """A parser and its input."""

    def __init__(self, run: Run, scratch: Any, pieces: list[bytes], sockets: ExitStack) -> None:
        self.run = run
        self.pieces = iter(pieces)
        self.parser = run.core.Parser(run.arena, scratch, LIMITS, HASHED)
        self.parser.trust(run.plan.trusted)
        if run.plan.received:
            self.here, self.there = (sockets.enter_context(end) for end in socket.socketpair())
            self.here.setblocking(False)

    def step(self) -> bool:
        """Send a piece and take the commands that it completes; false when that was all."""
        run, parser = self.run, self.parser
        piece = next(self.pieces, None)
        if piece is None:
            run.seen.append(("end", [run.shown(word) for word in parser.give_up()]))
            return False
        try:
            if run.plan.received:
                self._receive(piece)
            else:
                parser.feed(piece)
                self._take()
        except ProtocolError as error:
            run.seen.append(("refused", str(error)))
            return False
        run.seen.append((parser.held, parser.is_idle, parser.receiving))
        return True

    def _receive(self, piece: bytes) -> None:
        for start in range(0, len(piece), 50_000):
            self.there.sendall(piece[start : start + 50_000])
            while self.parser.receive(self.here.fileno()) > 0:
                self._take()

    def _take(self) -> None:
        while (command := self.parser.next()) is not None:
            self.run.take(command)


def differ(data: bytes) -> None:
    """Raises AssertionError where the cores differ."""
    plan = Plan.of(data)
    expected, *others = (Run(core, plan).go() for core in CORES)
    for done in others:
        for place, (one, another) in enumerate(zip(expected, done, strict=False)):
            assert one == another, f"step {place}: python {one!r:.2000}, native {another!r:.2000}"
        assert len(expected) == len(done)
