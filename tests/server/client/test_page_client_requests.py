"""Requests of the page client, on every core: words and blobs encoded by the contract, pieces in order."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from cores import CORES, on_each_core
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.client.page import PageLayout
from kvpage_server.core.pieces import Unusable
from kvpage_server.page import DType, PageError, PageKey, encode_page

CREATED = 1_700_000_000_000
KEYS = st.builds(
    PageKey,
    st.from_regex(rb"[a-z{}]{1,3}|x{256}", fullmatch=True),
    st.sampled_from([0, 9, 10, 65_535]),
    st.sampled_from([0, 99, 100]),
    st.sampled_from([0, 1_000_000_000, 2**32 - 1]),
    st.integers(0, 5),
)
SHAPES = st.tuples(st.sampled_from(DType), st.integers(1, 12), st.integers(1, 40))


def word(value: bytes | int) -> bytes:
    text = value if isinstance(value, bytes) else b"%d" % value
    return b"$%d\r\n%b\r\n" % (len(text), text)


def sent(core: Any, pieces: Iterator[Any]) -> bytes:
    """Return the received bytes of pieces that are sent over a socket with a small buffer."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        outgoing = core.Outgoing(pieces)
        arrived, full = [], 0
        while not outgoing.done:
            if outgoing.send(ours.fileno()) < 0:
                full += 1
                arrived.append(theirs.recv(1 << 20))
        ours.close()
        theirs.setblocking(True)
        while data := theirs.recv(1 << 20):
            arrived.append(data)
    whole = b"".join(arrived)
    assert full or len(whole) < 1 << 20
    return whole


def runs(spell: Any, count: int, *args: Any) -> Iterator[Any]:
    at = 0
    while at < count:
        run = spell(at, *args)
        yield run
        assert run.stop > at
        at = run.stop


PIECES = st.one_of(
    st.sampled_from([b"", b"\r\n", bytes(range(256)) * 300]),
    st.binary(max_size=50).map(bytearray),
    st.integers(0, 30).map(lambda size: np.arange(size, dtype=np.float32)),
)


@given(st.lists(PIECES, max_size=12), st.sampled_from([1, 60]))
def test_any_pieces_arrive_as_one_text(pieces: list[Any], times: int) -> None:
    expected = b"".join(map(bytes, pieces)) * times
    for core in CORES:
        assert sent(core, chain.from_iterable(pieces for _ in range(times))) == expected
        outgoing, records = core.Outgoing(iter(pieces * times)), []
        while not outgoing.done:
            records.append(outgoing.record()[: 50_000 + len(records)])  # of a record a part may be sent
            outgoing.sent(len(records[-1]))
        assert b"".join(records) == expected
        assert all(records)


