"""Output is sent in order, byte for byte, for any capacity of the kernel, and is kept until then."""

from __future__ import annotations

import gc
import resource
import select
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
from cores import on_each_core
from hypothesis import given, settings
from hypothesis import strategies as st

AT_ONCE = 768 * 1024
MIB = 1024 * 1024


class BorrowedPiece:
    """A piece of borrowed memory, which may move."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)

    @property
    def view(self) -> memoryview:
        return memoryview(self.data)

    def move(self) -> None:
        """To another place; where it was is used for something else."""
        old, self.data = self.data, bytearray(self.data)
        old[:] = bytes(len(old))


class Kinds:
    """The kinds of pieces that there are."""

    def __init__(self, core: Any) -> None:
        self.arena = core.Arena()

    def slot(self, data: bytes) -> Any:
        slot = self.arena.allocate(len(data))
        slot.body[:] = data
        return slot

    def piece(self, kind: str, data: bytes) -> tuple[Any, bytes]:
        """A piece, and the bytes that are sent of it."""
        if kind == "bytes":
            return data, data
        if kind == "lent":
            return BorrowedPiece(data), data
        slot = self.slot(data)
        if kind == "slot":
            return slot, b"$%d\r\n%b\r\n" % (len(data), data)
        return slot.part(len(data) // 3, len(data)), data[len(data) // 3 :]


Round = tuple[list[tuple[str, bytes]], list[int], bool]  # pieces; capacities; whether memory moves
kinds = st.sampled_from(["bytes", "bytes", "lent", "slot", "part"])
texts = st.binary(max_size=20) | st.sampled_from([bytes(511), b"x" * 512, b"y" * 2000])
rounds = st.lists(
    st.tuples(
        st.lists(st.tuples(kinds, texts), max_size=8),
        st.lists(st.integers(1, 40) | st.just(3000), max_size=4),
        st.booleans(),
    )
)


@on_each_core
@given(rounds)
def test_bytes_are_sent_in_order_in_any_pieces(core: Any, rounds: list[Round]) -> None:
    outbox, of, taken, expected = core.Outbox(), Kinds(core), bytearray(), bytearray()
    everything: list[Any] = []
    for some, counts, moves in rounds:
        added = [of.piece(kind, data) for kind, data in some]
        everything += [piece for piece, _ in added]
        outbox.add([piece for piece, _ in added])
        expected += b"".join(data for _, data in added)
        for count in counts:
            taken += (data := _next(outbox)[:count])
            outbox.sent(len(data))
        if moves:
            for piece in everything:
                if isinstance(piece, BorrowedPiece):
                    piece.move()
            outbox.renew()
        assert outbox.nbytes == len(expected) - len(taken)
    while outbox.nbytes:
        taken += (data := _next(outbox)[:7])
        outbox.sent(len(data))
    assert taken == expected
    assert outbox.next() == []
    everything.clear()
    added = []
    piece = None
    assert of.arena.used == 0


@on_each_core
def test_memory_is_kept_until_its_last_byte_is_sent(core: Any) -> None:
    outbox = core.Outbox()
    lent = [BorrowedPiece(bytes(10)) for _ in range(3)]
    known = [weakref.ref(piece) for piece in lent]
    outbox.add([*lent])
    del lent
    for sent, alive in ((9, 3), (1, 2), (10, 1), (9, 1), (1, 0)):
        outbox.sent(sent)
        gc.collect()
        assert sum(ref() is not None for ref in known) == alive


@on_each_core
def test_a_queued_slot_is_not_reused(core: Any) -> None:
    of, outbox = Kinds(core), core.Outbox()
    outbox.add([of.slot(b"a" * 1000), of.slot(b"b" * 1000).part(0, 500)])
    used = of.arena.used
    assert used > 2000
    others = [of.slot(b"c" * 1000) for _ in range(100)]
    outbox.sent(1008)  # but for the last byte of its CRLF
    assert _next(outbox)[:3] == b"\nbb"
    assert of.arena.used == used + sum(slot.footprint for slot in others)
    others.append(of.slot(b"d" * 1000))
    assert _next(outbox) == b"\n" + b"b" * 500
    del outbox
    others.clear()
    assert of.arena.used == 0


@on_each_core
def test_dropped_output_is_not_kept(core: Any) -> None:
    outbox, piece = core.Outbox(), BorrowedPiece(bytes(10))
    known = weakref.ref(piece)
    outbox.add([b"before", piece])
    del piece
    outbox.clear()
    assert outbox.nbytes == 0
    assert known() is None


@on_each_core
@given(st.lists(st.integers(1, 3 * AT_ONCE), min_size=1, max_size=6), st.integers(0, 2 * AT_ONCE))
def test_so_much_is_handed_over_at_a_time(core: Any, sizes: list[int], begun: int) -> None:
    outbox = core.Outbox()
    outbox.add([BorrowedPiece(bytes(size)) for size in sizes])
    outbox.sent(min(begun, outbox.nbytes - 1))
    assert sum(map(len, outbox.next())) == min(AT_ONCE, outbox.nbytes)


@on_each_core
def test_many_small_pieces_are_sent_together(core: Any) -> None:
    outbox = core.Outbox()
    outbox.add([*chain.from_iterable((b"$1", BorrowedPiece(b"x")) for _ in range(1000))])
    assert len(outbox.next()) == 1024
    outbox.sent(3 * 500)
    assert _next(outbox) == b"$1x" * 500


@on_each_core
def test_an_invalid_piece_is_refused_and_earlier_ones_are_sent(core: Any) -> None:
    of, outbox = Kinds(core), core.Outbox()
    outbox.add([b"waits"])
    for wrong in (None, "text", 7):
        with pytest.raises(AttributeError):
            outbox.add([b"a", of.slot(b"value"), b"b" * 1000, BorrowedPiece(b"c"), b"d", wrong])
    assert _next(outbox) == b"waits"
    assert of.arena.used == 0
    for count in (-1, 6, 2**62):
        with pytest.raises(ValueError, match=f"5 bytes wait to be sent, got {count}"):
            outbox.sent(count)


@contextmanager
def connected() -> Iterator[tuple[socket.socket, bytearray, threading.Thread]]:
    """Yield a non-blocking socket, and the bytes that its peer reads until it is closed."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    arrived = bytearray()

    def read() -> None:
        while data := theirs.recv(1 << 18):
            arrived.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield ours, arrived, reader
    finally:
        ours.close()
        reader.join()
        theirs.close()


