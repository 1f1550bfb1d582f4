"""The receivers of the page client, without a server: the result is independent of the split of a reply."""

from __future__ import annotations

import random
import socket
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from cores import CORES, on_each_core
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.client import Refused, WrongReply
from kvpage_server.client.wire.reply import ARRIVED, OTHER_SIZE, Place, Receiver, Values
from kvpage_server.core.pieces import ErrorAnswer, WrongAnswer
from kvpage_server.page import FIELD_AT, DType, PageKey, encode_page


def receive(receiver: Receiver, data: bytes, cuts: list[int] | None = None) -> None:
    """Feed the receiver in pieces, as a socket would."""
    bounds = [0, *sorted(cut for cut in cuts or [] if cut < len(data)), len(data)]
    for start, stop in pairwise(bounds):
        receiver.feed(data[start:stop])


class Outcome(NamedTuple):
    """Result of a reply: the missing items or the error, and the content of the places."""

    missed: dict[int, str] | str
    places: list[bytes]
    done: bool


def outcome(
    core: Any,
    sizes: list[int],
    data: bytes,
    cuts: list[int],
    keys: list[PageKey] | None = None,
    *,
    array: bool = True,
    verify: bool = True,
) -> Outcome:
    """Return the outcome of a reply to a request for bodies of these sizes."""
    places = [bytearray(size) for size in sizes]
    names = None if keys is None else core.PageKeys(keys)
    bodies = core.Bodies(core.Memory(places, writable=True), array=array, names=names, verify=verify)
    missed: dict[int, str] | str
    try:
        receive(bodies, data, cuts)
        missed = bodies.result()
    except (WrongAnswer, ErrorAnswer) as error:
        missed = repr(error)
    return Outcome(missed, [bytes(place) for place in places], bodies.done)


def outcome_on_all(*answer: Any, **options: Any) -> Outcome:
    """The same, and that it is one on every core."""
    first, *others = [outcome(core, *answer, **options) for core in CORES]
    assert all(other == first for other in others)
    return first