@given(st.lists(st.tuples(KEYS, SHAPES), max_size=12), st.sampled_from([0, 1, 2**47 - 1]))
def test_pages_are_encoded_as_the_contract_requires(
    pages: list[tuple[PageKey, tuple[DType, int, int]]], ttl: int
) -> None:
    bodies = [bytes([i]) * (rows * columns * dtype.itemsize) for i, (_, (dtype, rows, columns)) in enumerate(pages)]
    given_pages = [(key, body, *shape) for (key, shape), body in zip(pages, bodies, strict=True)]
    words = b"".join(
        b"".join(map(word, (key.req_id, key.layer, key.head, key.page, key.kv_type, *map(int, shape), ttl, body)))
        for key, body, *shape in given_pages
    )
    blobs = b"".join(
        b"<%b%b>" % (word(bytes(key)), word(blob)[:-2])
        for key, body, dtype, rows, columns in given_pages
        for blob in [encode_page(key, body, dtype=dtype, page_size=rows, head_dim=columns, ttl=ttl, created_ms=CREATED)]
    )
    for core in CORES:
        found = core.SentPages(given_pages)
        assert found.misfit() == -1
        assert sent(core, runs(found.as_words, len(found), ttl)) == words
        assert sent(core, runs(found.as_blobs, len(found), b"<", b">", ttl, CREATED)) == blobs
        names = core.PageKeys([key for key, *_ in given_pages])
        assert names.keys() == b"".join(word(bytes(key)) for key, _ in pages)
        assert names.words() == b"".join(
            b"".join(map(word, (key.req_id, key.layer, key.head, key.page, key.kv_type))) for key, _ in pages
        )
        part = slice(len(pages) // 3, len(pages))
        assert names[part].keys() == b"".join(word(bytes(key)) for key, _ in pages[part])
        some = found[part]
        assert len(some) == len(pages[part])
        assert words.endswith(sent(core, runs(some.as_words, len(some), ttl)))


LAYOUTS = st.lists(
    st.tuples(st.sampled_from([0, 9, 65_535]), st.sampled_from([0, 100]), st.integers(0, 5), SHAPES), max_size=4
)


@given(st.lists(st.tuples(KEYS, KEYS), max_size=5), LAYOUTS)
def test_pages_of_blocks_are_encoded_as_single_pages(
    blocks: list[tuple[PageKey, PageKey]], layout: list[tuple[int, int, int, tuple[DType, int, int]]]
) -> None:
    names = [(one.req_id, other.page) for one, other in blocks]
    pages = [
        (PageKey(name, layer, head, page, plane), bytes(rows * columns * dtype.itemsize), dtype, rows, columns)
        for name, page in names
        for layer, head, plane, (dtype, rows, columns) in layout
    ]
    packed = PageLayout([(*place, *shape) for *place, shape in layout]).packed
    for core in CORES:
        single, found = core.SentPages(pages), core.SentPages.of_blocks(names, packed, [body for _, body, *_ in pages])
        assert found.misfit() == -1
        for many in (slice(0, len(pages)), slice(len(pages) // 3, len(pages))):
            one, other = single[many], found[many]
            assert one.names.keys() == other.names.keys()
            assert one.names.words() == other.names.words()
            assert sent(core, runs(one.as_blobs, len(one), b"", b"", 0, CREATED)) == sent(
                core, runs(other.as_blobs, len(other), b"", b"", 0, CREATED)
            )
        assert core.PageKeys.of_blocks(names, packed).keys() == found.names.keys()


@on_each_core
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ((b"a:b", 0), PageError),
        ((b"", 0), PageError),
        ((b"x" * 257, 0), PageError),
        ((b"a b", 0), PageError),
        ((b"a\x7f", 0), PageError),
        ((b"a", -1), PageError),
        ((b"a", 2**32), PageError),
        (("a", 0), TypeError),
        ((b"a", "0"), TypeError),
        ((b"a", True), TypeError),
        ((b"a", 0.0), TypeError),
        ((b"a",), ValueError),
        (5, TypeError),
    ],
    ids=repr,
)
def test_a_wrong_name_of_a_block_is_refused(core: Any, name: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        core.PageKeys.of_blocks([(b"good", 0), name], PageLayout([(0, 0, 0, DType.UINT8, 1, 1)]).packed)


@on_each_core
def test_another_number_of_bodies_is_refused(core: Any) -> None:
    layout = PageLayout([(0, 0, plane, DType.UINT8, 1, 3) for plane in (0, 1)]).packed
    for count in (0, 3, 5):
        with pytest.raises(ValueError, match="4 pages need as many bodies"):
            core.SentPages.of_blocks([(b"a", 0), (b"b", 0)], layout, [bytes(3)] * count)
    assert core.SentPages.of_blocks([(b"a", 0)], layout, [bytes(3), bytes(4)]).misfit() == 1


@on_each_core
def test_batches_of_long_and_of_many_bodies_are_sent_in_steps(core: Any) -> None:
    for count, size in ((9, 600_000), (5000, 1)):
        body = np.arange(size, dtype=np.uint8)
        pages = core.SentPages([(PageKey(b"r", 0, 0, i, 0), body, DType.UINT8, 1, size) for i in range(count)])
        found = list(runs(pages.as_words, count, 0))
        assert len(found) > 4
        assert len(sent(core, iter(found))) > count * size


@given(
    st.sampled_from([*DType, 0, 16, 255, 256, -1, 2**70]),
    st.sampled_from([0, -1, 1, 3, 2**32 - 1, 2**32, 2**64 + 3]),
    st.sampled_from([0, 4, 2**32 - 1, 2**40]),
    st.sampled_from([0, 3, 12, 24, 48, 96]),
)
def test_a_body_that_does_not_fit_its_shape_is_an_error(dtype: int, rows: int, columns: int, nbytes: int) -> None:
    fits = 0 < dtype <= 15 and rows > 0 and columns > 0 and rows * columns * DType(dtype).itemsize == nbytes
    key = PageKey(b"r", 0, 0, 0, 0)
    good = (key, bytes(12), DType.INT8, 3, 4)
    for core in CORES:
        pages = core.SentPages([good, (key, bytes(nbytes), dtype, rows, columns), good])
        assert pages.misfit() == (-1 if fits else 1)


@pytest.mark.parametrize(
    "buffer",
    [bytes(8), np.zeros((8, 8))[:, 2], np.zeros((4, 4)).T, "text", None, memoryview(bytes(8))[::2], [1]],
    ids=lambda buffer: type(buffer).__name__,
)
@pytest.mark.parametrize("writable", [True, False])
def test_memory_that_cannot_be_used_is_refused_with_its_reason(buffer: Any, writable: bool) -> None:
    found = []
    for core in CORES:
        try:
            found.append(core.Memory([bytearray(3), buffer], writable=writable).sizes())
        except Unusable as error:
            found.append((error.index, error.why))
    assert all(outcome == found[0] for outcome in found)
    assert found[0] == [3, 8] if isinstance(buffer, bytes) and not writable else found[0][0] == 1


@on_each_core
def test_memory_is_released_after_its_last_used_part(core: Any) -> None:
    buffers = [bytearray(10) for _ in range(4)]
    whole = core.Memory(buffers, writable=True)
    part = whole[1:3][1:]
    del whole
    gc.collect()
    assert part.sizes() == [10]
    assert [*map(len, part.views())] == [10]
    with pytest.raises(BufferError):
        buffers[2].append(1)
    circle: list[Any] = [part]
    circle.append(circle)  # only the garbage collector frees it
    del part, circle
    gc.collect()
    for buffer in buffers:
        buffer.append(1)


@on_each_core
def test_pages_in_a_circle_are_freed_once(core: Any) -> None:
    for _ in range(3):
        pages = core.SentPages([(PageKey(b"r", 0, 0, i, 0), bytes(4), DType.INT8, 1, 4) for i in range(100)])
        circle: list[Any] = [pages[:50], pages.names[50:], pages.bodies[50:], pages[10:20][5:].as_words(0, 0)]
        circle.append(circle)
        del pages, circle
        gc.collect()


@on_each_core
def test_a_slow_reader_is_no_error_and_a_closed_one_is(core: Any) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.setblocking(False)
        outgoing = core.Outgoing(iter([bytes(4 << 20)]))
        while outgoing.send(ours.fileno()) > 0:
            pass
        theirs.close()
        with pytest.raises(BrokenPipeError):
            outgoing.send(ours.fileno())
        assert not outgoing.done
