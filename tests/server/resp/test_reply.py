"""Replies as clients read them: the parsers of redis-py and hiredis return the encoded values."""

from __future__ import annotations

import math
import socket
import threading
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers import Encoder, _RESP2Parser, _RESP3Parser
from redis.exceptions import RedisError

from kvpage_server.core import Arena
from kvpage_server.core.pieces import Piece
from kvpage_server.resp import NULL_ARRAY, OK, Push, Raw, ReplyError, Stream, Verbatim, encode, simple


def wire(value: Any, protocol: int) -> bytes:
    pieces: list[Piece] = []
    encode(value, protocol, pieces)
    return b"".join(piece if isinstance(piece, bytes) else bytes(piece.view) for piece in pieces)


def as_redis_py_reads(data: bytes, protocol: int) -> Any:
    """The first reply in `data`, which must also be the last."""
    near, far = socket.socketpair()
    with near, far:
        sender = threading.Thread(target=lambda: (near.sendall(data + b"+end\r\n"), near.shutdown(socket.SHUT_WR)))
        sender.start()
        parser = (_RESP3Parser if protocol == 3 else _RESP2Parser)(65536)
        parser.on_connect(SimpleNamespace(_sock=far, socket_timeout=5, encoder=Encoder("utf-8", "strict", False)))
        value, end = parser.read_response(), parser.read_response()
        sender.join()
        assert end == b"end"
        return value


def as_hiredis_reads(data: bytes) -> Any:
    reader = hiredis.Reader()
    reader.feed(data + b"+end\r\n")
    value, end = reader.gets(), reader.gets()
    assert end == b"end"
    return value


# What RESP2 has no type for arrives as the nearest that it has.
def in_resp2(value: Any) -> Any:
    if isinstance(value, dict):
        return [in_resp2(item) for pair in value.items() for item in pair]
    if isinstance(value, frozenset):
        return [in_resp2(item) for item in sorted(value)]
    if isinstance(value, list):
        return [in_resp2(item) for item in value]
    if isinstance(value, bool):
        return int(value)
    return b"%.17g" % value if isinstance(value, float) else value


integers = st.integers(-(2**63), 2**63 - 1)
scalars = st.none() | integers | st.booleans() | st.binary(max_size=40) | st.floats(allow_nan=False)
values = st.recursive(
    scalars | st.frozensets(st.binary(max_size=5), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=5), inner, min_size=1, max_size=4),
    max_leaves=12,
)


def plain(value: Any) -> Any:
    """A reply as parsers differ about it: redis-py has sets as sets, hiredis as lists."""
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@given(values)
def test_resp3_is_decoded_unchanged(value: Any) -> None:
    data = wire(value, 3)
    assert plain(as_redis_py_reads(data, 3)) == plain(value)
    assert plain(as_hiredis_reads(data)) == plain(value)


@given(values)
def test_resp2_is_decoded_in_its_own_types(value: Any) -> None:
    data = wire(value, 2)
    assert as_redis_py_reads(data, 2) == in_resp2(value)
    assert as_hiredis_reads(data) == in_resp2(value)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e300, 5e-324, 0.1, math.inf, -math.inf])
def test_a_float_keeps_every_bit(value: float) -> None:
    got = as_redis_py_reads(wire(value, 3), 3)
    assert (got, math.copysign(1, got)) == (value, math.copysign(1, value))
    assert float(as_redis_py_reads(wire(value, 2), 2)) == value


@pytest.mark.parametrize("protocol", [2, 3])
class TestEveryKind:
    def test_simple_strings(self, protocol: int) -> None:
        assert as_redis_py_reads(wire(OK, protocol), protocol) == b"OK"
        assert as_redis_py_reads(wire(simple("string"), protocol), protocol) == b"string"

    def test_text_is_a_bulk_string(self, protocol: int) -> None:
        assert as_redis_py_reads(wire("vår\r\n", protocol), protocol) == "vår\r\n".encode()
        assert wire(b"\xff".decode("utf-8", "surrogateescape"), protocol) == b"$1\r\n\xff\r\n"

    def test_nulls(self, protocol: int) -> None:
        assert as_redis_py_reads(wire(None, protocol), protocol) is None
        assert as_redis_py_reads(wire(NULL_ARRAY, protocol), protocol) is None
        assert wire([None, NULL_ARRAY], 2) == b"*2\r\n$-1\r\n*-1\r\n"

    def test_empty_ones(self, protocol: int) -> None:
        for value in (b"", [], {}, frozenset()):
            assert len(as_redis_py_reads(wire(value, protocol), protocol)) == 0

    def test_an_error_is_one_line_for_any_text(self, protocol: int) -> None:
        for message in ("ERR plain", "ERR two\r\nlines\n:1\r\n", "WRONGTYPE \udcff", "ERR "):
            data = wire(ReplyError(message), protocol)
            assert data.startswith(b"-")
            assert data.count(b"\r") == data.count(b"\n") == 1
            assert isinstance(as_redis_py_reads(data, protocol) if message != "ERR " else RedisError(), RedisError)
            assert isinstance(as_hiredis_reads(data), hiredis.ReplyError)

    def test_an_error_among_other_replies(self, protocol: int) -> None:
        first, error, last = as_redis_py_reads(wire([1, ReplyError("ERR no"), b"x"], protocol), protocol)
        assert (first, str(error), last) == (1, "no", b"x")

    def test_text_for_people(self, protocol: int) -> None:
        data = wire(Verbatim(b"# Server\r\nname:value\r\n"), protocol)
        assert as_redis_py_reads(data, protocol) == b"# Server\r\nname:value\r\n"
        assert data.startswith(b"=26\r\ntxt:" if protocol == 3 else b"$22\r\n#")

    def test_a_push(self, protocol: int) -> None:
        data = wire(Push(["message", b"channel", b"text"]), protocol)
        assert data.startswith(b">3\r\n" if protocol == 3 else b"*3\r\n")
        if protocol == 2:
            assert as_redis_py_reads(data, protocol) == [b"message", b"channel", b"text"]
        else:
            assert isinstance(as_hiredis_reads(data), hiredis.PushNotification)

    def test_a_stream_is_an_array(self, protocol: int) -> None:
        assert as_redis_py_reads(wire(Stream(3, iter([b"a", None, [1]])), protocol), protocol) == [b"a", None, [1]]

    def test_a_value_of_the_store_is_borrowed_not_copied(self, protocol: int) -> None:
        slot = Arena().allocate(70_000)
        slot.body[:] = bytes(range(250)) * 280
        pieces: list[Piece] = []
        encode([b"before", (slot,), b"after"], protocol, pieces)
        assert any(piece is slot for piece in pieces)
        data = wire([b"before", (slot,), b"after"], protocol)
        assert as_redis_py_reads(data, protocol) == [b"before", bytes(range(250)) * 280, b"after"]

    def test_an_object_that_is_no_reply_is_an_error(self, protocol: int) -> None:
        with pytest.raises(TypeError, match="no RESP type"):
            wire(object(), protocol)

    def test_an_encoded_reply_is_unchanged(self, protocol: int) -> None:
        assert wire([Raw(b":7\r\n")], protocol) == b"*1\r\n:7\r\n"