CUTS = st.lists(st.integers(0, 3000), max_size=12)
SIZES = st.one_of(st.integers(0, 20), st.integers(0, 900))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[bytes | None], bytes]:
    """Draw places by size, the server's values for each, and its reply on the wire."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=12))
    null = draw(st.sampled_from([b"$-1\r\n", b"_\r\n"]))
    held: list[bytes | None] = []
    for size in sizes:
        what = draw(st.sampled_from(["it"] * 5 + ["nothing", "another size", "something like RESP"]))
        if what == "nothing":
            held.append(None)
        elif what == "another size":
            held.append(bytes(draw(SIZES)))
        elif what == "something like RESP":
            held.append((b"\r\n$%d\r\n$-1\r\n" % size * 80)[:size])
        else:
            held.append(draw(st.binary(min_size=size, max_size=size)))
    items = [null if body is None else b"$%d\r\n%b\r\n" % (len(body), body) for body in held]
    return sizes, held, b"*%d\r\n%b" % (len(sizes), b"".join(items))


@given(answers(), CUTS)
def test_bodies_arrive_in_place_for_any_split_of_the_reply(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int]
) -> None:
    sizes, held, data = answer
    found = outcome_on_all(sizes, data, cuts)
    assert found.done
    expected = {
        i: "absent" if body is None else "size"
        for i, (size, body) in enumerate(zip(sizes, held, strict=True))
        if body is None or len(body) != size
    }
    assert found.missed == expected
    assert all(i in expected or place == body for i, (place, body) in enumerate(zip(found.places, held, strict=True)))


LONG = st.one_of(SIZES, st.integers(3_000, 9_000), st.integers(60_000, 70_000))


@given(
    st.lists(st.tuples(LONG, st.sampled_from(["placed", "without", "shorter", "line", "refusal", "null"])), min_size=1),
    st.lists(st.integers(0, 200_000), max_size=12),
    st.integers(0, 64),
)
def test_strings_arrive_in_place_among_other_replies(answer: list[tuple[int, str]], cuts: list[int], head: int) -> None:
    places: list[Place | None] = []
    expected: list[Any] = []
    data = b""
    for number, (size, kind) in enumerate(answer):
        body = bytes([number % 251]) * size
        place = Place(memoryview(bytearray(head)), memoryview(bytearray(size)))
        places.append(None if kind in ("without", "line") else place)
        if kind in ("placed", "without", "shorter"):
            value = bytes(head - (kind == "shorter")) + body if head else body + bytes(kind == "shorter")
            data += b"$%d\r\n%b\r\n" % (len(value), value)
            expected.append({"placed": ARRIVED, "without": value, "shorter": OTHER_SIZE}[kind])
        else:
            data += {"line": b"+line\r\n", "refusal": b"-ERR no\r\n", "null": b"_\r\n"}[kind]
            expected.append({"line": b"line", "refusal": "ERR no", "null": None}[kind])
    values = Values(with_errors=True, places=places)
    receive(values, data, cuts)
    assert values.done
    found = [str(value) if isinstance(value, Refused) else value for value in values.result()]
    assert found == expected
    for number, (place, value) in enumerate(zip(places, found, strict=True)):
        if place and value is ARRIVED:
            assert place.head == bytes(head)
            assert place.body == bytes([number % 251]) * len(place.body)
    with pytest.raises(WrongReply):
        receive(Values(places=places), b"*1\r\n:1\r\n")


KEY = PageKey(b"req", 300, 4, 70_000, 2)
TOLD = ["magic", "version", "kv_type", "flags", "layer", "head", "page", "body_size", "reserved"]  # by key and place
FIELDS = ["dtype", "page_size", "head_dim", "created", "ttl", "checksum", *TOLD]


@given(
    st.lists(st.tuples(SIZES, st.sampled_from([None, "body", *FIELDS])), min_size=1, max_size=9), CUTS, st.booleans()
)
def test_headers_match_keys_and_bodies_match_checksums(
    pages: list[tuple[int, str | None]], cuts: list[int], verify: bool
) -> None:
    blobs, bodies, expected = [], [], {}
    for i, (size, damaged) in enumerate(pages):
        blob = bytearray(encode_page(KEY, bytes([i]) * size, dtype=DType.INT8, page_size=1, head_dim=1, ttl=7))
        if damaged == "body":
            blob[64:65] = bytes([blob[64] ^ 1]) if size else b""
        elif damaged:
            blob[FIELD_AT[damaged]] ^= 0x40
        if damaged in TOLD:
            expected[i] = "header"
        elif verify and (damaged == "checksum" or (damaged == "body" and size)):
            expected[i] = "checksum"
        blobs.append(b"$%d\r\n%b\r\n" % (len(blob), blob))
        bodies.append(bytes(blob[64:]))
    sizes = [size for size, _ in pages]
    answer = b"*%d\r\n%b" % (len(pages), b"".join(blobs))
    found = outcome_on_all(sizes, answer, cuts, [KEY] * len(pages), verify=verify)
    assert found == Outcome(expected, bodies, True)


@on_each_core
def test_a_checksum_of_zero_means_none(core: Any) -> None:
    blob = encode_page(KEY, b"hello", dtype=DType.INT8, page_size=1, head_dim=5, with_checksum=False)
    found = outcome(core, [5], b"$69\r\n%b\r\n" % blob, [], [KEY], array=False)
    assert found == Outcome({}, [b"hello"], True)


LONG = st.sampled_from([0, 1, 4096, 16_383, 16_384, 16_385, 40_000, 262_144, 262_200, 1_100_000])


@given(
    st.lists(st.tuples(LONG, st.sampled_from(["it", "it", "it", "nothing", "other"])), min_size=1, max_size=30),
    st.data(),
)
def test_long_and_short_bodies_arrive_over_a_socket(wanted: list[tuple[int, str]], data: st.DataObject) -> None:
    noise = random.Random(len(wanted))
    held = [None if what == "nothing" else noise.randbytes(size + (what == "other")) for size, what in wanted]
    items = [b"_\r\n" if body is None else b"$%d\r\n%b\r\n" % (len(body), body) for body in held]
    answer = memoryview(b"*%d\r\n%b" % (len(items), b"".join(items)))
    steps = data.draw(st.lists(st.sampled_from([1, 30, 5000, 70_000, 400_000]), min_size=1, max_size=5))
    for core in CORES:
        places = [bytearray(size) for size, _ in wanted]
        bodies = core.Bodies(core.Memory(places, writable=True), array=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.setblocking(False)
            assert bodies.receive(ours.fileno()) == -1, "nothing has come"
            sent, turn = 0, 0
            while not bodies.done:
                if sent < len(answer):
                    sent += theirs.send(answer[sent : sent + steps[turn % len(steps)] + turn // 50])
                turn += 1
                while bodies.receive(ours.fileno()) > 0:
                    pass
            assert sent == len(answer)
            theirs.close()
            assert bodies.receive(ours.fileno()) == 0, "the stream has ended"
        missed = {i: {"nothing": "absent", "other": "size"}.get(what) for i, (_, what) in enumerate(wanted)}
        assert bodies.result() == {i: reason for i, reason in missed.items() if reason}
        assert all(missed[i] or place == body for i, (place, body) in enumerate(zip(places, held, strict=True)))


@given(answers(), CUTS, st.data())
def test_an_answer_cut_short_is_never_taken_for_a_whole_one(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int], data: st.DataObject
) -> None:
    sizes, _, whole = answer
    length = data.draw(st.integers(0, len(whole) - 1))
    assert not outcome_on_all(sizes, whole[:length], cuts).done


@given(answers(), CUTS, st.binary(min_size=1, max_size=40), st.data())
def test_a_corrupted_reply_never_gives_a_body_that_was_not_sent(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int], strange: bytes, data: st.DataObject
) -> None:
    """Whatever is reported as arrived is somewhere on the wire as a bulk string of its own."""
    sizes, _, whole = answer
    at = data.draw(st.integers(0, len(whole)))
    sent = whole[:at] + strange + whole[at + len(strange) :]
    found = outcome_on_all(sizes, sent, cuts)
    if found.done and isinstance(found.missed, dict):
        for i, place in enumerate(found.places):
            assert i in found.missed or b"$%d\r\n%b\r\n" % (len(place), place) in sent


def test_one_body_alone_is_no_array() -> None:
    assert outcome_on_all([5], b"$5\r\nhello\r\n", [1, 5, 7], array=False) == Outcome({}, [b"hello"], True)
    assert outcome_on_all([5], b"_\r\n", [1], array=False) == Outcome({0: "absent"}, [bytes(5)], True)


@pytest.mark.parametrize("array", [True, False])
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 5]])
def test_an_error_instead_of_bodies_is_raised(array: bool, cuts: list[int]) -> None:
    found = outcome_on_all([5], b"-NOPERM not you\r\n", cuts, array=array)
    assert found == Outcome("ErrorAnswer(b'NOPERM not you')", [bytes(5)], True)


@pytest.mark.parametrize(
    "data",
    [
        b"*2\r\n",  # another count
        b"+OK\r\n",
        b"*1\r\n:5\r\n",
        b"*1\r\n-ERR within\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$\r\n",
        b"*1\r\n_5\r\n",
        b"*1\r\n$-7\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*1\r\n$9999999999\r\n",
        b"*1\r\n$" + b"0" * 30,
        b"*1\r\n$5\nhello\r\n",
        b"*1\r\n$5\r\nhelloXX",
        b"*1\r\n$3\r\nhelloXX",
        b"*1\r\n_\r\nmore",
        b"-ERR no\r\n*1\r\n",
        b"-" + bytes(70_000),
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(1, 30))])
def test_an_unexpected_reply_is_a_wrong_answer(data: bytes, cuts: list[int]) -> None:
    found = outcome_on_all([5], data, cuts)
    assert not found.done
    assert isinstance(found.missed, str)
    assert found.missed.startswith("WrongAnswer")


def spell(value: Any) -> bytes:
    if value is None:
        return b"_\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, dict):
        return b"%%%d\r\n" % len(value) + b"".join(spell(k) + spell(v) for k, v in value.items())
    return b"*%d\r\n" % len(value) + b"".join(map(spell, value))


LEAVES = st.none() | st.integers(-(2**63), 2**63 - 1) | st.binary(max_size=40) | st.integers(4090, 9000).map(bytes)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.binary(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(VALUES, min_size=1, max_size=4), CUTS)
def test_any_values_in_any_split(values: list[Any], cuts: list[int]) -> None:
    receiver = Values(len(values))
    receive(receiver, b"".join(map(spell, values)), cuts)
    assert receiver.done
    assert receiver.result() == values


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n",
        b"?1\r\n",
        b":x\r\n",
        b":--1\r\n",
        b":1\xb2\r\n",
        b"$-2\r\n",
        b"$5\r\nhelloXX",
        b"+OK\r\n+OK\r\n",
        b"$4096\r\n" + bytes(4096) + b"XX",
        b"*1\r\n" * 20,
        b"+" + bytes(70_000),
        b"%1\r\n*0\r\n:1\r\n",
    ],
)
def test_values_that_are_not_resp_are_a_wrong_reply(data: bytes) -> None:
    with pytest.raises(WrongReply):
        receive(Values(), data)


def test_an_error_among_replies_is_raised_after_all_of_them() -> None:
    receiver = Values(3)
    receive(receiver, b"+OK\r\n-OOM full\r\n", [3])
    assert not receiver.done
    receive(receiver, b"+OK\r\n")
    assert receiver.done
    with pytest.raises(Refused, match="OOM full"):
        receiver.result()
