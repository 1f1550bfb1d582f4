"""What waits to be sent goes in order, byte for byte, whatever the kernel takes at a time, and is kept until then."""

from __future__ import annotations

import gc
import weakref
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.net.outbox import Outbox

AT_ONCE = 1024 * 1024


class Lent:
    """A piece of borrowed memory, which may move."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.size = len(data)

    @property
    def view(self) -> memoryview:
        """Where it is now."""
        return memoryview(self.data)

    def move(self) -> None:
        """To another place; where it was is used for something else."""
        old, self.data = self.data, bytearray(self.data)
        old[:] = bytes(len(old))


Round = tuple[list[tuple[bool, bytes]], list[int], bool]  # pieces, lent or not; what is taken; whether memory moves
pieces = st.lists(st.tuples(st.booleans(), st.binary(max_size=20)), min_size=1, max_size=8)
rounds = st.lists(st.tuples(pieces, st.lists(st.integers(1, 40), max_size=4), st.booleans()))


@given(rounds)
def test_bytes_leave_in_order_however_few_are_taken(rounds: list[Round]) -> None:
    outbox, taken, waiting = Outbox(), bytearray(), 0
    everything: list[Lent] = []
    for some, counts, moves in rounds:
        added = [Lent(data) if is_lent else data for is_lent, data in some]
        everything += [piece for piece in added if isinstance(piece, Lent)]
        outbox.add([*added])
        waiting += sum(len(data) for _, data in some)
        for count in counts:
            if outbox.nbytes:
                taken += (data := _next(outbox)[:count])
                outbox.sent(len(data))
                waiting -= len(data)
        if moves:
            for piece in everything:
                piece.move()
            outbox.renew()
        assert outbox.nbytes == waiting
    while outbox.nbytes:
        taken += (data := _next(outbox)[:7])
        outbox.sent(len(data))
    assert taken == b"".join(data for some, _, _ in rounds for _, data in some)


def test_memory_is_kept_until_its_last_byte_is_sent() -> None:
    outbox = Outbox()
    lent = [Lent(bytes(10)) for _ in range(3)]
    known = [weakref.ref(piece) for piece in lent]
    outbox.add([*lent])
    del lent
    for sent, alive in ((9, 3), (1, 2), (10, 1), (9, 1), (1, 0)):
        outbox.sent(sent)
        gc.collect()
        assert sum(ref() is not None for ref in known) == alive


def test_what_is_dropped_is_not_kept() -> None:
    outbox, piece = Outbox(), Lent(bytes(10))
    known = weakref.ref(piece)
    outbox.add([b"before", piece])
    del piece
    outbox.clear()
    assert outbox.nbytes == 0
    assert known() is None


@given(st.lists(st.integers(1, 3 * AT_ONCE), min_size=1, max_size=6), st.integers(0, 2 * AT_ONCE))
def test_a_megabyte_is_handed_over_at_a_time(sizes: list[int], begun: int) -> None:
    outbox = Outbox()
    outbox.add([Lent(bytes(size)) for size in sizes])
    outbox.sent(min(begun, outbox.nbytes - 1))
    buffers = outbox.next()
    assert sum(map(len, buffers)) == min(AT_ONCE, outbox.nbytes)


def test_many_small_pieces_are_handed_over_together_as_many_as_the_kernel_takes() -> None:
    outbox = Outbox()
    outbox.add([*chain.from_iterable((b"$1", Lent(b"x")) for _ in range(1000))])
    assert len(outbox.next()) == 512
    outbox.sent(3 * 500)
    assert _next(outbox) == b"$1x" * 256


def _next(outbox: Outbox) -> bytes:
    return b"".join(map(bytes, outbox.next()))
