"""Several kvpage-servers behind one PageClient: each segment of a prompt belongs to one of them."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
from page_batches import NO_RETRY, SHAPE, batch, block_body, key, room, same
from proxy import Weather, start_proxy
from servers import RunningServer, start_redis, start_server
from test_page_client import (  # noqa: F401 - these tests of one server apply to several
    test_a_block_and_its_pages_are_the_same_data,
    test_a_block_in_several_pieces_arrives_as_one,
    test_a_missing_page_is_a_miss_and_the_others_arrive,
    test_a_page_of_another_length_is_a_miss,
    test_any_array_can_be_sent_and_one_of_its_kind_received,
    test_blocks_are_read_as_a_whole_or_not_at_all,
    test_deleted_pages_are_absent,
    test_nothing_asked_is_nothing_answered,
    test_pages_are_read_into_the_callers_memory,
    test_pages_of_any_size_alone_and_together,
    test_pages_of_blocks_are_moved_without_objects,
    test_truncated_and_short_replies_are_not_waited_for,
)
from waiting import until

from kvpage_server.client import BadBuffer, Disconnected, PageClient, PageClientError, Refused
from kvpage_server.client.cluster.side_by_side import Rendezvous, SideBySideCalls, servers_of
from kvpage_server.client.page import StateName
from kvpage_server.page import BlockShape, PageKey, segment_of, without_segment

NAMES = [(b"{segment-%d}%d" % (i // 4, i), i) for i in range(160)]  # 40 segments: servers have random names
BODIES = [block_body(i) for i in range(len(NAMES))]


@pytest.fixture(scope="module")
def servers() -> Iterator[list[RunningServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(start_server("--maxmemory", "1gb")) for _ in range(3)]


def url_of(servers: list[RunningServer]) -> str:
    return ",".join(server.url for server in servers)


def flush(servers: list[RunningServer]) -> None:
    for server in servers:
        with server.client() as client:
            client.flushall()


@pytest.fixture(params=[True, False], ids=["verify", "no verify"])
def pages(servers: list[RunningServer], request: pytest.FixtureRequest) -> Iterator[PageClient]:
    flush(servers)
    with PageClient(url_of(servers), verify=request.param, deadline=30) as pages:
        yield pages


def read(pages: PageClient, names: Any = NAMES, deadline: float = 30) -> list[bool]:
    """Return which blocks were found. Each has the right bytes."""
    into = [np.zeros(SHAPE.nbytes, np.uint8) for _ in names]
    found = pages.mget_blocks_into(names, SHAPE, into, deadline=deadline)
    assert all((a == BODIES[name[1]]).all() for a, name, there in zip(into, names, found, strict=True) if there)
    return found


# -- where things are --------------------------------------------------------------------------------------------------


def test_a_segment_is_on_one_server_and_segments_are_on_all(pages: PageClient, servers: list[RunningServer]) -> None:
    pages.mset_blocks(NAMES, SHAPE, BODIES)
    assert all(read(pages))
    places = {}
    for server in servers:
        with PageClient(server.url, deadline=30) as alone:
            for name, there in zip(NAMES, read(alone), strict=True):
                if there:
                    assert places.setdefault(name, server.port) == server.port  # on no other
    assert len(places) == len(NAMES)
    by_segment = [{places[name] for name in NAMES[i : i + 4]} for i in range(0, len(NAMES), 4)]
    assert all(len(ports) == 1 for ports in by_segment)
    assert len(set.union(*by_segment)) == 3


def test_the_order_of_the_list_means_nothing(pages: PageClient, servers: list[RunningServer]) -> None:
    pages.mset_blocks(NAMES, SHAPE, BODIES)
    with PageClient(url_of(servers[::-1]), deadline=30) as other:
        assert all(read(other))


def test_an_added_server_takes_its_share_and_nothing_else_moves() -> None:
    three = servers_of("redis://a:9221,redis://b:9221,redis://c:9221")
    four = servers_of("redis://d:9221,redis://a:9221,redis://b:9221,redis://c:9221")
    segments = [b"segment-%d" % i for i in range(4000)]
    before, after = Rendezvous(three), Rendezvous(four)
    moved = Counter(str(after.server(s)) for s in segments if before.server(s) != after.server(s))
    assert moved.keys() == {"redis://d:9221"}
    shares = Counter(str(after.server(s)) for s in segments)
    assert all(850 < share < 1150 for share in shares.values()), shares


def test_a_password_that_changes_moves_nothing() -> None:
    one, other = servers_of("redis://u:old@a:1,redis://b:2"), servers_of("redis://u:new@a:1,redis://b:2")
    segments = [b"segment-%d" % i for i in range(100)]
    assert [str(Rendezvous(one).server(s)) for s in segments] == [str(Rendezvous(other).server(s)) for s in segments]
    assert "old" not in str(one[0])


@pytest.mark.parametrize(
    ("req_id", "segment", "rest"),
    [
        (b"a", b"a", b"a"),
        (b"{s}a", b"s", b"a"),
        (b"{s}{t}", b"s", b"{t}"),
        (b"x{s}a{t}", b"s", b"x{s}a{t}"),
        (b"{}a", b"{}a", b"{}a"),
        (b"{a", b"{a", b"{a"),
        (b"a}{b", b"a}{b", b"a}{b"),
    ],
)
def test_a_segment_is_the_text_in_the_first_braces(req_id: bytes, segment: bytes, rest: bytes) -> None:
    assert (segment_of(req_id), without_segment(req_id)) == (segment, rest)


def test_a_call_costs_a_round_trip_a_server(pages: PageClient) -> None:
    pages.mexists([key(i, b"r%d" % i) for i in range(64)])  # it has asked for their capabilities
    assert pages._several
    peers = pages._several.peers
    for ask in (
        lambda: pages.mset_blocks(NAMES, SHAPE, BODIES),
        lambda: read(pages),
        lambda: pages.prefix(NAMES, pages_per_block=SHAPE.pages, lease_ms=1000),
    ):
        before = peers.round_trips
        ask()
        assert peers.round_trips - before == 3


def test_a_prefix_over_all_servers_ends_at_the_first_hole(pages: PageClient) -> None:
    pages.mset_blocks(NAMES, SHAPE, BODIES)
    for hole in (0, 5, 31, 63):
        assert pages.delete_request(*[NAMES[hole][0]]) == SHAPE.pages
        assert pages.prefix(NAMES, pages_per_block=SHAPE.pages) == hole
        pages.set_block(NAMES[hole], SHAPE, BODIES[hole])
    assert pages.prefix(NAMES, pages_per_block=SHAPE.pages, lease_ms=1000) == len(NAMES)
    states = [(*NAMES[2], 3), (b"nobody's", 0, 4), (*NAMES[4], 5), (*NAMES[5], 5)]
    assert pages.lengths(NAMES, states, pages_per_block=SHAPE.pages, lease_ms=1000) == [3, 5]
    assert pages.lease(NAMES[3][0], 1000) == 1


# -- lengths -----------------------------------------------------------------------------------------------------------


def state(number: int, need: int) -> StateName:
    return b"{state-%d}" % number, 0, need


def set_states(pages: PageClient, *numbers: int) -> None:
    pages.mset_blocks([state(number, 1)[:2] for number in numbers], SHAPE, BODIES[: len(numbers)])


def leased(servers: list[RunningServer]) -> set[tuple[bytes, int]]:
    """Return the names of leased blocks and states on all servers."""
    found = set()
    for server in servers:
        with server.client() as client:
            for req_id in {key.split(b":")[1] for key in client.scan_iter("kv:*", count=10_000)}:
                for block in client.execute_command("KVPAGEINDEX", req_id):
                    stat = client.execute_command("KVPAGESTAT", req_id, 0, 0, block[b"page"], 0)
                    if stat[b"lease_left_ms"] > 0:
                        found.add((req_id, block[b"page"]))
    return found


def test_exactly_the_longest_length_is_leased(pages: PageClient, servers: list[RunningServer]) -> None:
    pages.mset_blocks([*NAMES[:9], *NAMES[10:]], SHAPE, [*BODIES[:9], *BODIES[10:]])
    set_states(pages, *range(8))
    states = [*(state(number, 5) for number in range(4)), state(4, 7), state(9, 7), state(5, 3), state(6, 20)]
    asked = {"pages_per_block": SHAPE.pages, "lease_ms": 60_000}
    assert pages.lengths(NAMES, states, pages_per_block=SHAPE.pages) == [3, 5]
    assert leased(servers) == set()
    assert pages._several
    before = pages._several.peers.round_trips
    assert pages.lengths(NAMES, states, **asked) == [3, 5]
    assert pages._several.peers.round_trips - before <= 2 * len(servers)
    assert leased(servers) == {*NAMES[:5], *(state(number, 5)[:2] for number in range(4))}


def test_lengths_of_very_many_blocks_and_states(pages: PageClient) -> None:
    names = [(b"{segment-%d}" % (i // 4), i) for i in range(700)]
    small = BlockShape(1, 1, 1, SHAPE.planes[:1])
    pages.mset_blocks(names, small, [bytes(small.nbytes)] * len(names))
    set_states(pages, 0)
    states = [state(need % 2, need) for need in range(1, 1000)]
    random.Random(1).shuffle(states)
    assert pages.lengths(names, states, pages_per_block=1, lease_ms=1000) == [*range(2, 701, 2)]


@pytest.mark.parametrize("lost", [NAMES[3], state(0, 5)[:2], state(1, 5)[:2]])
def test_a_length_that_is_lost_before_its_lease_is_omitted(
    pages: PageClient, servers: list[RunningServer], monkeypatch: pytest.MonkeyPatch, lost: tuple[bytes, int]
) -> None:
    pages.mset_blocks(NAMES[:8], SHAPE, BODIES[:8])
    set_states(pages, 0, 1, 2)
    examine = SideBySideCalls.examine

    def delete_before(calls: SideBySideCalls, names: Any, states: Any, count: int, lease_ms: int) -> Any:
        if lease_ms:
            pages.delete([PageKey(lost[0], 2, 1, lost[1], 1)])
        return examine(calls, names, states, count, lease_ms)

    monkeypatch.setattr(SideBySideCalls, "examine", delete_before)
    states = [state(0, 5), state(1, 5), state(2, 2)]
    assert pages.lengths(NAMES[:8], states, pages_per_block=SHAPE.pages, lease_ms=60_000) == [2]
    assert {*NAMES[:2], state(2, 2)[:2]} <= leased(servers)


def test_a_length_for_which_a_server_has_no_room_is_omitted() -> None:
    """At most half of a server's memory can be leased, and the second state has more."""
    with ExitStack() as stack:
        small = [stack.enter_context(start_server("--maxmemory", "256kb")) for _ in range(2)]
        pages = stack.enter_context(PageClient(url_of(small), deadline=30))
        names, states = NAMES[:2], [state(0, 1), state(1, 2)]
        pages.mset_blocks([*names, states[0][:2]], SHAPE, BODIES[:3])
        large = BlockShape(1, 1, 1200, SHAPE.planes[:1])
        pages.set_block(states[1][:2], large, bytes(large.nbytes))
        assert pages.lengths(names, states, pages_per_block=SHAPE.pages) == [1, 2]
        assert pages.lengths(names, states, pages_per_block=SHAPE.pages, lease_ms=60_000) == [1]