def send_all(outbox: Any, ours: socket.socket) -> int:
    """Send all queued output; return the number of calls that sent something."""
    calls = 0
    while outbox.nbytes:
        before = outbox.nbytes
        sent = outbox.send(ours.fileno())
        assert sent == before - outbox.nbytes
        calls += bool(sent)
        select.select([], [ours], [], 10)
    return calls


@on_each_core
@given(rounds)
@settings(max_examples=30)
def test_a_socket_receives_exactly_the_added_bytes(core: Any, rounds: list[Round]) -> None:
    of, outbox, expected = Kinds(core), core.Outbox(), bytearray()
    with connected() as (ours, arrived, reader):
        for some, times, _ in rounds:
            added = [of.piece(kind, data) for kind, data in some * (1 + 40 * len(times))]
            expected += b"".join(data for _, data in added)
            outbox.add(tuple(piece for piece, _ in added))
            if times:
                outbox.send(ours.fileno())
        send_all(outbox, ours)
        ours.close()
        reader.join()
        assert arrived == expected


@on_each_core
def test_a_turn_is_some_megabytes(core: Any) -> None:
    """However quickly the peer reads, one call does not send all of a long reply."""
    of, outbox = Kinds(core), core.Outbox()
    outbox.add([of.slot(bytes(MIB))] * 64)
    with connected() as (ours, arrived, _):
        assert send_all(outbox, ours) >= 16
        ours.shutdown(socket.SHUT_WR)
    assert len(arrived) == 64 * (MIB + 12)


@on_each_core
def test_a_socket_that_takes_nothing_is_not_waited_for(core: Any) -> None:
    outbox, (ours, theirs) = core.Outbox(), socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        outbox.add([bytes(8 * MIB)])
        assert 0 < outbox.send(ours.fileno()) < 8 * MIB
        assert outbox.send(ours.fileno()) == 0
        theirs.close()
        with pytest.raises(BrokenPipeError):
            outbox.send(ours.fileno())
        with pytest.raises(OSError, match="Bad file descriptor"):
            outbox.send(-1)
        assert outbox.nbytes > 0


@on_each_core
def test_signals_do_not_interrupt_sending(core: Any) -> None:
    """A handler runs, a call that was interrupted is made again."""
    signals: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: signals.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        of, outbox = Kinds(core), core.Outbox()
        outbox.add([of.slot(b"x" * MIB)] * 64)
        with connected() as (ours, arrived, _):
            send_all(outbox, ours)
            ours.shutdown(socket.SHUT_WR)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert signals
    assert arrived == (b"$%d\r\n" % MIB + b"x" * MIB + b"\r\n") * 64


@pytest.mark.usefixtures("no_collections")
@on_each_core
def test_a_hundred_thousand_pieces_cost_no_more_each(core: Any) -> None:
    of = Kinds(core)

    def spent(count: int) -> float:
        """Seconds of this thread for each of so many pieces, of which some are taken at a time."""
        outbox, pieces = core.Outbox(), [of.slot(b"value")] * count
        started = time.thread_time()
        outbox.add(pieces)
        while outbox.nbytes:
            outbox.sent(min(outbox.nbytes, 1000))
        return (time.thread_time() - started) / count

    assert min(spent(100_000) for _ in range(3)) < 10 * min(spent(1000) for _ in range(30)) + 1e-6


@on_each_core
def test_a_million_replies_leave_no_memory_behind(core: Any) -> None:
    of, outbox = Kinds(core), core.Outbox()
    pieces = [b"+OK\r\n", of.slot(b"value"), b":1\r\n", b":2\r\n", BorrowedPiece(b"lent")] * 20

    def send(times: int) -> int:
        for _ in range(times):
            outbox.add(pieces)
            outbox.clear()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = send(200)
    assert send(10_000 if core.__name__.endswith("native") else 1000) <= before + 1024


def _next(outbox: Any) -> bytes:
    return b"".join(map(bytes, outbox.next()))
