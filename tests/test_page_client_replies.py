"""The receivers of the page client, without a server: any answer, in any split, ends as what was answered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpage_server.client import Refused, WrongReply
from kvpage_server.client.reply import Receiver, Values
from kvpage_server.client.scatter import Bodies


def receive(receiver: Receiver, data: bytes, cuts: list[int] | None = None) -> None:
    """Give the receiver what a socket would, in pieces."""
    bounds = [0, *sorted(cut for cut in cuts or [] if cut < len(data)), len(data)]
    for start, stop in pairwise(bounds):
        piece = memoryview(data)[start:stop]
        while piece:
            if receiver.done:  # the connection finds them before it asks again
                raise WrongReply("there are bytes after the reply")
            count = 0
            for buffer in receiver.buffers():
                part = piece[: len(buffer)]
                buffer[: len(part)] = part
                piece = piece[len(part) :]
                count += len(part)
            assert count, "it has no room for what comes"
            receiver.received(count)


CUTS = st.lists(st.integers(0, 3000), max_size=12)
SIZES = st.one_of(st.integers(0, 20), st.integers(0, 900))


@st.composite
def answers(draw: st.DrawFn) -> tuple[list[int], list[bytes | None], bytes]:
    """Places by size, what the server has for each, and its answer on the wire."""
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
def test_bodies_arrive_in_their_places_whatever_is_missing_and_however_the_answer_is_split(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int]
) -> None:
    sizes, held, data = answer
    places = [memoryview(bytearray(size)) for size in sizes]
    bodies = Bodies(places, array=True)
    receive(bodies, data, cuts)
    assert bodies.done
    expected = {
        i: "absent" if body is None else "size"
        for i, (size, body) in enumerate(zip(sizes, held, strict=True))
        if body is None or len(body) != size
    }
    assert bodies.result() == expected
    for i, (place, body) in enumerate(zip(places, held, strict=True)):
        assert i in expected or place == body


@given(answers(), CUTS, st.integers(0, 11), st.integers(0, 10_000))
def test_a_blob_s_header_comes_apart_from_its_body_and_both_are_checked_together(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int], wrong: int, salt: int
) -> None:
    sizes, held, _ = answer
    header = b"%-64d" % salt
    items = [b"$-1\r\n" if body is None else b"$%d\r\n%b%b\r\n" % (64 + len(body), header, body) for body in held]
    places = [memoryview(bytearray(size)) for size in sizes]
    seen: dict[int, tuple[bytes, bytes]] = {}

    def check(item: int, head: memoryview, body: memoryview) -> str | None:
        seen[item] = bytes(head), bytes(body)
        return "checksum" if item == wrong else None

    bodies = Bodies(places, array=True, header=64, check=check)
    receive(bodies, b"*%d\r\n%b" % (len(items), b"".join(items)), cuts)
    assert bodies.done
    fitting = {i: body for i, body in enumerate(held) if body is not None and len(body) == sizes[i]}
    assert seen == {i: (header, body) for i, body in fitting.items()}
    missed = bodies.result()
    assert {i for i, reason in missed.items() if reason == "checksum"} == {wrong} & set(fitting)
    assert set(missed) == (set(range(len(sizes))) - set(fitting)) | ({wrong} & set(fitting))


@given(answers(), CUTS, st.data())
def test_an_answer_cut_short_is_never_taken_for_a_whole_one(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int], data: st.DataObject
) -> None:
    sizes, _, whole = answer
    length = data.draw(st.integers(0, len(whole) - 1))
    bodies = Bodies([memoryview(bytearray(size)) for size in sizes], array=True)
    receive(bodies, whole[:length], cuts)
    assert not bodies.done


@given(answers(), CUTS, st.binary(min_size=1, max_size=40), st.data())
def test_an_answer_with_strange_bytes_in_it_never_gives_a_body_that_was_not_sent(
    answer: tuple[list[int], list[bytes | None], bytes], cuts: list[int], strange: bytes, data: st.DataObject
) -> None:
    """Whatever is reported as arrived is somewhere on the wire as a bulk string of its own."""
    sizes, _, whole = answer
    at = data.draw(st.integers(0, len(whole)))
    sent = whole[:at] + strange + whole[at + len(strange) :]
    places = [memoryview(bytearray(size)) for size in sizes]
    bodies = Bodies(places, array=True)
    try:
        receive(bodies, sent, cuts)
    except WrongReply:
        return
    if bodies.done:
        try:
            missed = bodies.result()
        except Refused:
            return
        for i, place in enumerate(places):
            assert i in missed or b"$%d\r\n%b\r\n" % (len(place), place) in sent


def test_one_body_alone_is_no_array() -> None:
    place = memoryview(bytearray(5))
    bodies = Bodies([place], array=False)
    receive(bodies, b"$5\r\nhello\r\n", [1, 5, 7])
    assert (bodies.done, bodies.result(), bytes(place)) == (True, {}, b"hello")
    missing = Bodies([place], array=False)
    receive(missing, b"_\r\n", [1])
    assert (missing.done, missing.result()) == (True, {0: "absent"})


@pytest.mark.parametrize("array", [True, False])
@pytest.mark.parametrize("cuts", [[], [1], [3, 4, 5]])
def test_an_error_instead_of_bodies_is_raised_with_its_code(array: bool, cuts: list[int]) -> None:
    bodies = Bodies([memoryview(bytearray(5))], array=array)
    receive(bodies, b"-NOPERM not you\r\n", cuts)
    assert bodies.done
    with pytest.raises(Refused, match="NOPERM not you") as refused:
        bodies.result()
    assert refused.value.code == "NOPERM"


@pytest.mark.parametrize(
    "data",
    [
        b"*2\r\n",  # another count
        b"+OK\r\n",
        b"*1\r\n:5\r\n",
        b"*1\r\n-ERR within\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$-7\r\n",
        b"*1\r\n$99999999999\r\n",
        b"*1\r\n$5\r\nhelloXX",
        b"*1\r\n$3\r\nhelloXX",
        b"*1\r\n_\r\nmore",
        b"HTTP/1.1 400 Bad Request\r\n",
    ],
)
@pytest.mark.parametrize("cuts", [[], list(range(1, 30))])
def test_what_is_no_answer_to_the_question_is_a_wrong_reply(data: bytes, cuts: list[int]) -> None:
    with pytest.raises(WrongReply):
        receive(Bodies([memoryview(bytearray(5))], array=True), data, cuts)


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


def test_an_error_among_several_answers_is_raised_once_all_are_there() -> None:
    receiver = Values(3)
    receive(receiver, b"+OK\r\n-OOM full\r\n", [3])
    assert not receiver.done
    receive(receiver, b"+OK\r\n")
    assert receiver.done
    with pytest.raises(Refused, match="OOM full"):
        receiver.result()
