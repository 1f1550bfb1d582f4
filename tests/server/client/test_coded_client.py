"""Clients that send and receive blocks in the lossless code: the same blocks, the faster way, and damage is a miss."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import redis
from keyspaces import cache
from page_batches import NO_RETRY
from proxy import start_proxy
from servers import RunningServer

from kvpage_server.client import AsyncPageClient, PageClient, PageClientError, Refused
from kvpage_server.client.commands import BlockCode, block_code
from kvpage_server.page import BlockShape, DType, Plane

SHAPE = BlockShape(4, 4, 128, (Plane(0, DType.BFLOAT16, 64), Plane(1, DType.BFLOAT16, 64)))  # 0.5 MiB
NOISE = BlockShape(4, 4, 128, (Plane(0, DType.INT8, 64),))
NAMES = [(b"r", page) for page in range(6)]


def body_of(shape: BlockShape, seed: int) -> bytes:
    if shape is NOISE:
        return random.Random(seed).randbytes(shape.nbytes)
    return cache(seed, shape.page_size, DType.BFLOAT16, shape.pages)


BODIES = [body_of(SHAPE, seed) for seed in range(len(NAMES))]


def room(shape: BlockShape, count: int) -> list[Any]:
    return [np.zeros(shape.nbytes, np.uint8) for _ in range(count)]


class Awaiting:
    """AsyncPageClient as a client for threads, with a loop of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = AsyncPageClient(url, **options)

    def __enter__(self) -> Awaiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return found if not callable(found) else lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))