# -- unavailable servers -----------------------------------------------------------------------------------------------


@contextmanager
def hung(server: RunningServer) -> Iterator[None]:
    server.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        server.process.send_signal(signal.SIGCONT)


def belongs_to(server: RunningServer) -> list[bool]:
    with PageClient(server.url, deadline=30) as alone:
        return read(alone)


def test_a_server_that_hangs_costs_its_pages_and_is_found_again(servers: list[RunningServer]) -> None:
    flush(servers)
    with PageClient(url_of(servers), deadline=30, node_deadline=4) as pages:
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        its_own = belongs_to(servers[0])
        first = its_own.index(True)
        with hung(servers[0]):
            assert read(pages) == [not its for its in its_own]
            assert pages.misses == {"gone": sum(its_own)}
            assert pages.prefix(NAMES, pages_per_block=SHAPE.pages) == first
            others = [name for name, its in zip(NAMES, its_own, strict=True) if not its]
            pages.mset_blocks(others, SHAPE, [BODIES[i] for _, i in others])
            with pytest.raises(PageClientError):
                pages.mset_blocks(NAMES, SHAPE, BODIES, deadline=10)
        until(lambda: all(read(pages)))


def test_a_killed_server_costs_its_pages_and_is_replaced() -> None:
    with ExitStack() as stack:
        two = [stack.enter_context(start_server()), stack.enter_context(start_server(killed=True))]
        with PageClient(url_of(two), deadline=30) as pages:
            pages.mset_blocks(NAMES, SHAPE, BODIES)
            its_own = belongs_to(two[1])
            two[1].stop(signal.SIGKILL)
            assert read(pages) == [not its for its in its_own]
            with pytest.raises(Disconnected):
                pages.mset_blocks(NAMES, SHAPE, BODIES)
            with start_server(port=two[1].port):
                pages.mset_blocks(NAMES, SHAPE, BODIES)
                assert all(read(pages))