@pytest.fixture(params=[PageClient, Awaiting], ids=["threads", "asyncio"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def coded(kind: Any, server: RunningServer, client: redis.Redis) -> Iterator[Any]:
    with kind(server.url, code="always", deadline=30) as coded:
        yield coded


def calls(client: redis.Redis) -> set[str]:
    return {name.removeprefix("cmdstat_") for name in client.info("commandstats")}


def test_blocks_travel_in_the_code_both_ways(coded: Any, client: redis.Redis) -> None:
    client.config_resetstat()
    coded.mset_blocks(NAMES, SHAPE, BODIES)
    into = room(SHAPE, len(NAMES) + 1)
    assert coded.fetch_blocks_into([*NAMES, (b"none", 0)], SHAPE, into) == [None] * 6 + ["absent"]
    assert [bytes(one) for one in into[:6]] == BODIES
    assert {"kvblocksetcoded", "kvblockmgetcoded"} <= calls(client)
    assert not calls(client) & {"kvblockset", "kvblockmget", "kvblockget"}
    assert coded.code.received.raw_bytes == 6 * SHAPE.nbytes
    assert coded.code.received.raw_bytes > 1.3 * coded.code.received.coded_bytes
    assert coded.misses == Counter({"absent": 1})
    with PageClient(f"redis://127.0.0.1:{client.connection_pool.connection_kwargs['port']}") as raw:
        assert raw.fetch_blocks_into(NAMES, SHAPE, into[:6]) == [None] * 6
        assert [bytes(one) for one in into[:6]] == BODIES


def test_bodies_in_pieces_and_several_connections(kind: Any, server: RunningServer, client: redis.Redis) -> None:
    with kind(server.url, code="always", deadline=30, connections=3) as coded:
        pieces = [[body[:1000], body[1000:1000], body[1000:]] for body in BODIES]
        coded.mset_blocks(NAMES, SHAPE, pieces)
        into = room(SHAPE, len(NAMES))
        assert coded.mget_blocks_into(NAMES, SHAPE, into) == [True] * 6
        assert [bytes(one) for one in into] == BODIES


def test_blocks_without_a_code_travel_raw(coded: Any, client: redis.Redis) -> None:
    client.config_resetstat()
    bodies = [body_of(NOISE, seed) for seed in range(3)]
    coded.mset_blocks(NAMES[:3], NOISE, bodies)
    into = room(NOISE, 3)
    assert coded.fetch_blocks_into(NAMES[:3], NOISE, into) == [None] * 3
    assert [bytes(one) for one in into] == bodies
    noise = random.Random(1).randbytes(SHAPE.nbytes)  # of a dtype that has a code
    coded.mset_blocks([(b"n", 0), (b"n", 1)], SHAPE, [noise, BODIES[0]])
    into = room(SHAPE, 2)
    assert coded.fetch_blocks_into([(b"n", 0), (b"n", 1)], SHAPE, into) == [None, None]
    assert [bytes(one) for one in into] == [noise, BODIES[0]]
    assert {"kvblockset", "kvblocksetcoded", "kvblockmget", "kvblockmgetcoded"} <= calls(client)


def test_a_block_of_another_shape_is_a_miss(coded: Any, client: redis.Redis) -> None:
    smaller = BlockShape(2, 4, 128, SHAPE.planes)
    coded.mset_blocks([(b"r", 0)], smaller, [body_of(smaller, 1)])
    coded.mset_blocks([(b"r", 1)], NOISE, [body_of(NOISE, 1)])
    half = BlockShape(4, 4, 128, tuple(Plane(plane.kv_type, DType.FLOAT16, 64) for plane in SHAPE.planes))
    coded.mset_blocks([(b"r", 2)], half, [cache(1, 128, DType.FLOAT16, SHAPE.pages)])
    names = [(b"r", 0), (b"r", 1), (b"r", 2)]
    assert coded.fetch_blocks_into(names, SHAPE, room(SHAPE, 3)) == ["shape"] * 3
    assert coded.misses == Counter({"shape": 3})


def test_damage_on_the_way_is_a_miss_or_an_error(kind: Any, server: RunningServer, client: redis.Redis) -> None:
    """Bytes of the head of a reply, and of its code, are changed, one after the other."""
    with kind(server.url, code="always") as coded:
        coded.mset_blocks(NAMES[:1], SHAPE, BODIES[:1])
        length = coded.code.sent.coded_bytes
    reasons, rng = Counter[str](), random.Random(5)
    with start_proxy(server.port) as proxy:
        for at in [*range(0, 70, 3), *(rng.randrange(length) for _ in range(20))]:
            passed, proxy.flip_at = proxy._passed, None
            into = room(SHAPE, 1)
            with kind(proxy.url, code="always", deadline=1, retry=NO_RETRY) as coded:
                try:
                    coded.prefix([(b"none", 0)], pages_per_block=1)  # connects
                    proxy.flip_at = proxy._passed - passed + at
                    [why] = coded.fetch_blocks_into(NAMES[:1], SHAPE, into)
                except PageClientError as error:
                    why = type(error).__name__
                assert why is not None or bytes(into[0]) == BODIES[0]
                reasons[why or "unchanged"] += 1
    assert reasons["code"] > 20, reasons
    assert reasons["checksum"] > 0, reasons  # a busy machine reaches the deadline instead
    assert reasons["unchanged"] < 3, reasons


def test_in_auto_a_local_server_gets_raw_blocks(kind: Any, server: RunningServer, client: redis.Redis) -> None:
    client.config_resetstat()
    with kind(server.url, deadline=30) as pages:
        assert pages.code is None
        pages.mset_blocks(NAMES, SHAPE, BODIES)
        assert pages.fetch_blocks_into(NAMES, SHAPE, room(SHAPE, 6)) == [None] * 6
    assert not calls(client) & {"kvblocksetcoded", "kvblockmgetcoded"}
    assert block_code("auto", is_local=False) is not None
    assert block_code("never", is_local=False) is None
    with pytest.raises(ValueError, match="code must be one of auto, always, never"):
        kind(server.url, code="sometimes")


def test_a_user_without_the_right_gets_raw_blocks(kind: Any, server: RunningServer, client: redis.Redis) -> None:
    client.execute_command("ACL", "SETUSER", "old", "on", ">secret", "~*", "+@all", "-kvblockmgetcoded")
    try:
        with kind(server.url, code="always", username="old", password="secret", deadline=30) as pages:
            pages.mset_blocks(NAMES, SHAPE, BODIES)
            into = room(SHAPE, 6)
            assert pages.fetch_blocks_into(NAMES, SHAPE, into) == [None] * 6
            assert [bytes(one) for one in into] == BODIES
            assert pages.code is None
            pages.mset_blocks(NAMES, SHAPE, BODIES)
        client.execute_command("ACL", "SETUSER", "old", "-kvblockmget")
        with (
            kind(server.url, code="always", username="old", password="secret", deadline=30) as pages,
            pytest.raises(Refused, match="NOPERM"),
        ):
            pages.fetch_blocks_into(NAMES, SHAPE, into)
    finally:
        client.execute_command("ACL", "DELUSER", "old")


def test_a_plain_redis_gets_pages(kind: Any, redis_server: RunningServer) -> None:
    with kind(redis_server.url, code="always", deadline=30) as pages:
        pages.mset_blocks(NAMES[:1], SHAPE, BODIES[:1])
        into = room(SHAPE, 1)
        assert pages.fetch_blocks_into(NAMES[:1], SHAPE, into) == [None]
        assert bytes(into[0]) == BODIES[0]


# -- the choice --------------------------------------------------------------------------------------------------------


def code_with(encoder: float, decoder: float) -> BlockCode:
    """Return a choice with measured rates of the codec, in GB/s."""
    code = BlockCode(always=False)
    code.encoder.observe(encoder * 1e9, 1)
    code.decoder.observe(decoder * 1e9, 1)
    code.coded(code.sent, SHAPE, 1420, 1000)
    return code


def test_an_unknown_link_is_measured_with_raw_blocks() -> None:
    code = code_with(2.2, 3.7)
    assert not code.chooses(code.received, SHAPE, 100)
    code.moved(code.received, 1000, 1)  # too small to measure
    assert not code.chooses(code.received, SHAPE, 100)
    code.moved(code.received, 250_000_000, 1)
    assert code.chooses(code.received, SHAPE, 100)
    assert not code.chooses(code.sent, SHAPE, 100)


@pytest.mark.parametrize(
    ("gbytes", "receives", "sends"), [(0.25, True, True), (0.8, True, False), (1.25, False, False)]
)
def test_the_code_is_chosen_below_the_break_even(gbytes: float, receives: bool, sends: bool) -> None:
    code = code_with(2.2, 3.7)
    for link, wanted in ((code.received, receives), (code.sent, sends)):
        code.moved(link, int(gbytes * 1e9), 1)
        assert code.chooses(link, SHAPE, 100) is wanted


def test_a_slow_encoder_or_decoder_lowers_the_break_even() -> None:
    assert code_with(0.1, 3.7).break_even(1.42, receives=True) < 0.1e9
    assert code_with(2.2, 0.1).break_even(1.42, receives=True) < 0.1e9
    assert 0.9e9 < code_with(2.2, 3.7).break_even(1.42, receives=True) < 1.2e9
    unmeasured = BlockCode(always=False)
    assert unmeasured.break_even(1.42, receives=True) > 1e6


def test_small_transfers_and_other_dtypes_stay_raw() -> None:
    code = code_with(2.2, 3.7)
    code.moved(code.received, 2_000_000, 100)
    assert code.chooses(code.received, SHAPE, 1)
    assert not code.chooses(code.received, BlockShape(1, 1, 16, SHAPE.planes), 1)
    assert not code.chooses(code.received, NOISE, 100)


def test_some_transfers_measure_the_other_way() -> None:
    code = code_with(2.2, 3.7)
    code.moved(code.received, 2_000_000, 100)
    chosen = [code.chooses(code.received, SHAPE, 100) for _ in range(100)]
    assert 95 <= sum(chosen) < 100


def test_the_code_ends_if_it_is_slower_than_raw_blocks() -> None:
    """A busy server encodes more slowly than this machine."""
    code = code_with(2.2, 3.7)
    code.moved(code.received, 500_000_000, 1)
    for _ in range(4):
        assert code.chooses(code.received, SHAPE, 100)
        code.moved(code.received, 250_000_000, 1, coded=True)
    chosen = [code.chooses(code.received, SHAPE, 100) for _ in range(100)]
    assert 0 < sum(chosen) <= 5
    for _ in range(10):
        code.moved(code.received, 600_000_000, 1, coded=True)
    assert sum(code.chooses(code.received, SHAPE, 100) for _ in range(100)) > 95


def test_blocks_without_a_code_end_the_code() -> None:
    code = code_with(2.2, 3.7)
    code.moved(code.received, 2_000_000, 100)
    assert code.chooses(code.received, SHAPE, 1)
    for _ in range(10):
        code.coded(code.received, SHAPE, SHAPE.nbytes, None)
    assert not code.chooses(code.received, SHAPE, 1)