def test_without_a_server_the_error_says_so() -> None:
    with PageClient("redis://127.0.0.1:1,redis://127.0.0.1:2", deadline=5) as pages:
        with pytest.raises(Disconnected, match=r"127.0.0.1:[12]"):
            read(pages)
        with pytest.raises(Disconnected, match=r"127.0.0.1:[12]"):
            pages.mset_blocks(NAMES, SHAPE, BODIES)


def test_bad_weather_before_a_server_never_becomes_wrong_bytes(servers: list[RunningServer]) -> None:
    """Single pages, whose checksums travel with them."""
    flush(servers)
    written = batch(200, rows=64)
    written = [page._replace(key=key(i, b"r%d" % i)) for i, page in enumerate(written)]
    keys = [page.key for page in written]
    with start_proxy(servers[0].port) as proxy:
        url = ",".join([proxy.url, *(server.url for server in servers[1:])])
        with PageClient(url, deadline=30) as pages:
            pages.mset(written)
        proxy.weather = Weather(flips=60, cuts=30, truncations=30, delays=60)
        with PageClient(url, deadline=5, node_deadline=0.3, retry=NO_RETRY) as pages:
            some = 0
            for _ in range(40):
                into = room(written)
                try:
                    found = pages.mget_into(keys, into)
                except PageClientError:
                    continue
                some += sum(found)
                assert all(same(a, page) for a, page, there in zip(into, written, found, strict=True) if there)
        assert some


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_a_refusal_of_one_server_is_raised(servers: list[RunningServer]) -> None:
    with (
        start_redis("--requirepass", "secret") as locked,
        PageClient(f"{servers[0].url},{locked.url}", deadline=30) as pages,
        pytest.raises(Refused, match="NOAUTH"),
    ):
        pages.mset_blocks(NAMES, SHAPE, BODIES)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://a:1,redis://a:1", "redis://a:1 is named 2 times"),
        ("redis://u:x@a:1,redis://a:1", "redis://a:1 is named 2 times"),
        ("redis://a:1,b:2", "several servers are redis://host:port,redis://host:port"),
        ("redis://a:1,", "several servers are"),
        ("redis://a:1,http://b:1", "a server's URL begins with redis:"),
    ],
)
def test_a_list_that_makes_no_sense_is_refused(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        PageClient(url)


def test_an_error_names_the_item_of_the_whole_batch(pages: PageClient) -> None:
    bodies: list[Any] = [*BODIES[:40], bytes(3), *BODIES[41:]]
    with pytest.raises(BadBuffer, match="block 40"):
        pages.mset_blocks(NAMES, SHAPE, bodies)
